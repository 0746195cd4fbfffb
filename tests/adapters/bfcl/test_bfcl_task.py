"""The task against a scripted endpoint, in the real bfcl environment where there is one."""

import json
from pathlib import Path

import pytest

from agentbench_kv.adapters import worker_child
from agentbench_kv.adapters.base import Sample, TrialContext
from agentbench_kv.adapters.bfcl.task import MultiTurnBase
from agentbench_kv.errors import PrerequisiteError, UsageError

engine = pytest.mark.engine
FIRST = Sample("multi_turn_base_0")
SPREAD = [Sample(f"multi_turn_base_{i}") for i in range(0, 200, 13)]


def say(name, **arguments):
    payload = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<think>\nhm\n</think>\n\n<tool_call>\n{payload}\n</tool_call>"


def results(outcome):
    return [r for step in outcome.transcript["steps"] for r in step["results"]]


def test_missing_environment_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.delenv("KVBENCH_ENV_BFCL", raising=False)
    with pytest.raises(PrerequisiteError) as caught:
        MultiTurnBase().samples(None, 0)
    wanted = "bfcl environment not found; create it with: kvbench env create bfcl"
    assert str(caught.value) == wanted


def test_no_endpoint_is_a_usage_error():
    with pytest.raises(UsageError, match="endpoint"):
        MultiTurnBase().run_trial(FIRST, TrialContext(0, 0, None, None, "s"))


def test_closing_twice_is_fine():
    task = MultiTurnBase()
    task.close()
    task.close()


@engine
def test_samples_in_the_official_order(bfcl):
    everything = bfcl.samples(None, 0)
    assert [s.id for s in everything] == [f"multi_turn_base_{i}" for i in range(200)]
    assert bfcl.samples(3, 99) == everything[:3]


@engine
def test_provenance(bfcl):
    about = bfcl.provenance()
    assert about["bfcl_eval"] == "2026.3.23"
    assert about["route"] == "raw"
    assert len(about["data_sha256"]) == len(about["prompt_sha256"]) == 64


@engine
@pytest.mark.parametrize(("agent", "score"), [("gold", 1.0), ("corrupt", 0.0), ("null", 0.0)])
def test_scripted_agents_score_what_they_must(bfcl, play, endpoint, agent, score):
    outcomes = [play(sample, bfcl.script(sample, agent)) for sample in SPREAD]
    assert [o.status for o in outcomes] == ["scored"] * len(SPREAD)
    assert [o.score for o in outcomes] == [score] * len(SPREAD)
    assert endpoint.violations == []


@engine
def test_what_a_trial_reports(bfcl, play, endpoint):
    script = bfcl.script(FIRST, "gold")
    outcome = play(FIRST, script, session="the session", max_tokens=50, temperature=0.5)
    prompts = endpoint.prompts["the session"]
    assert outcome.metrics == {
        "turns": 4,
        "steps": len(script),
        "calls": 10,
        "refused_calls": 0,
        "unparsable_calls": 0,
        "truncated_answers": 0,
        "first_prompt_tokens": len(prompts[0]) // 4,
        "error_type": None,
        "route": "raw",
    }
    assert outcome.transcript["text"] == prompts[-1] + script[-1]
    sent = endpoint.bodies["the session"][0]
    assert {tool["function"]["name"] for tool in sent["tools"]} >= {"mv", "cat"}
    assert {k: v for k, v in sent.items() if k not in ("prompt", "tools")} == {
        "model": "scripted",
        "max_tokens": 50,
        "temperature": 0.5,
        "seed": 7,
        "stop": ["<|im_end|>"],
    }


@engine
def test_same_trial_again_gives_the_same_prompts_and_score(bfcl, play, endpoint):
    for sample in SPREAD[:4]:
        script = bfcl.script(sample, "gold")
        outcomes = [play(sample, script, session=f"{sample.id} {i}") for i in range(3)]
        assert [o.score for o in outcomes] == [1.0] * 3
        assert endpoint.prompts[f"{sample.id} 0"] == endpoint.prompts[f"{sample.id} 2"]


@engine
def test_failed_trial_explains_itself(bfcl, play):
    outcome = play(FIRST, bfcl.script(FIRST, "null"))
    assert outcome.metrics["error_type"] == "multi_turn:empty_turn_model_response"
    assert "turn 0" in outcome.error


@engine
def test_refused_names_never_run_and_the_episode_goes_on(bfcl, play, tmp_path):
    target = tmp_path / "made-by-model"
    attacks = [
        say(f"__import__('pathlib').Path({str(target)!r}).touch"),
        say("print", text="x"),
        say("mkdir", **{f"dir_name=open({str(target)!r},'w'),x": 1}),
    ]
    outcome = play(FIRST, [*attacks, *bfcl.script(FIRST, "gold")])
    assert not target.exists()
    assert outcome.metrics["refused_calls"] == 2
    assert results(outcome)[1] == "Error during execution: name 'print' is not defined"
    assert results(outcome)[2] == "Error during execution: invalid syntax"
    assert outcome.score == 1.0


@engine
def test_unparsable_calls_are_counted_and_end_the_turn(bfcl, play):
    outcome = play(FIRST, ["<tool_call>\n{oops\n</tool_call>", *bfcl.script(FIRST, "null")])
    assert outcome.metrics["unparsable_calls"] == 1
    assert outcome.score == 0.0


@engine
def test_text_outside_ascii_stays_as_it_is(play, endpoint):
    calls = [say("touch", file_name="grüße.txt"), say("echo", content="naïve 🙂"), say("ls")]
    outcome = play(FIRST, calls, session="s")
    assert "grüße.txt" in endpoint.prompts["s"][1]
    assert "naïve 🙂" in outcome.transcript["text"]


@engine
def test_twenty_first_step_ends_the_trial(play):
    outcome = play(FIRST, lambda _prompt, _index: say("ls"))
    assert (outcome.status, outcome.score) == ("turn_limit", None)
    assert outcome.metrics["steps"] == 21
    assert outcome.metrics["error_type"] == "multi_turn:force_terminated"


@engine
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        ((500, {"error": "boom"}), "engine_error"),
        ((200, {"choices": []}), "engine_error"),
        ((400, {"error": {"code": "context_length_exceeded"}}), "context_limit"),
    ],
)
def test_endpoint_failures_are_never_scored(play, endpoint, failure, status):
    endpoint.failure = failure
    outcome = play(FIRST, [])
    assert (outcome.status, outcome.score) == (status, None)
    assert outcome.error


@engine
def test_context_limit_in_the_middle_of_an_answer(play, endpoint):
    endpoint.finish_reason = "context_limit"
    outcome = play(FIRST, ["half a tho"])
    assert outcome.status == "context_limit"
    assert outcome.transcript["text"].endswith("half a tho")


@engine
def test_unreachable_endpoint_is_an_infrastructure_error(bfcl):
    context = TrialContext(0, 0, None, "http://127.0.0.1:9", "s")
    assert bfcl.run_trial(FIRST, context).status == "infra_error"


@engine
def test_trial_that_takes_too_long(bfcl, play, endpoint):
    endpoint.release.clear()
    outcome = play(FIRST, [], timeout_s=0.5)
    assert (outcome.status, outcome.score) == ("timeout", None)
    endpoint.release.set()
    assert play(FIRST, bfcl.script(FIRST, "gold"), session="another").score == 1.0


@engine
def test_key_travels_in_the_request(monkeypatch, play, endpoint):
    monkeypatch.setenv("KVBENCH_API_KEY", "k1")
    play(FIRST, [])
    assert endpoint.headers["Authorization"] == "Bearer k1"


def test_worker_files_do_not_need_the_package():
    adapters = Path(worker_child.__file__).parent
    files = [
        *adapters.glob("*/worker/*.py"),
        adapters / "agent_client.py",
        adapters / "worker_child.py",
    ]
    assert len(files) > 5
    for file in files:
        lines = file.read_text().splitlines()
        assert not [x for x in lines if x.startswith(("import agentbench", "from agentbench"))]


@pytest.mark.slow
@engine
def test_fifty_gold_sessions_only_grow_and_prefill_a_fifth(bfcl, play, endpoint):
    stateless = extended = 0
    for sample in bfcl.samples(50, 0):
        texts = bfcl.script(sample, "gold")
        assert play(sample, texts, session=sample.id).score == 1.0
        before = 0
        for prompt, text in zip(endpoint.prompts[sample.id], texts, strict=True):
            stateless += len(prompt)
            extended += len(prompt) - before
            before = len(prompt) + len(text)
    assert endpoint.violations == []
    assert extended <= stateless / 5


@engine
@pytest.mark.parametrize("agent", ["gold", "corrupt", "null"])
def test_until_decided_gives_the_same_verdict_for_fewer_turns(bfcl, play, endpoint, agent):
    early = MultiTurnBase(until="decided")
    try:
        shorter = 0
        for sample in SPREAD:
            script = bfcl.script(sample, agent)
            whole = play(sample, script, session=f"{sample.id} whole")
            cut = play(sample, script, task=early, session=f"{sample.id} cut")
            assert (cut.status, cut.score, cut.error) == (whole.status, whole.score, whole.error)
            assert cut.metrics["error_type"] == whole.metrics["error_type"]
            sent, all_sent = (endpoint.prompts[f"{sample.id} {s}"] for s in ("cut", "whole"))
            assert sent == all_sent[: len(sent)]
            shorter += len(sent) < len(all_sent)
        assert shorter > 0 if agent != "gold" else shorter == 0
    finally:
        early.close()
