"""llama.cpp's flash attention: when it is chosen, refusals, and nearly the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentbench_kv.engines.base import EngineOptions, KVStats
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine, _flash
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method
from agentbench_kv.run.recordings import Recording, record_gold

FULL = make_method("full", None)


def options(
    method: Method = FULL, dtype: str = "float32", kv_dtype: str = "", **arguments: str
) -> EngineOptions:
    named = {name.replace("_", "-"): value for name, value in arguments.items()}
    return EngineOptions(
        *("micro", method), dtype=dtype, kv_dtype=kv_dtype, concurrency=2, max_live_tokens=8192,
        engine_args=named,
    )  # fmt: skip


def test_flash_attention_is_for_rows_of_less_than_float32_or_asked_for() -> None:
    """As `llama-server` has it, whose rows are float16; without, `full` was half as fast."""
    assert not _flash(options())
    assert _flash(options(flash_attention="on"))
    assert _flash(options(dtype="float16"))
    assert not _flash(options(dtype="float16", flash_attention="off"))
    assert _flash(options(kv_dtype="q8_0"))
    assert _flash(options(kv_dtype="q8_0", flash_attention="on"))


@pytest.mark.parametrize(
    ("kv_dtype", "chosen", "said"),
    [
        ("", "yes", "--engine-arg flash-attention=yes: expected on or off"),
        ("", "", "--engine-arg flash-attention=: expected on or off"),
        ("q8_0", "off", "--kv-dtype q8_0 needs flash attention, .*leave out --engine-arg flash"),
    ],
)
def test_what_cannot_be_is_one_line(kv_dtype: str, chosen: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        _flash(options(kv_dtype=kv_dtype, flash_attention=chosen))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record_gold("micro/recall-1k", "micro", 1, {})[0]


def played(
    method: Method, recording: Recording, flash: bool, **chosen: str
) -> tuple[list[int], KVStats]:
    """Return the best token in every answered one's place, and the session's account."""
    engine = LlamaCppEngine.create(options(method, **chosen))
    try:
        assert engine.info.details.get("attention") == ("flash" if flash else None)
        assert int(engine.info.details["threads"]) >= 1
        engine.open("s", TokenPhases())
        best: list[int] = []
        for turn in recording.turns:
            ids, phases = zip(*turn.prompt, strict=True)
            engine.extend("s", ids, phases)
            generation = engine.force("s", [token for token, _ in turn.answer], predict=True)
            assert len(list(generation)) == len(turn.answer)
            best += generation.best
        return best, engine.close("s")
    finally:
        engine.shutdown()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["full", "full@prefix", "agentkv", "h2o", "snapkv"])
def test_it_changes_hardly_a_token(
    name: str,
    dtype: str,
    recording: Recording,
    llamacpp_python: Path,  # noqa: ARG001
) -> None:
    budget = None if name.startswith("full") else 384
    settings = {} if budget is None else {"trigger": "prefill+every"}
    method = make_method(name, budget, settings)
    plain, was = played(method, recording, False, dtype=dtype, flash_attention="off")
    fused, now = played(method, recording, True, dtype=dtype, flash_attention="on")
    same = sum(a == b for a, b in zip(plain, fused, strict=True)) / len(plain)
    assert same > 0.97
    counted = [(each.decoded, each.live_before, each.live_after) for each in was.events]
    assert counted == [(each.decoded, each.live_before, each.live_after) for each in now.events]
    assert bool(counted) is (budget is not None)
    assert (was.peak_live, was.peak_bytes) == (now.peak_live, now.peak_bytes)
