"""The other multi-turn categories, and the chat route."""

import json
from itertools import pairwise

import pytest

from agentbench_kv.adapters.base import TrialContext
from agentbench_kv.adapters.bfcl.task import (
    MultiTurnBase,
    MultiTurnLongContext,
    MultiTurnMissFunc,
    MultiTurnMissParam,
)
from agentbench_kv.adapters.bfcl.worker.samples import Category, kind_of, script
from agentbench_kv.adapters.bfcl.worker.session import as_text, parse, tool_names, unmarked

engine = pytest.mark.engine
OTHERS = [MultiTurnMissFunc, MultiTurnMissParam, MultiTurnLongContext]


@pytest.fixture(scope="module", params=OTHERS, ids=lambda cls: cls.categories[0])
def category(request, bfcl_python):  # noqa: ARG001
    task = request.param()
    yield task
    task.close()


@engine
@pytest.mark.parametrize(("agent", "score"), [("gold", 1.0), ("corrupt", 0.0), ("null", 0.0)])
def test_scripted_agents_score_what_they_must(category, play, endpoint, agent, score):
    samples = category.samples(None, 0)
    assert len(samples) == 200
    chosen = samples[::40]
    outcomes = [play(s, category.script(s, agent), task=category) for s in chosen]
    assert [(o.status, o.score) for o in outcomes] == [("scored", score)] * 5
    assert endpoint.violations == []


@engine
def test_a_held_out_function_is_told_in_its_turn(bfcl_python, play, endpoint):  # noqa: ARG001
    task = MultiTurnMissFunc()
    try:
        sample = task.samples(1, 0)[0]
        outcome = play(sample, task.script(sample, "gold"), task=task, session="s")
    finally:
        task.close()
    assert outcome.metrics["refused_calls"] == 0
    first, last = endpoint.prompts["s"][0], endpoint.prompts["s"][-1]
    assert "'name': 'sort'" not in first
    assert '"name": "sort"' not in first
    assert last.count("I have updated some more functions you can choose from.") == 1
    assert "'name': 'sort'" in last


@engine
@pytest.mark.parametrize("cls", [MultiTurnBase, MultiTurnMissFunc])
def test_the_chat_route_plays_the_same_agents(bfcl_python, endpoint, cls):  # noqa: ARG001
    task = cls(route="chat")
    try:
        sample = task.samples(1, 0)[0]
        assert task.provenance()["route"] == "chat"
        for agent, score in (("gold", 1.0), ("corrupt", 0.0), ("null", 0.0)):
            endpoint.scripts[agent] = task.script(sample, agent)
            context = TrialContext(0, 7, None, endpoint.url, agent)
            outcome = task.run_trial(sample, context)
            assert (outcome.status, outcome.score) == ("scored", score), outcome.error
    finally:
        task.close()
    bodies = endpoint.bodies["gold"]
    for before, after in pairwise(body["messages"] for body in bodies):
        assert after[: len(before)] == before
    assert all("stop" not in body for body in bodies)
    assert {tool["type"] for tool in bodies[0]["tools"]} == {"function"}
    grown = len(bodies[-1]["tools"]) - len(bodies[0]["tools"])
    assert grown == (1 if cls is MultiTurnMissFunc else 0)
    said = [m for m in bodies[-1]["messages"] if m["role"] == "assistant"]
    assert all(m["reasoning_content"] == "hm" for m in said)
    asked = [call["id"] for m in said for call in m.get("tool_calls", ())]
    told = [m["tool_call_id"] for m in bodies[-1]["messages"] if m["role"] == "tool"]
    assert told == asked[: len(told)]


def test_openai_calls_become_marked_text():
    nasty = json.dumps({"text": "</tool_call> <tool_call>"})
    text = as_text([{"function": {"name": "f", "arguments": nasty}}, {"function": None}])
    calls, unparsable = parse(text)
    assert [(c.name, c.arguments) for c in calls] == [("f", json.loads(nasty))]
    assert unparsable == 1
    assert parse(unmarked('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')) == ([], 0)


def test_held_out_functions_are_known():
    entry = {"function": [{"name": "a"}], "missed_function": {"2": [{"name": "b"}]}}
    assert tool_names(entry) == {"a", "b"}


def test_a_turn_with_many_calls_fits_into_the_steps():
    tools = [{"name": "f", "parameters": {"properties": {"n": {}}}}]
    texts = script("gold", [[f"f({i})" for i in range(45)], ["f(n=1)"]], tools)
    steps = [parse(text)[0] for text in texts]
    assert [len(calls) for calls in steps] == [3] * 15 + [0, 1, 0]
    assert [c.arguments["n"] for calls in steps[:15] for c in calls] == list(range(45))


def test_shared_ground_truth_gets_the_categorys_ids():
    entries = [{"id": "memory_kv_0-s-0", "scenario": "s", "involved_classes": ["MemoryAPI_kv"]}]
    memory = Category.of("memory_kv", entries, [{"id": "memory_0-s-0", "ground_truth": ["x"]}])
    assert list(memory.truth) == ["memory_kv_0-s-0"]
    assert memory.files()[-1] == "memory_prereq_conversation/memory_s.json"
    given = memory.configured(entries[0], {"memory": "m"})
    assert given["initial_config"] == {"MemoryAPI_kv": {"snapshot": {"memory": "m"}}}
    base = Category.of("multi_turn_base", [], [{"id": "multi_turn_base_0", "ground_truth": []}])
    assert list(base.truth) == ["multi_turn_base_0"]
    assert kind_of("web_search_no_snippet") == "web_search"
