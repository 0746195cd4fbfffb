"""Span-level methods on the embedded engine: masked-cache equality, and that it can fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from agentbench_kv.conformance import CheckResult, passed
from agentbench_kv.conformance.driver import default_turns
from agentbench_kv.conformance.methods import build_method, method_suite
from agentbench_kv.conformance.reference import cache_rows, reference_logits, tiny_model, visible
from agentbench_kv.conformance.span_checks import check_spans, drive_spans
from agentbench_kv.engines.embedded import span_rows as embedded_spans
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.contract import contract_problem
from agentbench_kv.methods.evoke.method import Evoke, EvokeSession
from agentbench_kv.methods.spans import Hints, SpanMethod, TurnNotes
from agentbench_kv.registry import make_method

SETTINGS: list[dict[str, Any]] = [
    {},
    {"recovery": "discard"},
    {"recovery": "breadcrumb"},
    {"positions": "compact"},
    {"positions": "compact", "recovery": "discard"},
    {"w_attention": 1.0, "layers": "-1", "encoder": "hash"},
    {"store_mb": 0, "spill_mb": 1},
]


def evoke(budget: int = 160, **settings: Any) -> Any:
    plain = {"block": 24, "margin": 0.0, **settings}
    return make_method("evoke", budget, {key: str(value) for key, value in plain.items()})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logits_equal_those_of_a_model_blind_to_what_is_away(settings: dict[str, Any]) -> None:
    method = evoke(**settings)
    results = check_spans(method, tiny_model("llama", layers=2))
    assert [result for result in results if not result.ok] == []
    assert len(results) == 6


def test_blocks_do_come_back_in_these_sessions() -> None:
    trace, _ = drive_spans(tiny_model(layers=2), evoke(), default_turns())
    assert trace.stats.restored > 0
    assert trace.stats.evicted > trace.stats.restored


def failed(method: Any) -> set[str]:
    return {result.name for result in check_spans(method) if not result.ok}


def test_a_block_with_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = EmbeddedEngine.restore_block

    def wrong(self: Any, session: str, block: Any, at: Any = None) -> None:
        block.data[: block.nbytes // 2] = 0
        restore(self, session, block, at)

    monkeypatch.setattr(EmbeddedEngine, "restore_block", wrong)
    assert failed(evoke()) == {"masked-cache equality"}


def test_keys_that_turned_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = embedded_spans._rows_of

    def turned(block: Any, cache: Any) -> Any:
        keys, values, places = original(block, cache)
        return torch.roll(keys, 1, -1), values, places

    monkeypatch.setattr(embedded_spans, "_rows_of", turned)
    assert failed(evoke()) == {"masked-cache equality"}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_restored_block_lies_at_the_end_of_a_compact_cache(family: str) -> None:
    """Its keys and values are those of its first reading, turned to the rows behind the others."""
    model, method = tiny_model(family, layers=2), evoke(positions="compact")
    trace, _ = drive_spans(model, method, default_turns())
    assert trace.stats.restored > 0
    allowed, rows = visible(trace, 2, 2), cache_rows(trace, 2, 2)
    seen = torch.stack(list(trace.logits.values()))
    at = [position - 1 for position in trace.logits]
    found = {}
    for name, places in (("end", rows), ("session's order", None)):
        made = reference_logits(model, trace.tokens[:-1], allowed, positions="cache", rows=places)
        found[name] = float((made[at] - seen).abs().max())
    assert found["end"] <= 1e-4
    assert found["session's order"] > 1e-2


def test_a_block_one_position_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = embedded_spans.restore_target

    def wrong(session: Any, positions: list[int], at: int | None) -> tuple[list[int], int]:
        targets, row = target(session, positions, at)
        return [target + 1 for target in targets], row

    monkeypatch.setattr(embedded_spans, "restore_target", wrong)
    assert failed(evoke(positions="compact")) == {"masked-cache equality"}


def test_a_cache_above_its_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = EmbeddedEngine.evict_spans
    monkeypatch.setattr(
        EmbeddedEngine,
        "evict_spans",
        lambda self, session, spans: evict(self, session, spans[:1]),
    )
    found = failed(evoke(recovery="discard"))
    assert "within the budget after every turn" in found


def test_a_pin_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = EvokeSession.admit

    def deaf(self: Any, tokens: Any, notes: TurnNotes) -> None:
        admit(self, tokens, replace(notes, hints=Hints()))

    monkeypatch.setattr(EvokeSession, "admit", deaf)
    assert failed(evoke()) == {"the pinned turn stays"}


def test_blocks_that_never_come_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def recovery() -> CheckResult:
        return next(each for each in check_spans(evoke()) if each.name == "blocks come back")

    assert not recovery().skipped
    monkeypatch.setattr(EvokeSession, "_most_like", lambda *_: [])
    assert recovery().skipped


def test_the_suite_of_a_span_level_method() -> None:
    results = method_suite(build_method("evoke", 400))
    assert list(results) == ["spans"]
    assert passed(results)


def test_a_span_level_method_without_sessions_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Empty(SpanMethod):
        name: ClassVar[str] = "empty"

    assert contract_problem(Empty) == "has no sessions"
    assert contract_problem(Evoke) == ""


def test_a_span_level_method_ranks_no_rows() -> None:
    with pytest.raises(UsageError, match="not on cache rows"):
        evoke().select([], [], 0)
