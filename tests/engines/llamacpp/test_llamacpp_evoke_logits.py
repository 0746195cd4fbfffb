"""EVOKE on llama.cpp: all logits are those of a Hugging Face model that sees the same rows.

The model reads the session in one pass. Every query sees the rows that were in the cache when it
was computed: at their own positions (`sparse`), or each at the position of its row in the cache
(`compact`). A restored block has the keys and values of its first reading in either case.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentbench_kv.analysis.traces import CacheEvent
from agentbench_kv.conformance.driver import SessionTrace
from agentbench_kv.conformance.reference import largest_difference, tiny_model
from agentbench_kv.engines.base import Engine, EngineOptions, Sampling
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine, LlamaCppWire
from agentbench_kv.methods.spans import Source, TurnNotes
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TRACED = Path(__file__).with_name("backend_traced.py")
TURNS = ((90, 40), (70, 30), (1, 30), (60, 20), (20, 30))
SETTINGS = {"block": "16", "margin": "0.0"}
VOCAB = 704
TOLERANCE = 1e-4
# Of attention in half precision, on a random model; without what came back it is above this.
TOLERANCE_FLASH = 0.1


@pytest.fixture
def traced(
    llamacpp_python: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[[Path, Any, str], BlockEngine]:
    """Start the engine under a span-level method; its backend writes to `tmp_path / "trace"`."""
    launch = LlamaCppWire.launch

    def with_trace(self: LlamaCppWire) -> Any:
        plain = launch(self)
        environment = {**plain.environment, "KVBENCH_TEST_TRACE": str(tmp_path / "trace")}
        return replace(plain, command=[plain.command[0], str(TRACED)], environment=environment)

    monkeypatch.setattr(LlamaCppWire, "launch", with_trace)

    def start(model: Path, method: Any, flash: str) -> BlockEngine:
        options = EngineOptions(
            *(str(model), method.below()), max_live_tokens=2048,
            engine_args={"flash-attention": flash},
        )  # fmt: skip
        return BlockEngine(LlamaCppEngine.create(options), method)

    return start


def saved(network: Any, folder: Path) -> Path:
    """Save a model with the micro model's tokenizer, which no session here needs."""
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path("micro") / name, folder / name)
    return folder


def play(engine: Engine) -> SessionTrace:
    """Hold one session; what users say and what tools return take turns."""
    trace, label = SessionTrace(), TokenPhases().label
    draw = torch.Generator().manual_seed(5)
    engine.open("only", TokenPhases())
    for number, (length, decode) in enumerate(TURNS):
        prompt = torch.randint(10, VOCAB, (length,), generator=draw).tolist()
        source = (Source.USER, Source.DOCUMENT)[number % 2]
        engine.note("only", prompt, TurnNotes([(length, source)]))
        engine.extend("only", prompt, [label(token) for token in prompt])
        trace.add(prompt, decoded=False)
        sampling = Sampling(max_tokens=decode, temperature=1.0, seed=number)
        trace.add(list(engine.generate("only", sampling)), decoded=True)
    trace.stats = engine.close("only")
    return trace


def read(trace: SessionTrace, path: Path, restores: bool = True) -> SessionTrace:
    """Add what the backend wrote; as if nothing had come back, if restores are left out."""
    trace = replace(trace, logits={}, events=[])
    for line in path.read_text().splitlines():
        found = json.loads(line)
        if "logits" in found:
            trace.logits[found["position"]] = torch.tensor(found["logits"])
        elif restores or not found["restored"]:
            kept = torch.tensor(found["rows"]).expand(2, 2, -1)
            trace.events.append(CacheEvent(found["fed"], kept))
    return trace


@pytest.mark.parametrize("flash", ["off", "on"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("positions", ["sparse", "compact"])
def test_logits_after_blocks_left_and_came_back(
    positions: str,
    family: str,
    flash: str,
    traced: Callable[[Path, Any, str], BlockEngine],
    tmp_path: Path,
) -> None:
    network = tiny_model(family, layers=2, vocab=VOCAB)
    method = make_method("evoke", 128, {**SETTINGS, "positions": positions})
    tolerance, seen = (TOLERANCE, 0.01) if flash == "off" else (TOLERANCE_FLASH, TOLERANCE_FLASH)
    engine = traced(saved(network, tmp_path / family), method, flash)
    try:
        played = play(engine)
    finally:
        engine.shutdown()
    assert played.stats.evicted > played.stats.restored > 0
    trace = read(played, tmp_path / "trace")
    assert sorted(trace.logits) == played.decoded_at
    kind = "cache" if positions == "compact" else "logical"
    largest = largest_difference(network, trace, kind)
    assert largest <= tolerance
    # The check sees whether a block is there.
    assert largest_difference(network, read(played, tmp_path / "trace", False), kind) > seen
    if kind == "cache":
        in_order = [replace(each, kept=each.kept.sort(-1).values) for each in trace.events]
        assert largest_difference(network, replace(trace, events=in_order), kind) > seen
