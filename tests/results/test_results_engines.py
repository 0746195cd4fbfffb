"""The cross-engine table: equal scores, equal tokens, and the first token that differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.results.engines import consistency, first_difference
from agentbench_kv.results.runs import Run, load_run
from agentbench_kv.results.store import RunStore

Write = Callable[..., Run]
SAID = ["1 2 3", "4 5"]
KV = {"logical": 1000, "peak_live": 300, "events": 1, "evicted": 700, "longest_prefill": 90}


@pytest.fixture
def write(tmp_path: Path, spec: dict[str, Any], make_trial: Callable[..., Any]) -> Write:
    """Return a function that writes a run of two samples and loads it."""

    def make(
        engine: str,
        said: list[str] | None = SAID,
        score: float = 1.0,
        *,
        most: int = 2,
        expected: int = 2,
        **other: Any,
    ) -> Run:
        name = f"{engine}{len(list(tmp_path.iterdir()))}"
        played = [("s0", SAID, 1.0), ("s1", said, score)][:most]
        whole = spec | {"engine": engine} | other
        with RunStore(tmp_path).open(name, whole, expected_trials=expected) as run:
            for sample, words, points in played:
                document = {} if words is None else {"generated": words}
                link = run.save_transcript(sample, 0, document)
                run.append_trial(make_trial(sample, score=points, transcript=link, kv=KV))
        return load_run(tmp_path / name)

    return make


def test_the_same_tokens_and_scores_are_equal(write: Write) -> None:
    found = consistency([write("vllm"), write("embedded"), write("sglang")])
    assert found.equal
    assert [row.engine for row in found.rows] == ["embedded", "vllm", "sglang"]
    assert [(row.equal_scores, row.equal_tokens) for row in found.rows] == [(2, 2)] * 3
    assert found.document()["equal"] is True


def test_the_first_differing_token_is_named(write: Write) -> None:
    found = consistency([write("embedded"), write("vllm", ["1 2 3", "4 7 8"], score=0.5)])
    (one,) = found.differences
    assert (one.sample, one.engine, one.scores) == ("s1", "vllm", (1.0, 0.5))
    assert (one.turn, one.index, one.tokens) == (1, 1, (5, 7))
    assert (found.rows[1].equal_scores, found.rows[1].equal_tokens) == (1, 1)
    assert not found.equal
    assert found.with_gaps({0: (0.25, "")}).differences[0].gap == 0.25


@pytest.mark.parametrize(
    ("base", "other", "place"),
    [
        ([[1, 2]], [[1, 2]], None),
        ([[1, 2]], [[1, 2, 3]], (0, 2)),
        ([[1], [2]], [[1]], (1, 0)),
        ([[1], [2]], [[], [2]], (0, 0)),
    ],
)
def test_where_two_sessions_part(
    base: list[list[int]], other: list[list[int]], place: tuple[int, int] | None
) -> None:
    assert first_difference(base, other) == place


def test_a_score_may_differ_where_tokens_do_not(write: Write) -> None:
    found = consistency([write("embedded"), write("vllm", score=0.0)])
    (one,) = found.differences
    assert one.turn is None
    assert found.rows[1].equal_tokens == 2
    assert not found.equal


def test_runs_without_tokens_are_not_called_equal(write: Write) -> None:
    found = consistency([write("embedded"), write("vllm", None)])
    assert found.rows[1].equal_tokens is None
    assert not found.equal


@pytest.mark.parametrize("other", [{"method": "snapkv"}, {"seed": 4}, {"budget": 128}])
def test_runs_that_differ_otherwise_are_refused(write: Write, other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"differ in {next(iter(other))}"):
        consistency([write("embedded"), write("vllm", **other)])


def test_one_run_is_refused(write: Write) -> None:
    with pytest.raises(UsageError, match="two or more"):
        consistency([write("embedded")])


def test_an_interrupted_run_is_not_equal(write: Write) -> None:
    """Its one trial of fifty had the base's tokens, and the exit code was 0."""
    found = consistency([write("embedded"), write("vllm", most=1)])
    assert (found.rows[1].trials, found.rows[1].equal_tokens, found.differences) == (1, 1, ())
    assert found.rows[1].lacking == "incomplete: 1 of 2 trials finished"
    assert not found.equal
    assert not consistency([write("embedded", most=1), write("vllm")]).equal


def test_fewer_trials_than_the_base_are_equal_only_by_a_limit(write: Write) -> None:
    base = write("embedded")
    found = consistency([base, write("vllm", most=1, expected=1)])
    assert "1 of the base's trials are missing" in (found.rows[1].lacking or "")
    assert not found.equal
    assert consistency([base, write("vllm", most=1, expected=1, limit=1)]).equal


def test_a_budget_that_was_not_applied_proves_nothing(write: Write) -> None:
    found = consistency([write("embedded", budget=64), write("vllm", budget=64)])
    assert "exceeded the budget" in (found.rows[0].lacking or "")
    assert not found.equal


def test_one_run_twice_and_one_engine_twice_are_refused(write: Write) -> None:
    base, again = write("embedded"), write("embedded")
    with pytest.raises(UsageError, match="is there twice"):
        consistency([base, base])
    with pytest.raises(UsageError, match="is there twice"):
        consistency([base, write("vllm"), base])
    with pytest.raises(UsageError, match="all 2 runs are on embedded"):
        consistency([base, again])
