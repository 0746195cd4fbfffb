"""llama.cpp's own quantised caches: their bytes, how far from float32, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentbench_kv.engines.base import Engine, EngineOptions, Sampling
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.errors import UsageError
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method
from agentbench_kv.run.exact_calls import exact_calls
from agentbench_kv.run.recordings import Recording, record_gold

FULL = make_method("full", None)
CELLS = 1536
BITS = {"": 32.0, "q8_0": 8.5, "q4_0": 4.5}  # a value takes, with its share of a block's scale


def test_other_precisions_and_methods_are_one_line() -> None:
    agentkv = make_method("agentkv", 64)
    for kv_dtype, method, message in (
        ("int8", FULL, "it knows: q8_0, q4_0"),
        ("q8_0", agentkv, "agentkv can neither score nor move; use --method full"),
        ("q4_0", make_method("full-constrained", None), "full-constrained can neither"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            LlamaCppEngine.check_kv_dtype(EngineOptions("micro", method, kv_dtype=kv_dtype))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kv_dtype", "bits"), BITS.items())
def test_bytes_are_those_of_blocks_of_32(kv_dtype: str, bits: float) -> None:
    facts = ModelFacts("qwen3", 36, 32, 8, 128, 4096, ())
    values = 2 * 36 * 8 * 128
    assert facts.bytes_per_token(kv_dtype or "float32") == values * bits / 8
    assert facts.pool_bytes(kv_dtype or "float32") == values * bits / 8


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return record_gold("micro/recall-1k", "micro", 2, {})


@pytest.fixture(scope="module")
def engines(llamacpp_python: Path) -> Iterator[dict[str, Engine]]:  # noqa: ARG001
    made: dict[str, Engine] = {}
    for kv_dtype in BITS:
        options = EngineOptions(
            "micro", FULL, kv_dtype=kv_dtype, concurrency=2, max_live_tokens=CELLS
        )
        made[kv_dtype] = LlamaCppEngine.create(options)
    yield made
    for engine in made.values():
        engine.shutdown()


def _best(engine: Engine, recording: Recording, park: bool = False) -> list[int]:
    """Return what the engine would have drawn in place of every answered token."""
    engine.open("s", TokenPhases())
    best: list[int] = []
    for number, turn in enumerate(recording.turns):
        ids, phases = zip(*turn.prompt, strict=True)
        engine.extend("s", ids, phases)
        generation = engine.force("s", [token for token, _ in turn.answer], predict=True)
        assert len(list(generation)) == len(generation.best)
        best += generation.best
        if park and not number:  # the cells are needed by another session meanwhile
            many = CELLS - 200
            engine.open("other", TokenPhases())
            engine.extend("other", [20] * many, [phases[0]] * many)
            list(engine.generate("other", Sampling(max_tokens=2)))
            engine.close("other")
    engine.close("s")
    return best


@pytest.mark.engine
@pytest.mark.slow
def test_a_quantised_cache_holds_fewer_bytes_and_is_near_float32(
    engines: dict[str, Engine], recordings: list[Recording]
) -> None:
    same, held = {}, {}
    whole = _best(engines[""], recordings[0])
    for kv_dtype, engine in engines.items():
        best = _best(engine, recordings[0])
        same[kv_dtype] = sum(a == b for a, b in zip(best, whole, strict=True)) / len(whole)
        engine.open("held", TokenPhases())
        engine.extend("held", [30] * 100, [recordings[0].turns[0].prompt[0][1]] * 100)
        list(engine.generate("held", Sampling(max_tokens=1)))
        stats = engine.close("held")
        held[kv_dtype] = stats.peak_bytes / stats.peak_live
    for kv_dtype, bits in BITS.items():
        assert held[kv_dtype] == held[""] * bits / 32
    # Not the same to the bit, and none is lost: eight bits change hardly a token.
    assert same["q8_0"] > 0.97
    assert same["q8_0"] >= same["q4_0"] > 0.6
    assert engines["q8_0"].info.details != {}


@pytest.mark.engine
@pytest.mark.slow
def test_exact_calls_fall_with_the_bits(
    engines: dict[str, Engine], recordings: list[Recording]
) -> None:
    found = {name: exact_calls(engine, recordings) for name, engine in engines.items()}
    assert found[""].right >= found["q8_0"].right >= found["q4_0"].right
    assert found["q8_0"].asked == found[""].asked > 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["q8_0", "q4_0"])
def test_quantised_rows_leave_the_cache_and_come_back_to_the_bit(
    kv_dtype: str, engines: dict[str, Engine], recordings: list[Recording]
) -> None:
    """Rows that are parked are copied as bytes: what follows is as if they had stayed."""
    engine = engines[kv_dtype]
    stayed = _best(engine, recordings[1])
    before = engine.pool()["parkings"]
    assert _best(engine, recordings[1], park=True) == stayed
    assert engine.pool()["parkings"] > before
