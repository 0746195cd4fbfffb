"""vLLM's runner of ours on a device that is no CPU, above stand-ins for vLLM's classes.

What vLLM calls, and in which order, is that of 0.32.0: profile, try out CUDA graphs with a cache of
a few blocks, size the cache, allocate it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peak_memory import peak_bytes
from torch import Tensor
from vllm_stand_ins import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MICRO,
    PLUGIN,
    Impl,
    Runner,
    cache_of,
    config,
    flash,
    made,
)

from agentbench_kv.engines.core.ledger import PrefixEnd, StepPlan
from agentbench_kv.engines.core.policy import VARIABLE, BackendPolicy
from agentbench_kv.engines.core.prefixes import PREFIXES
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import make_method


def test_queries_have_their_memory_before_the_cache_is_sized(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    runner.profile_run()
    assert runner.profiled == [(8, 5)]  # rows of static buffers, sessions with rings
    rows, buffers = runner._kvbench_rows, [b.shape for b in plugin.CAPTURE._buffers]
    assert buffers == [(8, HEADS, DIM)] * LAYERS
    names = list(runner.compilation_config.static_forward_context)
    runner.initialize_kv_cache(cache_of(names), is_profiling=True)
    runner.initialize_kv_cache(cache_of(names))
    assert runner.allocated == [True, False]
    assert runner._kvbench_rows is rows
    assert [layer.layer_name for layer in runner._kvbench_layers] == names
    described = vars(runner)["_kvbench_pages"]  # and not only when the first step asks for it
    assert [len(rows.layers) for rows in described] == [LAYERS] * 2


def test_shared_prefixes_have_their_places_before_the_cache_is_sized(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"prefix": "shared", "protect": "system"}
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path, **shared)
    monkeypatch.setenv(VARIABLE, str(path))
    runner.profile_run()
    assert runner.profiled == [(8, 5 + PREFIXES + 1)]


def test_a_backend_that_bypasses_ours_is_refused_in_a_line(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type("FlashInferImpl", (Impl,), {})
    for method in ("agentkv", "streamingllm"):
        runner, path = made(plugin, other, method, tmp_path)
        monkeypatch.setenv(VARIABLE, str(path))
        with pytest.raises(ValueError, match="FlashInferImpl shows no queries") as caught:
            runner.profile_run()
        assert "attention-backend=FLASH_ATTN" in str(caught.value)
        assert "\n" not in str(caught.value)
    # What evicts nothing may be attended to by anybody.
    runner, path = made(plugin, other, "full-constrained", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    runner.profile_run()


@pytest.mark.parametrize("backend", ["CapturingFlash", "CapturingTriton"])
def test_both_backends_of_a_gpu_go_through_ours(
    backend: str, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention: Any = sys.modules[f"{PLUGIN}.attention"]
    ours = getattr(attention, backend)
    # vLLM finds a class by its module and its name.
    assert getattr(sys.modules[ours.__module__], ours.__qualname__) is ours
    seen: list[tuple[str, str, int]] = []
    for part in ("see", "attended"):
        note = partial(lambda part, name, query: seen.append((part, name, len(query))), part)
        setattr(plugin.CAPTURE, part, note)

    def attend(_: Any, layer: Any, query: Tensor, *words: str) -> tuple[Any, ...]:
        seen.append(("forward", layer.layer_name, len(query)))
        return "attended", *words

    monkeypatch.setattr(Impl, "forward", attend)
    layer = SimpleNamespace(layer_name="layers.2")
    found = ours.get_impl_cls()().forward(layer, torch.zeros(7, HEADS, DIM), "k", "v")
    assert found == ("attended", "k", "v")
    # Keys are in the cache for certain once the layer has attended to them.
    assert seen == [(part, "layers.2", 7) for part in ("see", "forward", "attended")]
    assert issubclass(ours.get_impl_cls(), plugin.CapturingImpl)
    builder = ours.get_builder_cls()()
    assert builder.build(0, "batch", True) == (0, "batch", True)
    builder.kv_cache_spec = SimpleNamespace(sliding_window=128)
    attention.LOGICAL.put_into = lambda common: f"logical {common}"
    assert builder.build(0, "batch") == (0, "logical batch", False)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("data_parallel_size", 2, "data"),
        ("data_parallel_index", 1, "data"),  # all that vLLM leaves a dense model's second rank
        ("pipeline_parallel_size", 2, "pipeline"),
        ("decode_context_parallel_size", 2, "decode context"),
        ("prefill_context_parallel_size", 2, "prefill context"),
    ],
)
def test_parallel_workers_are_refused(
    name: str, value: int, kind: str, plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    setattr(runner.vllm_config.parallel_config, name, value)
    with pytest.raises(ValueError, match=f"does not support {kind} parallelism"):
        runner.initialize_kv_cache(cache_of(["layers.0"]))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tova", "kept_set=per_layer"),
        ("triattention", "a calibration"),
        ("expected-attention", "a calibration"),
        ("random", "the number of a head"),
    ],
)
def test_what_needs_all_heads_is_refused_under_tensor_parallelism(
    name: str, what: str, plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), name, tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    names = list(runner.compilation_config.static_forward_context)
    runner.initialize_kv_cache(cache_of(names))
    runner.vllm_config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ValueError, match=f"does not support .*{what}.* under tensor parallelism"):
        runner.initialize_kv_cache(cache_of(names))


def test_more_workers_than_kv_heads_are_refused(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of a head kept other rows each, and agentkv's bytes were twice those of full."""
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    names = list(runner.compilation_config.static_forward_context)
    runner.vllm_config.parallel_config.tensor_parallel_size = 4
    runner.initialize_kv_cache(cache_of(names))
    runner.vllm_config.parallel_config.tensor_parallel_size = 8
    with pytest.raises(ValueError, match="does not support more workers than KV heads"):
        runner.initialize_kv_cache(cache_of(names))


@pytest.mark.parametrize(
    ("prefix", "disabled", "refused"),
    [("shared", False, True), ("shared", True, False), ("own", False, False)],
)
def test_a_shared_prefix_is_refused_beside_cascade_attention(
    plugin: Any, prefix: str, disabled: bool, refused: bool
) -> None:
    asked = config()
    asked.model_config.disable_cascade_attn = disabled
    method = make_method("streamingllm", 64, {"prefix": prefix, "protect": "system"})
    if not refused:
        plugin.refuse_wrong_results(asked, cache_of(["layers.0"]), method)
        return
    with pytest.raises(ValueError, match="a shared prefix beside cascade attention"):
        plugin.refuse_wrong_results(asked, cache_of(["layers.0"]), method)


def test_windows_are_attended_to_by_our_backends_only(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans are evicted on order under any method, and shorten every layer's lengths."""
    other = type("FlashInferImpl", (Impl,), {})
    runner, path = made(plugin, other, "full-constrained", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    layers = list(runner.compilation_config.static_forward_context)
    runner.initialize_kv_cache(cache_of(layers))
    mixed = cache_of(layers[:1])
    mixed.kv_cache_groups += cache_of(layers[1:2]).kv_cache_groups
    window: Any = sys.modules["vllm.v1.kv_cache_interface"]
    mixed.kv_cache_groups[1].kv_cache_spec = window.SlidingWindowSpec()
    with pytest.raises(ValueError, match="FlashInferImpl shows no queries"):
        runner.initialize_kv_cache(mixed)


def test_a_cache_of_8_bits_and_attention_in_chunks_are_refused(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, path = made(plugin, flash(plugin), "agentkv", tmp_path)
    monkeypatch.setenv(VARIABLE, str(path))
    for name, value, said in (
        ("dtype", torch.float8_e4m3fn, "a quantised KV cache"),
        ("attention_chunk_size", 8192, "other than over all tokens or a window"),
    ):
        cache = cache_of(["layers.0"])
        setattr(cache.kv_cache_groups[0].kv_cache_spec, name, value)
        with pytest.raises(ValueError, match=said):
            runner.initialize_kv_cache(cache)


class Summing:
    """Our runner under h2o with a cache on the CPU, as far as a step's attention is added up."""

    def __init__(self, plugin: Any, folder: Path, blocks: int, buffered: int) -> None:
        self.plugin = plugin
        self.runner, _ = made(plugin, flash(plugin), "h2o", folder)
        self.layers = list(self.runner.compilation_config.static_forward_context.values())
        for layer in self.layers:
            layer.kv_cache, layer.isa = torch.randn(blocks, KV_HEADS, 16, 2 * DIM), "vec"
        self.runner.kv_cache_config = cache_of([layer.layer_name for layer in self.layers])
        policy = BackendPolicy(make_method("h2o", 64), MICRO, folder)
        self.runner._kvbench_connect(policy, self.layers)
        if buffered:
            plugin.CAPTURE.allocate(buffered, LAYERS, (HEADS, DIM), torch.zeros(0))
        self.sums = self.runner._kvbench_rows.sums

    def feed(self, plan: StepPlan, fed: dict[str, tuple[int, int, list[int]]]) -> None:
        """Begin a step: of every session the tokens before, those fed, and its blocks."""
        names = list(fed)
        plan.sessions.update({name: name for name in names})
        self.runner.requests = {
            name: SimpleNamespace(block_ids=[blocks]) for name, (*_, blocks) in fed.items()
        }
        self.runner.input_batch = SimpleNamespace(
            num_reqs=len(names), req_ids=names, token_ids_cpu=np.zeros((len(names), 999), int),
            num_computed_tokens_cpu=np.array([first for first, *_ in fed.values()]),
        )  # fmt: skip
        self.runner._kvbench_feed(plan, np.array([rows for _, rows, _ in fed.values()]))

    def forward(self, queries: Tensor) -> None:
        """Run the layers on queries [layers, rows, q_heads, head_dim], some of them padding."""
        for layer, query in zip(self.layers, queries, strict=True):
            layer.impl.forward(layer, query)
        self.plugin.CAPTURE.finish()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "device", torch.device("cpu"))
    monkeypatch.setattr(Runner, "dtype", torch.float32)


def attention(queries: Tensor, keys: Tensor) -> Tensor:
    """What queries [n, q_heads, head_dim] attend to, summed: [kv_heads, rows]; n are the last."""
    n, live = len(queries), keys.shape[1]
    logits = torch.einsum("nhd,hrd->hnr", queries, keys.repeat_interleave(HEADS // KV_HEADS, 0))
    hidden = torch.arange(live) > torch.arange(live - n, live)[:, None]
    each = (logits * DIM**-0.5).masked_fill(hidden, float("-inf")).softmax(-1).sum(1)
    return each.reshape(KV_HEADS, -1, live).mean(1)


@pytest.mark.usefixtures("on_cpu")
def test_sums_are_of_what_each_layers_queries_attend_to(plugin: Any, tmp_path: Path) -> None:
    """A prefill's as its layers run, a decode's, whose graph may be replayed, from the buffers."""
    model = Summing(plugin, tmp_path, blocks=6, buffered=8)
    blocks = {"a": [3, 1], "b": [5, 0]}
    plan = StepPlan(prompts={name: PromptPhases("token-id") for name in blocks})
    plan.left["b"] = PrefixEnd("prefix 1", 16)
    model.feed(plan, {"a": (0, 20, blocks["a"]), "b": (0, 25, blocks["b"])})
    prefill = torch.randn(LAYERS, 48, HEADS, DIM)
    model.forward(prefill)
    # Meanwhile 9 rows of `b` were evicted.
    model.feed(StepPlan(deficits={"b": 9}), {"a": (20, 1, blocks["a"]), "b": (25, 1, blocks["b"])})
    decode = torch.randn(LAYERS, 4, HEADS, DIM)
    model.forward(decode)
    for name, first, rows, missing in (("a", 0, 20, 0), ("b", 20, 25, 9)):
        live = rows + 1 - missing
        store = model.runner._kvbench_store(blocks[name], 32)
        for layer in range(LAYERS):
            keys = store.keys(layer)
            before = attention(prefill[layer, first : first + rows], keys[:, :rows])
            now = attention(decode[layer, ["a", "b"].index(name)][None], keys[:, :live])
            now[:, : live - 1] += before[:, : live - 1]
            torch.testing.assert_close(model.sums.of(name, live)[layer], now)
            if name == "b":
                shared = attention(prefill[layer, 20:36], keys[:, :16])
                torch.testing.assert_close(model.sums.of("prefix 1", 16)[layer], shared)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("buffered", [0, 8, 512])
def test_queries_of_one_layer_are_held_at_a_time(
    buffered: int, plugin: Any, tmp_path: Path
) -> None:
    model = Summing(plugin, tmp_path, blocks=32, buffered=buffered)
    model.feed(StepPlan(prompts={"a": PromptPhases("token-id")}), {"a": (0, 512, [*range(32)])})
    queries = torch.randn(LAYERS, 512, HEADS, DIM)
    model.sums.of("a", 512)
    one = peak_bytes(lambda: model.runner._kvbench_sum(0, queries[0]))
    every = peak_bytes(lambda: model.forward(queries))
    assert every < one + queries[0].nbytes / 4
