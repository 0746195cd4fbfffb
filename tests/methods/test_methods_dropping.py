"""What drop policies name: presets as their vendors describe them, and rules that always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.conformance.drop_checks import random_history
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.dropping.policy import Drop, History, Part, Role, What, saved
from agentbench_kv.registry import make_method

RESULT, INPUTS, THOUGHTS, MESSAGE = What.RESULT, What.INPUTS, What.THOUGHTS, What.MESSAGE


def history(script: str, *, tokens: int, context: int = 200_000, **sizes: int) -> History:
    """Return a history from letters: system, user, answer, call, result.

    A call asks as many tools as results follow, which are named get and put in turn.
    """
    size = {"s": 100, "u": 20, "a": 30, "c": 40, "r": 1000} | sizes
    parts, results = [], 0
    for at, letter in enumerate(script):
        role = {"s": Role.SYSTEM, "u": Role.USER, "r": Role.TOOL}.get(letter, Role.ASSISTANT)
        tools: tuple[str, ...] = ()
        if letter == "c":
            asked = len(script[at + 1 :]) - len(script[at + 1 :].lstrip("r"))
            tools = tuple(("get", "put")[(results + n) % 2] for n in range(asked))
        if letter == "r":
            tools, results = (("get", "put")[results % 2],), results + 1
        thoughts = 50 if letter in "ca" else 0
        parts.append(
            Part(role, size[letter], thoughts, inputs=25 if letter == "c" else 0, tools=tools)
        )
    return History(parts, tokens, context)


def results_of(script: str, *which: int) -> set[Drop]:
    places = [at for at, letter in enumerate(script) if letter == "r"]
    return {Drop(places[n], RESULT) for n in which}


# Six recorded conversations, as what each step is: an agent's file edits, a browser session, one
# question with ten lookups, parallel calls, a chat with hardly a tool, a long one with thoughts.
EDITS = "sucrcrcrcrcra"
BROWSER = "sucrcrcrcrcrcrcraucrcra"
LOOKUPS = "su" + "cr" * 10 + "a"
PARALLEL = "sucrrrcrrcra"
CHAT = "suauaucraua"
LONG = "su" + "cracrau" * 5


@pytest.mark.parametrize(
    ("script", "tokens", "gone"),
    [
        # The Claude API: above 100,000 tokens all results but those of the last three uses.
        (EDITS, 100_000, ()),
        (EDITS, 100_001, (0, 1)),
        (BROWSER, 150_000, (0, 1, 2, 3, 4, 5)),
        (LOOKUPS, 120_000, tuple(range(7))),
        (PARALLEL, 120_000, (0, 1, 2)),
        (CHAT, 190_000, ()),
        (LONG, 100_500, tuple(range(7))),
    ],
)
def test_anthropic(script: str, tokens: int, gone: tuple[int, ...]) -> None:
    method = make_method("clear-tools@anthropic", None)
    assert method.decide(history(script, tokens=tokens)) == results_of(script, *gone)


def test_anthropic_settings() -> None:
    def gone(**settings: str) -> frozenset[Drop]:
        method = make_method("clear-tools@anthropic", None, settings)
        return method.decide(history(LOOKUPS, tokens=120_000))

    # Ten results of 1,000 tokens: seven can go.
    assert gone(clear_at_least="7000") == results_of(LOOKUPS, *range(7))
    assert gone(clear_at_least="7001") == frozenset()
    assert gone(exclude="put") == results_of(LOOKUPS, 0, 2)
    assert gone(exclude="put, get") == frozenset()
    assert gone(keep="0") == results_of(LOOKUPS, *range(10))
    calls = {Drop(2 + 2 * n, INPUTS) for n in range(7)}
    assert gone(clear_inputs="on") == results_of(LOOKUPS, *range(7)) | calls


def test_arguments_leave_with_the_last_result_of_their_message() -> None:
    method = make_method("clear-tools@anthropic", None, {"clear_inputs": "on", "keep": "4"})
    first_two = results_of(PARALLEL, 0, 1)  # of three that one message asked for
    assert method.decide(history(PARALLEL, tokens=120_000)) == first_two
    method = make_method("clear-tools@anthropic", None, {"clear_inputs": "on", "keep": "3"})
    all_three = results_of(PARALLEL, 0, 1, 2) | {Drop(2, INPUTS)}
    assert method.decide(history(PARALLEL, tokens=120_000)) == all_three


@pytest.mark.parametrize(
    ("script", "tokens", "thoughts", "gone"),
    [
        # inspect_ai: above nine tenths of the context; thoughts of the last answer stay.
        (EDITS, 90_000, (), ()),
        (EDITS, 90_001, (2, 4, 6, 8, 10), (0, 1)),
        (LOOKUPS, 99_000, tuple(range(2, 22, 2)), tuple(range(7))),
        (PARALLEL, 99_000, (2, 6, 9), (0, 1, 2)),
        (CHAT, 99_000, (2, 4, 6, 8), ()),
        (BROWSER, 99_000, (2, 4, 6, 8, 10, 12, 14, 16, 18, 20), tuple(range(6))),
    ],
)
def test_inspect(
    script: str, tokens: int, thoughts: tuple[int, ...], gone: tuple[int, ...]
) -> None:
    method = make_method("clear-tools@inspect", None)
    expected = results_of(script, *gone) | {Drop(n, THOUGHTS) for n in thoughts}
    answers = [at for at, letter in enumerate(script) if letter in "ac"]
    assert method.decide(history(script, tokens=tokens, context=100_000)) == {
        drop for drop in expected if drop.what is not THOUGHTS or drop.message in answers[:-1]
    }


@pytest.mark.parametrize(
    ("over", "gone"), [(0, 0), (1, 1), (1000, 1), (1001, 2), (6500, 7), (9000, 7)]
)
def test_budget_clears_no_more_than_it_takes(over: int, gone: int) -> None:
    method = make_method("clear-tools", 4096)
    found = method.decide(history(LOOKUPS, tokens=4096 + over))
    assert found == results_of(LOOKUPS, *range(gone))


@pytest.mark.parametrize("uses", [1, 2, 3, 4])
def test_fewer_uses_than_are_kept_all_stay(uses: int) -> None:
    method = make_method("clear-tools", 100)
    found = method.decide(history("su" + "cr" * uses, tokens=9000))
    assert found == results_of("su" + "cr" * uses, *range(uses - 3))


def test_what_the_model_has_not_read_stays() -> None:
    whole = history(LOOKUPS, tokens=9000)
    parts = [replace(p, fixed=n >= 6) for n, p in enumerate(whole.parts)]
    method = make_method("clear-tools", 100, {"keep": "0"})
    drops = method.decide(replace(whole, parts=parts))
    assert drops == results_of(LOOKUPS, 0, 1)


def test_random_clears_as_many_and_by_lot() -> None:
    method, old = make_method("random-tools", 4096), make_method("clear-tools", 4096)
    draws = [replace(history(LOOKUPS, tokens=7000), key=f"session {n}") for n in range(60)]
    found = [method.decide(draw) for draw in draws]
    assert {len(drops) for drops in found} == {len(old.decide(draws[0]))} == {3}
    places = [drop.message for drops in found for drop in drops]
    counts = [places.count(3 + 2 * n) for n in range(10)]
    # The last three uses stay, any other goes in about three of seven draws.
    assert counts[7:] == [0, 0, 0]
    assert min(counts[:7]) > 60 * 3 / 7 / 3
    assert len(set(found)) > 20


def test_random_clears_as_many_where_one_is_as_long_as_all_others() -> None:
    sizes = [3000, *[100] * 9]
    whole = history(LOOKUPS, tokens=5000)
    results = iter(sizes)
    parts = [replace(p, tokens=next(results)) if p.role is Role.TOOL else p for p in whole.parts]
    whole = replace(whole, parts=parts)
    for budget in (4900, 2500, 1950):
        many = len(make_method("clear-tools", budget).decide(whole))
        draws = [replace(whole, key=f"session {n}") for n in range(30)]
        found = {len(make_method("random-tools", budget).decide(draw)) for draw in draws}
        assert found == {many}


@pytest.mark.parametrize(
    ("tokens", "gone"),
    [(500, ()), (501, (3, 4)), (600, (3, 4)), (601, (3, 4, 5, 6)), (9999, (3, 4, 5, 6, 7, 8))],
)
def test_turn_window(tokens: int, gone: tuple[int, ...]) -> None:
    # Turns of 100 tokens, thoughts included: the first and the one under way stay.
    method = make_method("turn-window", 500)
    drops = method.decide(history("su" + "a" + "ua" * 3 + "u", tokens=tokens))
    assert drops == {Drop(n, MESSAGE) for n in gone}


def test_summarise_keeps_the_last_messages_and_whole_uses() -> None:
    script = "suacrrua"
    drops = make_method("summarise", 100, {"keep_messages": "3"}).decide(
        history(script, tokens=900)
    )
    # The last three begin with a result: the message that called stays with its results.
    assert drops == {Drop(n, MESSAGE) for n in (1, 2)}
    with pytest.raises(UsageError, match="exec=span: a summary is text"):
        make_method("summarise", 100, {"exec": "span"})


@pytest.mark.parametrize("name", ["turn-window", "summarise"])
def test_a_message_that_says_nothing_leaves_with_its_turn(name: str) -> None:
    """Else the result of a call that has left would stay alone."""
    script = "su" + "a" + "ucra" * 3 + "u"
    whole = history(script, tokens=9000)
    empty = [replace(p, tokens=0) if p.role is Role.TOOL else p for p in whole.parts]
    decide = make_method(name, 500).decide
    drops = decide(replace(whole, parts=empty))
    assert drops == decide(whole)
    assert {n for n, letter in enumerate(script) if letter == "r"} & {d.message for d in drops}
    parts = [
        replace(part, dropped=frozenset({MESSAGE})) if Drop(n, MESSAGE) in drops else part
        for n, part in enumerate(empty)
    ]
    assert not decide(replace(whole, parts=parts)) & drops


@given(seed=st.integers(0, 10**9), keep=st.integers(0, 8), budget=st.integers(1, 5000))
def test_rules_that_always_hold(seed: int, keep: int, budget: int) -> None:
    whole = random_history(seed)
    for name in ("clear-tools", "random-tools"):
        method = make_method(name, budget, {"keep": str(keep)})
        drops = method.decide(whole)
        uses = [n for n, part in enumerate(whole.parts) if part.role is Role.TOOL]
        kept = set(uses[max(0, len(uses) - keep) :])
        assert not kept & {drop.message for drop in drops}
        assert all(whole.parts[drop.message].left(drop.what) for drop in drops)
        enough = whole.tokens - budget
        if name == "random-tools":
            assert len(drops) == len(
                make_method("clear-tools", budget, {"keep": str(keep)}).decide(whole)
            )
        elif drops:
            # No drop too many: without the largest it would not have been enough.
            sizes = [whole.parts[drop.message].left(drop.what) for drop in drops]
            assert saved(whole, drops) - max(sizes) < enough
        elif enough > 0:
            assert not any(whole.parts[n].left(RESULT) for n in set(uses) - kept)


def test_a_budget_is_asked_for_only_where_it_counts() -> None:
    with pytest.raises(UsageError, match="clear-tools needs a budget"):
        make_method("clear-tools", None)
    assert make_method("clear-tools@anthropic", None).takes_budget is False
    assert make_method("clear-tools", "10%").limit(history("su", tokens=1000)) == 100


def test_the_oracle_drops_what_is_not_needed_oldest_first_and_nothing_else() -> None:
    known = history(LOOKUPS, tokens=9_000)
    places = [n for n, part in enumerate(known.parts) if part.role is Role.TOOL]
    gone = {places[n] for n in (1, 2, 7)}
    parts = [replace(part, expired=n in gone) for n, part in enumerate(known.parts)]
    known = replace(known, parts=parts)
    decide = make_method("oracle-tools", 8_500).decide
    assert decide(known) == results_of(LOOKUPS, 1)
    assert decide(replace(known, tokens=8_500)) == frozenset()
    assert decide(replace(known, tokens=10_400)) == results_of(LOOKUPS, 1, 2)
    # What is needed stays, however much there is.
    assert decide(replace(known, tokens=50_000)) == results_of(LOOKUPS, 1, 2, 7)
    every = make_method("oracle-tools", 8_500, {"until": "all"}).decide
    assert every(known) == results_of(LOOKUPS, 1, 2, 7)
    assert every(replace(known, tokens=8_500)) == frozenset()
