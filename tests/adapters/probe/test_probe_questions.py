"""Questions made by rule, checked by brute force."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.adapters.probe.questions import (
    Probe,
    candidates,
    make_probes,
    probes_sha,
)
from agentbench_kv.adapters.probe.session import ChatSession, tool_uses

NAMES = st.sampled_from(["get_order", "pay", "cd"])
KEYS = st.sampled_from(["status", "price", "zip", "owner"])
TEXTS = ["Lima harbour", "#W2378156", "ab", "x", "call", "true", "the result", "Yusuf Rossi"]
TEXTS += ["full size", "1234567890123", "blue-17"]
VALUES = st.sampled_from([*TEXTS, 42, 7, 4.5, 19122, True, None])
LEAVES = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(
    NAMES,
    st.dictionaries(KEYS, VALUES.filter(lambda value: value is not None), max_size=2),
    st.dictionaries(KEYS, LEAVES, max_size=3),
)


def session(calls: list[tuple[str, dict[str, Any], Any]], user: str = "Do it.") -> ChatSession:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": user},
    ]
    for number, (name, arguments, result) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": json.dumps(result)},
        ]
    messages.append({"role": "assistant", "content": "Done."})
    return ChatSession("s", tuple(messages))


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if not isinstance(value, dict | list):
        yield path, value
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield from walk(inner, (*path, key))


def text_of_path(path: tuple[Any, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.casefold()


def long_enough(text: str) -> bool:
    """Digits and signs one by one, words five letters at a time."""
    count = sum(-(-len(word) // 5) for word in re.findall(r"[A-Za-z]+", text))
    count += len(re.findall(r"[0-9]|[^\w\s]|_", text))
    return 2 <= count <= 12


def given_away(value: str, question: str) -> bool:
    squashed, asked = (re.sub(r"[^a-z0-9]", "", each.casefold()) for each in (value, question))
    words, others = (set(re.findall(r"[a-z0-9]+", t.casefold())) for t in (value, question))
    return squashed in asked or words <= others


OWN = {"true", "call", "the", "result", "value"}


def facts(calls: list[Any], which: int) -> list[tuple[int, tuple[Any, ...], Any]]:
    """Every leaf of all arguments (1) or results (2), with the number of its call."""
    return [
        (at, path, leaf)
        for at, call in enumerate(calls)
        for path, leaf in walk(call[which])
        if path and isinstance(leaf, str | int | float) and not isinstance(leaf, bool)
    ]


def alone(calls: list[Any], which: int, at: int, path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether no other call of the function has the value in such a place."""
    shape = [part for part in path if not isinstance(part, int)]
    depth = [isinstance(part, int) for part in path]
    same = [
        fact
        for fact in facts(calls, which)
        if calls[fact[0]][0] == calls[at][0]
        and [part for part in fact[1] if not isinstance(part, int)] == shape
        and [isinstance(part, int) for part in fact[1]] == depth
        and plain(fact[2]) == plain(leaf)
    ]
    return len(same) == 1


def wanted(calls: list[Any]) -> set[tuple[str, int, str, str]]:
    """Phase, call, key path and value of everything that may be asked for, by the rules' words."""
    found = set()
    for which, phase in ((2, "tool"), (1, "act")):
        for at, path, leaf in facts(calls, which):
            shown = dict(calls[at][1])
            if which == 1:
                del shown[path[0]]
            alike = [
                n
                for n, (name, arguments, _) in enumerate(calls)
                if name == calls[at][0]
                and (which == 2 or path[0] in arguments)
                and {k: v for k, v in arguments.items() if which == 2 or k != path[0]} == shown
            ]
            number = f", number {alike.index(at) + 1} of {len(alike)} such calls"
            asked = " ".join([
                *("Look back at the call of with In its result what is the value of did its",
                  "argument have Answer only", calls[at][0], text_of_path(path)),
                *(json.dumps(shown) if shown else "no other arguments",),
                *([number] if len(alike) > 1 else []),
            ])  # fmt: skip
            text = leaf if isinstance(leaf, str) else json.dumps(leaf)
            words = set(re.findall(r"[a-z0-9]+", text.casefold()))
            if (
                alone(calls, which, at, path, leaf)
                and long_enough(text)
                and not given_away(text, asked)
                and not words <= OWN
            ):
                found.add((phase, at, text_of_path(path), text))
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5))
def test_questions_are_those_that_the_rules_allow(calls: list[Any]) -> None:
    found = candidates(session(calls))
    said = {(p.phase, p.message // 2 - 1, p.key, p.value) for p in found if p.phase != "others"}
    assert said == wanted(calls)
    questions = [probe.question for probe in found]
    assert len(questions) == len(set(questions))


def answers(calls: list[Any], question: str) -> set[str]:
    """Read a question as a human would, and look its answers up."""
    of = re.search(r"call of (\w+) with (.*?)(?:, number (\d+) of (\d+) such calls)?\. ", question)
    key = re.search(r"(?:value of|argument) (\S+?)(?: have)?\? ", question)
    assert of is not None
    assert key is not None
    result = "In its result" in question
    shown = {} if of[2].startswith("no ") else json.loads(of[2])
    alike = []
    for name, arguments, returned in calls:
        rest = dict(arguments)
        if not result:
            if re.split(r"[.\[]", key[1])[0] not in rest:
                continue
            del rest[re.split(r"[.\[]", key[1])[0]]
        if name == of[1] and rest == shown:
            alike.append(returned if result else arguments)
    assert len(alike) == int(of[4] or 1)
    inside = alike[int(of[3] or 1) - 1]
    return {plain(leaf) for path, leaf in walk(inside) if text_of_path(path) == key[1]}


@settings(max_examples=200, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5))
def test_a_question_has_one_answer(calls: list[Any]) -> None:
    for probe in candidates(session(calls)):
        if probe.phase != "others":
            assert answers(calls, probe.question) == {probe.value.casefold()}, probe


@settings(max_examples=100, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 3))
def test_chosen_questions_are_frozen(calls: list[Any], count: int, seed: int) -> None:
    of = session(calls)
    chosen = make_probes(of, count, f"t/{seed}")
    assert chosen == make_probes(of, count, f"t/{seed}")
    assert chosen == make_probes(of, 64, f"t/{seed}")[:count]
    assert len({probe.value.casefold() for probe in chosen}) == len(chosen) <= count
    assert set(chosen) <= set(candidates(of))
    assert probes_sha(chosen) == probes_sha(make_probes(of, count, f"t/{seed}"))


def test_other_seeds_ask_other_questions() -> None:
    calls = [("get_order", {"zip": n}, {"price": 1000 + n}) for n in range(40)]
    shas = {probes_sha(make_probes(session(calls), 4, f"t/{seed}")) for seed in range(5)}
    assert len(shas) == 5


def test_phases_take_turns() -> None:
    calls = [("get_order", {"zip": 19000 + n, "owner": "me"}, {"price": 700 + n}) for n in range(9)]
    chosen = make_probes(session(calls, "My account number is 5512 and no other."), 8, "t/0")
    assert [probe.phase for probe in chosen[:5]] == ["tool", "act", "others", "tool", "act"]


def of_words(text: str) -> list[Probe]:
    return [p for p in candidates(session([], text)) if p.phase == "others"]


def test_plain_text_is_asked_for_by_the_words_before() -> None:
    (probe,) = of_words("Please help me. My zip code is 19122, and thank you.")
    assert probe.question == (
        "Look back at message number 1 of the user. What comes directly after the words “help me. "
        "My zip code is”? Answer with that value only."
    )
    assert probe.value == "19122"


@pytest.mark.parametrize(
    "text",
    [
        "My zip is 19122.\nYour zip is my zip is 7.",  # the words come twice
        "It is 19122.",  # too few words
        "Ask the function f(x_12, y_13).",  # inside code
        "My favourite number by far is 7.",  # too short
        "Here is my number 19122 of 19122.",  # the second is given away
    ],
)
def test_plain_text_that_is_not_asked_for(text: str) -> None:
    assert [probe.value for probe in of_words(text)] in ([], ["19122"])
    if "number 19122" not in text:
        assert not of_words(text)


def test_thoughts_are_asked_for() -> None:
    said = {
        "role": "assistant",
        "content": "Ok.",
        "reasoning_content": "The order to take is #W77.",
    }
    messages = ({"role": "user", "content": "Go."}, said)
    (probe,) = candidates(ChatSession("s", messages))
    assert (probe.phase, probe.value, probe.message) == ("think", "#W77", 1)
    assert "your thought number 1" in probe.question


def test_calls_of_one_id_take_a_result_each() -> None:
    calls = [
        {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("price", {}), ("odd", "no object"), ("stock", {}))
    ]
    results = [{"role": "tool", "tool_call_id": "", "content": str(n)} for n in range(2)]
    uses = tool_uses([{"role": "assistant", "content": None, "tool_calls": calls}, *results])
    assert [(use.name, use.result) for use in uses] == [("price", 1), ("stock", None)]
    del calls[1]
    uses = tool_uses([{"role": "assistant", "content": None, "tool_calls": calls}, *results])
    assert [(use.name, use.result) for use in uses] == [("price", 1), ("stock", 2)]


def test_results_find_their_calls_whatever_the_ids() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
        for name in ("a", "b")
    ]
    one = {"role": "assistant", "content": None, "tool_calls": calls}
    first = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    again = {"role": "assistant", "content": None, "tool_calls": calls[:1]}
    later = {"role": "tool", "tool_call_id": "a", "content": "later"}
    uses = tool_uses([one, *first, again, later])
    assert [(use.name, use.message, use.result) for use in uses] == [
        ("a", 0, 2),
        ("b", 0, 1),
        ("a", 3, 4),
    ]
