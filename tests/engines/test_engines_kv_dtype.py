"""Rows at lower precision: the quantisers by their definitions, the engine beside Hugging Face."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import DynamicCache

from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.core.kv_dtype import KV_DTYPES
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.forced import ForcedPlay
from agentbench_kv.engines.embedded.model import load_model
from agentbench_kv.engines.embedded.quantization import asymmetric, symmetric
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.engines.serving.refusals import refuse_quantised
from agentbench_kv.engines.sglang.engine import SglangEngine
from agentbench_kv.engines.vllm.engine import VllmEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import make_method

Rows = NDArray[np.float64]


def int8_reference(rows: Rows) -> Rows:
    """Per row: 127 is its largest magnitude."""
    scale = np.abs(rows).max(-1, keepdims=True) / 127
    scale = scale.astype(np.float32).astype(np.float64)
    return np.rint(rows / np.where(scale > 0, scale, 1)).clip(-127, 127) * scale


def asymmetric_reference(rows: Rows, bits: int, axis: int) -> Rows:
    """Along an axis: code 0 is the least value, the largest code the largest one."""
    low, high = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
    with np.errstate(over="ignore"):
        zero = low.astype(np.float16).astype(np.float64)
        scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    codes = np.rint((rows - zero) / np.where(scale > 0, scale, 1)).clip(0, 2**bits - 1)
    return codes * scale + zero


ROWS = st.builds(
    lambda seed, heads, size, spread: (
        np.random.default_rng(seed).standard_normal((heads, 3, size)) * spread
    ).astype(np.float32),
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([1e-3, 1.0, 50.0]),
)


def close(found: torch.Tensor, expected: Rows, step: Rows) -> None:
    """Equal but for float32's rounding; a value between two codes may take either."""
    off = np.abs(found.double().numpy() - expected)
    assert (off <= 1e-5 * np.abs(expected) + 1e-6 + 1.001 * step).all()
    assert (off > 1e-5 * np.abs(expected) + 1e-6 + 1e-3 * step).mean() < 0.02


@given(ROWS)
@settings(max_examples=40, deadline=None)
def test_int8_is_its_definition(rows: Any) -> None:
    exact = rows.astype(np.float64)
    found = symmetric(torch.from_numpy(rows), 8)
    step = np.abs(exact).max(-1, keepdims=True) / 127
    close(found, int8_reference(exact), step)
    assert (np.abs(found.double().numpy() - exact) <= 0.501 * step + 1e-7).all()


@given(ROWS, st.sampled_from([2, 4]), st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_asymmetric_codes_are_their_definition(rows: Any, bits: int, axis: int) -> None:
    exact = rows.astype(np.float64)
    found = asymmetric(torch.from_numpy(rows), bits, dim=axis)
    low, high = exact.min(axis, keepdims=True), exact.max(axis, keepdims=True)
    step = (high - low) / (2**bits - 1)
    close(found, asymmetric_reference(exact, bits, axis), step)
    # Half a step, and what float16 leaves of zero point and scale.
    slack = 2e-3 * (np.abs(low) + (high - low)) + 1e-6
    assert (np.abs(found.double().numpy() - exact) <= 0.501 * step + slack).all()


@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_rows_of_one_value_come_back(value: float) -> None:
    rows = torch.full((1, 2, 8), value)
    assert torch.equal(asymmetric(rows, 4), rows)
    assert torch.allclose(symmetric(rows, 8), rows, rtol=1e-6)


class QuantisedCache(DynamicCache):
    """Hugging Face's cache, whose rows are quantised by the references above."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._settled = (0, 0)

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **more: Any
    ) -> Any:
        if self._name in ("int8", "int4"):
            key_states, value_states = self._row(key_states), self._row(value_states)
        return super().update(key_states, value_states, layer_idx, *args, **more)

    def _row(self, rows: torch.Tensor) -> torch.Tensor:
        exact = rows.double().numpy()
        found = int8_reference(exact) if self._name == "int8" else asymmetric_reference(exact, 4, 3)
        return torch.from_numpy(found).to(rows.dtype)

    @torch.inference_mode()
    def settle(self) -> None:
        """After a forward: KIVI's keys in blocks of the residual, its values behind it."""
        if not self._name.startswith("kivi"):
            return
        bits, length = int(self._name[-1]), self.get_seq_length()
        keys, values = length // 128 * 128, max(length - 128, 0)
        for layer in self.layers:
            for start in range(self._settled[0], keys, 32):
                part = layer.keys[:, :, start : start + 32].double().numpy()
                found = torch.from_numpy(asymmetric_reference(part, bits, 2))
                layer.keys[:, :, start : start + 32] = found.to(layer.keys.dtype)
            old = self._settled[1]
            if values > old:
                part = layer.values[:, :, old:values].double().numpy()
                groups = part.reshape(*part.shape[:3], -1, min(32, part.shape[3]))
                found = torch.from_numpy(asymmetric_reference(groups, bits, 4))
                layer.values[:, :, old:values] = found.reshape(part.shape).to(layer.values.dtype)
        self._settled = (keys, values)


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1, 97) for i in range(length)]


def greedy(network: Any, cache: QuantisedCache, ids: list[int], tokens: int) -> list[int]:
    """Feed ids, then draw tokens; the last one is not fed."""
    found: list[int] = []
    given = ids
    while len(found) < tokens:
        with torch.inference_mode():
            logits = network(torch.tensor([given]), None, None, cache).logits[0, -1]
        cache.settle()
        given = [int(logits.argmax())]
        found += given
    return found


@pytest.mark.parametrize("name", ["int8", "int4", "kivi4", "kivi2"])
def test_tokens_are_those_of_hugging_face_with_such_a_cache(
    name: str, tiny_model: Any, make_engine: Any, start_session: Any
) -> None:
    network = tiny_model("qwen3")
    reference = copy.deepcopy(network)
    reference.set_attn_implementation("eager")
    engine = make_engine(network, kv_dtype=name)
    exact = make_engine(network)
    ids, cache, out = prompt(1, 600), QuantisedCache(name), list[int]()
    start_session(engine, "a", ids)
    start_session(exact, "a", ids)
    differs = False
    for turn in range(2):
        expected = greedy(reference, cache, [*out[-1:], *ids], 40)
        out = list(engine.generate("a", Sampling(max_tokens=40)))
        assert out == expected
        differs |= out != list(exact.generate("a", Sampling(max_tokens=40)))
        ids = prompt(10 + turn, 9)
        for each in (engine, exact):
            each.extend("a", ids, [Phase.OTHERS] * len(ids))
    # Rows of fewer bits are others: what is not simulated would pass without this.
    assert differs or name == "int8"
    session = engine._scheduler.get("a")
    end = session.cache.length
    assert end == cache.get_seq_length() > 600
    for kind in ("keys", "values"):
        rows = getattr(session.cache, kind)[:, :, :end]
        expected_rows = torch.cat([getattr(layer, kind) for layer in cache.layers])
        # A value between two codes may take either, and a float16 scale the next one; a row that is
        # quantised in one cache alone, or with others, differs by more in nearly every channel.
        off = ((rows - expected_rows).abs() > 5e-3).float().mean(-1)
        assert off.max() < 0.5
        assert off.mean() < 0.01


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_eviction_composes_and_bytes_are_those_of_codes_and_scales(
    name: str, tiny_model: Any, make_engine: Any, start_session: Any
) -> None:
    network = tiny_model("qwen3")
    setup = ("agentkv", 64, {"interval": "16"})
    stats = {}
    for kv_dtype in ("", name):
        engine = make_engine(network, *setup, kv_dtype=kv_dtype)
        start_session(engine, "a", prompt(3, 200))
        list(engine.generate("a", Sampling(max_tokens=70)))
        stats[kv_dtype] = engine.close("a")
    plain, low = stats[""], stats[name]
    assert (low.peak_live, low.evicted) == (plain.peak_live, plain.evicted)
    assert low.evicted > 0
    heads, head_dim = 2 * 2, 8
    per_token = {"int8": head_dim + 4, "int4": head_dim // 2 + 4, "fp8": head_dim}[name]
    assert low.peak_bytes == low.peak_live * 2 * heads * per_token
    assert plain.peak_bytes == plain.peak_live * 2 * heads * head_dim * 4
    assert low.bytes_read * 4 * head_dim == plain.bytes_read * per_token


def test_int8_halves_what_16_bits_take_but_for_the_scales() -> None:
    heads, head_dim = 36 * 8, 128
    low, whole = KV_DTYPES["int8"].row_bytes(heads, head_dim), 2 * heads * head_dim * 2
    assert low - 2 * heads * 4 == whole / 2
    assert KV_DTYPES["int4"].row_bytes(heads, head_dim) - 2 * heads * 4 == whole / 4


@given(st.integers(0, 1000))
def test_kivis_bytes_are_summed_part_by_part(rows: int) -> None:
    heads, size = 6, 64
    found = KV_DTYPES["kivi2"].held(heads, size, 2)(rows)
    keys, values = rows // 128 * 128, max(rows - 128, 0)
    of_keys = keys * size * 2 / 8 + keys / 32 * size * 4 + (rows - keys) * size * 2
    of_values = values * (size * 2 / 8 + size / 32 * 4) + (rows - values) * size * 2
    assert found == heads * (of_keys + of_values)


def test_a_fork_of_a_kivi_session_sees_no_change(make_engine: Any, start_session: Any) -> None:
    engine = make_engine(kv_dtype="kivi2")
    start_session(engine, "a", prompt(5, 375))
    list(engine.generate("a", Sampling(max_tokens=4)))
    engine.fork("a", "b", engine._scheduler.get("a").labeller)
    held = engine._scheduler.get("b").cache.keys[:, :, 256:375].clone()
    ids = prompt(6, 10)
    engine.extend("a", ids, [Phase.OTHERS] * 10)
    list(engine.generate("a", Sampling(max_tokens=4)))
    assert torch.equal(engine._scheduler.get("b").cache.keys[:, :, 256:375], held)
    assert not torch.equal(engine._scheduler.get("a").cache.keys[:, :, 256:375], held)


@pytest.mark.parametrize("name", ["int4", "kivi2"])
def test_given_tokens_are_predicted_as_drawn_ones(name: str, start_session: Any) -> None:
    """`kvbench fidelity` plays what the engine does, beside a full cache that is exact."""
    method = make_method("full", None)
    ids = [random.Random(i).randrange(10, 400) for i in range(250)]
    found: dict[str, list[int]] = {}
    for kv_dtype in ("", name):
        options = EngineOptions("micro", method, device="cpu", kv_dtype=kv_dtype)
        engine = EmbeddedEngine.create(options)
        start_session(engine, "a", ids)
        found[kv_dtype] = list(engine.generate("a", Sampling(max_tokens=30)))
        engine.shutdown()
    play = ForcedPlay(load_model("micro", "float32", "cpu"), [method, method], kv_dtypes=["", name])
    drawn = [(token, Phase.OTHERS) for token in found[name]]
    low, first = [], None
    for stretch in play.turn([(token, Phase.OTHERS) for token in ids], drawn):
        exact, logits = stretch.of_methods
        assert exact is None  # the full cache's own
        assert logits is not None
        # A prompt's own attention sees KIVI's rows as computed.
        same = name == "kivi2" and stretch.first == 0
        assert torch.equal(logits, stretch.full) is same
        low += logits.argmax(-1).tolist()
        first = stretch.full[0].argmax().item() if first is None else first
    assert low == found[name]
    assert first == found[""][0]
    whole, less = play.stats()
    assert less.peak_live == whole.peak_live
    assert 0 < less.peak_bytes < whole.peak_bytes / 1.5
    play.close()


@pytest.mark.parametrize(
    ("kv_dtype", "method", "message"),
    [
        ("int3", ("full", None), "it knows: int8, int4, fp8, kivi4, kivi2"),
        ("kivi2", ("agentkv", 64), "KIVI's keys share scales over 32 tokens"),
        ("int8", ("streamingllm@paper", 64), "turns cached keys"),
        ("int8", ("memart", None), "saved rows"),
    ],
)
def test_what_is_not_simulated_is_one_line(
    kv_dtype: str, method: tuple[str, int | None], message: str
) -> None:
    options = EngineOptions("micro", make_method(*method), kv_dtype=kv_dtype)
    with pytest.raises(UsageError, match=message) as caught:
        EmbeddedEngine.check_kv_dtype(options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", [VllmEngine, SglangEngine])
def test_a_plug_in_reads_no_quantised_rows(engine: Any) -> None:
    full, agentkv = make_method("full", None), make_method("agentkv", 64)
    refuse_quantised(EngineOptions("m", full, kv_dtype="fp8_e4m3"))
    refuse_quantised(EngineOptions("m", agentkv))
    with pytest.raises(UsageError, match="cannot at lower precision"):
        refuse_quantised(EngineOptions("m", agentkv, kv_dtype="fp8_e4m3"))
    twice = EngineOptions("m", full, kv_dtype="fp8_e4m3", engine_args={"kv-cache-dtype": "auto"})
    with pytest.raises(UsageError, match="says the same"):
        refuse_quantised(twice)
    for wrong in ("fp8", "bfloat16"):
        own = EngineOptions("m", full, engine_args={"kv-cache-dtype": wrong})
        with pytest.raises(UsageError, match=f"dtype={wrong}: runs are labelled, .* use these"):
            refuse_quantised(own)
    for wrong in ("bfloat16", "auto"):
        own = EngineOptions("m", agentkv, engine_args={"dtype": wrong})
        with pytest.raises(UsageError, match=f"arg dtype={wrong}: runs are labelled, .* these"):
            refuse_quantised(own)
    for same in ("auto", "float32"):
        refuse_quantised(EngineOptions("m", full, engine_args={"kv-cache-dtype": same}))
    halves = {"dtype": "bfloat16", "kv-cache-dtype": "bf16"}
    refuse_quantised(EngineOptions("m", full, dtype="bfloat16", engine_args=halves))
    with pytest.raises(UsageError, match=r"it knows: .*fp8_e4m3"):
        engine.check_kv_dtype(EngineOptions("m", full, kv_dtype="kivi2"))


def test_a_stock_servers_rows_are_counted_at_its_precision() -> None:
    facts = ModelFacts("qwen3", 36, 32, 8, 128, 4096, ())
    assert facts.bytes_per_token("bfloat16") == 2 * 36 * 8 * 128 * 2
    assert facts.bytes_per_token("fp8_e4m3") == 2 * 36 * 8 * 128
    assert facts.bytes_per_token("int8") == 2 * 36 * 8 * (128 + 4)
