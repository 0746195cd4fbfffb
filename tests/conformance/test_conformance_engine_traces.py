"""Reading what an engine kept, and cutting a session where its rows were lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentbench_kv.accounting import KVEvent
from agentbench_kv.analysis.traces import CacheEvent
from agentbench_kv.conformance.driver import (
    Driver,
    SessionTrace,
    TurnPlan,
    epochs,
    read_kept,
    takes_recorder,
)
from agentbench_kv.conformance.engines.checks import check_leaks
from agentbench_kv.conformance.engines.comparison import accounting_problem
from agentbench_kv.conformance.engines.fixture import CONTEXT, VOCAB, load_network, write_model
from agentbench_kv.engines.base import EngineOptions, KVStats
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.phases import TokenCodec, load_tokenizer
from agentbench_kv.registry import make_method


def test_files_are_read_in_order_and_by_the_whole_name(tmp_path: Path) -> None:
    for name, value in (("a%2Fb~1.000010", 2), ("a%2Fb~1.000009", 1), ("a%2Fb~11.000000", 9)):
        save_file({"kept": torch.full((1, 1, 2), value)}, tmp_path / f"{name}.safetensors")
    kept = read_kept(tmp_path, ["a/b~1"])
    assert [int(each[0, 0, 0]) for each in kept] == [1, 2]
    assert read_kept(tmp_path, ["a/b"]) == []


@pytest.mark.parametrize(
    ("moved", "expected", "events", "right"),
    [(0, 0, 0, True), (9, 4, 1, True), (9, 0, 1, True), (0, 9, 1, False), (9, 0, 0, False)],
)
def test_rows_move_with_events_and_where_the_reference_moves_some(
    moved: int, expected: int, events: int, right: bool
) -> None:
    """Where all that stays is the first rows, only who fills the cache from its end moves any."""
    found = [KVEvent(1, 20, 20, 10, rows_moved=n) for n in (expected, moved)]
    stats = [
        KVStats(events=[event] * events, rows_moved=event.rows_moved, live=10) for event in found
    ]
    problem = accounting_problem(SessionTrace(stats=stats[0]), SessionTrace(stats=stats[1]))
    assert (problem == "") is right


def test_engines_in_this_process_take_a_recorder() -> None:
    assert takes_recorder(EmbeddedEngine.create)
    assert not takes_recorder(ScriptedEngine.create)


def test_a_session_without_losses_is_one_epoch() -> None:
    trace = SessionTrace(tokens=list(range(10)), decoded_at=[6, 7, 8, 9])
    trace.events = [CacheEvent(8, torch.zeros(1, 1, 1)), CacheEvent(9, torch.zeros(1, 1, 1))]
    ((positions, part),) = epochs(trace)
    assert positions == [6, 7, 8, 9]
    assert part.tokens == list(range(10))
    # No query came after the event at 9.
    assert [event.logical for event in part.events] == [8]


def test_a_loss_begins_without_the_events_before_it() -> None:
    trace = SessionTrace(tokens=list(range(12)), decoded_at=[3, 4, 7, 8, 9, 10, 11])
    trace.events = [CacheEvent(n, torch.zeros(1, 1, 1)) for n in (4, 8, 10)]
    trace.stats = KVStats(restarts=[(1, 7), (2, 9)])
    positions, parts = zip(*epochs(trace), strict=True)
    assert positions == ([3, 4], [7, 8], [9, 10, 11])
    assert [[event.logical for event in part.events] for part in parts] == [[], [], [10]]
    assert [len(part.tokens) for part in parts] == [5, 9, 12]


def test_restarts_out_of_order_are_no_account() -> None:
    class Confused(EmbeddedEngine):
        def close(self, session: str) -> KVStats:
            stats = super().close(session)
            stats.restarts += [(0, 30), (0, 20)]
            return stats

    options = EngineOptions("micro", make_method("full", None), max_live_tokens=4096)
    driver = Driver(Confused, options, TokenCodec(load_tokenizer(model_path("micro"))))
    try:
        trace = driver.play({"one": [TurnPlan((5, 6, 7), 40)]})["one"]
    finally:
        driver.close()
    assert "not in order" in trace.kept_missing


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_models_are_what_engines_take(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / family, family)
    codec, config = TokenCodec(load_tokenizer(folder)), load_network(folder).config
    assert (config.model_type, config.vocab_size, config.max_position_embeddings) == (
        family, VOCAB, CONTEXT,
    )  # fmt: skip
    assert codec.decode(codec.encode("<|im_start|>user\né<think>")) == "<|im_start|>user\né<think>"
    assert config.eos_token_id == codec.added["<|im_end|>"]
    weights = [
        (path / "model.safetensors").read_bytes()
        for path in (folder, write_model(tmp_path / "again", family))
    ]
    assert weights[0] == weights[1]


def test_an_engine_that_does_not_say_what_is_free_is_skipped() -> None:
    class Silent:
        pool_at_start = None

    result = check_leaks(Silent(), examples=1)  # type: ignore[arg-type]
    assert result.skipped
    assert "does not say" in result.detail
