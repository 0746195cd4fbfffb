"""The engine suite passes the embedded engine, and fails every broken variant of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import conformance_broken_engines as broken
import pytest

from agentbench_kv.conformance import CheckResult, driver
from agentbench_kv.conformance.engines.fixture import (
    Fixture,
    Sessions,
    long_sessions,
    write_model,
)
from agentbench_kv.conformance.engines.memories import WAYS, memory_part
from agentbench_kv.conformance.engines.rewinds import check_rewinds
from agentbench_kv.conformance.engines.suite import (
    crowd_part,
    engine_suite,
    fork_part,
    leak_part,
    method_part,
    stop_part,
    tree_part,
)
from agentbench_kv.engines.base import Capability, EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import UsageError

TOKENS = "tokens are the embedded engine's"
REFERENCE = "tokens are the masked reference's"
KEPT = "kept sets are the embedded engine's"
ACCOUNTS = "accounting is the embedded engine's"
ALONE = "sessions together are as alone"
FORKED = "both sides of a fork are as if never forked"
FORCED = "a forced answer is as a decode of its tokens"
PREDICTED = "what would have been drawn is the embedded engine's"
REWOUND = "a rewound session is a fresh one of what stayed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def fixture_for(folder: Path) -> Iterator[Callable[[type], Fixture]]:
    made: list[Fixture] = []

    def make(cls: type) -> Fixture:
        made.append(Fixture(cls, folder))
        return made[-1]

    yield make
    for each in made:
        each.close()


def short() -> Sessions:
    """Return the suite's sessions without the long one: two or three events each."""
    return {name: steps for name, steps in long_sessions().items() if name != "long"}


def failed(results: list[CheckResult]) -> set[str]:
    return {result.name for result in results if not result.ok}


def test_only_the_engine_under_test_is_on_the_device(folder: Path) -> None:
    """What it is compared with is the same everywhere."""
    asked: list[str] = []

    class Noting(EmbeddedEngine):
        @classmethod
        def create(cls, options: EngineOptions) -> Self:
            asked.append(options.device)
            return super().create(replace(options, device="cpu"))

    fixture = Fixture(Noting, folder, device="cuda")
    method = fixture.method("full-constrained")
    try:
        results = method_part(fixture, method, sessions=short())
    finally:
        fixture.close()
    assert asked == ["cuda"]
    assert failed(results) == {"computes where it was asked to"}  # it is not
    with fixture.reference(method) as reference:
        assert reference.engine.info.device == "cpu"


def test_the_embedded_engine_passes(fixture_for: Callable[[type], Fixture]) -> None:
    one = fixture_for(EmbeddedEngine)
    method = one.method("agentkv")
    results = method_part(one, method) + stop_part(one, method)
    results += crowd_part(one, method) + leak_part(one, method, examples=2)
    assert not failed(results), results
    assert not any(result.skipped for result in results)
    assert len(results) == 22


@pytest.mark.parametrize("name", ["full", "streamingllm@paper"])
def test_the_embedded_engine_passes_with(name: str, fixture_for: Callable[[type], Fixture]) -> None:
    one = fixture_for(EmbeddedEngine)
    results = method_part(one, one.method(name), sessions=short())
    assert failed(results) <= {"events happen"}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (broken.KeptOffByOne, {TOKENS, KEPT}),
        (broken.RowsMisplaced, {TOKENS, REFERENCE}),
        (broken.RopeOffByOne, {TOKENS, REFERENCE}),
        (broken.BudgetOffByOne, {KEPT, ACCOUNTS}),
        (broken.PeakUnderstated, {ACCOUNTS}),
        (broken.CompanyMatters, {ALONE}),
    ],
)
def test_a_mistake_in_a_method_is_found(
    variant: type, expected: set[str], fixture_for: Callable[[type], Fixture]
) -> None:
    one = fixture_for(variant)
    assert expected <= failed(method_part(one, one.method("agentkv"), sessions=short()))


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (broken.StopsLate, "a stop text ends at its token"),
        (broken.CancelInexact, "goes on exactly after a cancel"),
        (broken.NoLimit, "too long a prompt is refused"),
    ],
)
def test_a_wrong_ending_is_found(
    variant: type, expected: str, fixture_for: Callable[[type], Fixture]
) -> None:
    one = fixture_for(variant)
    assert expected in failed(stop_part(one, one.method("agentkv")))


@pytest.mark.parametrize("name", ["agentkv", "full-constrained"])
def test_forks_and_forced_answers_pass(name: str, fixture_for: Callable[[type], Fixture]) -> None:
    one = fixture_for(EmbeddedEngine)
    results = fork_part(one, one.method(name))
    assert not failed(results), results
    assert [result.skipped for result in results] == [False, False, False]


@pytest.mark.parametrize(
    ("variant", "method", "detail"),
    [
        (EmbeddedEngine, "agentkv", ""),
        (EmbeddedEngine, "full-constrained", ""),
        (broken.CompactsOverForks, "agentkv", "another answer"),
        (broken.WritesOverForks, "full-constrained", "another answer"),
        (broken.Leaky, "full-constrained", "at the start"),
    ],
)
def test_trees_of_forks_are_exact_and_a_wrong_one_is_found(
    variant: type,
    method: str,
    detail: str,
    fixture_for: Callable[[type], Fixture],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if detail:
        monkeypatch.setattr(driver, "PATIENCE_S", 0.5)
    one = fixture_for(variant)
    (result,) = tree_part(one, one.method(method), 100)
    assert result.ok == (not detail), result
    assert detail in result.detail
    assert not result.skipped


@pytest.mark.parametrize(
    ("variant", "method", "expected"),
    [
        # Without events, after which each has a slot of its own.
        (broken.WritesOverForks, "full-constrained", {FORKED}),
        (broken.ForgetsWhen, "agentkv", {FORKED}),
        (broken.ReadsAnswers, "agentkv", {FORCED, PREDICTED}),
        (broken.EchoesAnswers, "agentkv", {PREDICTED}),
    ],
)
def test_a_wrong_fork_is_found(
    variant: type, method: str, expected: set[str], fixture_for: Callable[[type], Fixture]
) -> None:
    one = fixture_for(variant)
    assert failed(fork_part(one, one.method(method))) == expected


def test_wrong_predictions_in_a_crowd_are_found(fixture_for: Callable[[type], Fixture]) -> None:
    one = fixture_for(broken.EchoesAnswers)
    found = failed(crowd_part(one, one.method("full-constrained")))
    assert found == {"what would have been drawn is, in a small pool too"}


@pytest.mark.parametrize(
    ("variant", "method", "expected", "detail"),
    [
        (broken.RewindsOverForks, "full", REWOUND, "a fork: other tokens"),
        (broken.RewindsRowsOnly, "full", REWOUND, "half of the answer: other tokens"),
        (broken.RewindKeepsPending, "full", REWOUND, "what was never fed: logical"),
        (broken.RewindLeaks, "full", REWOUND, "at the start"),
        (broken.RewindsAnything, "full", REWOUND, "were rewound to -1"),
        (broken.RewindsAnything, "agentkv", "a rewind is refused", "was rewound"),
    ],
)
def test_a_wrong_rewind_is_found(
    variant: type,
    method: str,
    expected: str,
    detail: str,
    fixture_for: Callable[[type], Fixture],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "PATIENCE_S", 0.5)
    one = fixture_for(variant)
    asked = one.method(method)
    with one.reference(asked) as reference:
        result = check_rewinds(one.driver(asked), reference)
    assert (result.name, result.ok) == (expected, False)
    assert detail in result.detail


@pytest.mark.parametrize("sets", WAYS)
def test_a_memory_passes(sets: str, fixture_for: Callable[[type], Fixture]) -> None:
    results = memory_part(fixture_for(EmbeddedEngine), sets)
    assert not failed(results), results
    assert not any(result.skipped for result in results)


@pytest.mark.parametrize("sets", WAYS)
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (broken.RecallsTheLast, {"a memory's rows are the embedded engine's"}),
        (broken.RecallsMisplaced, {"with all rows it is the whole context"}),
        (broken.RecallsUncounted, {"and the accounts"}),
        (broken.RecallsItself, {"turn by turn is as at once"}),
        (broken.AppendsApart, {"turn by turn is as at once"}),
    ],
)
def test_a_wrong_memory_is_found(
    variant: type, expected: set[str], sets: str, fixture_for: Callable[[type], Fixture]
) -> None:
    assert expected <= failed(memory_part(fixture_for(variant), sets))


def test_an_engine_without_banks_is_not_asked_for_any(
    fixture_for: Callable[[type], Fixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    able = EmbeddedEngine.capabilities - {Capability.MEMORY_BLOCKS}
    monkeypatch.setattr(EmbeddedEngine, "capabilities", able)
    (result,) = memory_part(fixture_for(EmbeddedEngine), WAYS[0])
    assert result.skipped


def test_an_engine_that_does_not_rewind_is_not_asked_to(
    fixture_for: Callable[[type], Fixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    able = EmbeddedEngine.capabilities - {Capability.REWIND}
    monkeypatch.setattr(EmbeddedEngine, "capabilities", able)
    one = fixture_for(EmbeddedEngine)
    with one.reference(one.method("full")) as reference:
        assert check_rewinds(one.driver(one.method("full")), reference).skipped


def test_a_leak_is_found(
    fixture_for: Callable[[type], Fixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "PATIENCE_S", 0.5)
    one = fixture_for(broken.Leaky)
    (result,) = leak_part(one, one.method("agentkv"), examples=4)
    assert not result.ok
    assert "at the start" in result.detail


def test_rows_computed_again_are_right_if_counted(fixture_for: Callable[[type], Fixture]) -> None:
    one = fixture_for(broken.Losing)
    (result,) = crowd_part(one, one.method("agentkv"))
    assert result.ok, result.detail
    assert "10 computed again" in result.detail


def test_rows_computed_again_without_a_word_are_found(
    fixture_for: Callable[[type], Fixture],
) -> None:
    one = fixture_for(broken.LosingUnseen)
    (result,) = crowd_part(one, one.method("agentkv"))
    assert not result.ok
    assert "nothing was counted" in result.detail


def test_an_engine_without_a_cache_is_refused() -> None:
    with pytest.raises(UsageError, match="no KV cache"):
        engine_suite("scripted")
