"""What vLLM's and SGLang's wires hand to a server that is started again."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.ledger import WindowBytes
from agentbench_kv.engines.core.policy import VARIABLE, method_from
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.llamacpp.engine import LlamaCppWire
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.serving.model_facts import ModelFacts, read_model
from agentbench_kv.engines.serving.refusals import refuse_method
from agentbench_kv.engines.serving.wire import EngineWire
from agentbench_kv.engines.sglang.engine import SglangEngine, SglangEngineWire
from agentbench_kv.engines.vllm.engine import VllmEngine, VllmEngineWire, tokens_taken
from agentbench_kv.environments import process_env
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.registry import make_method
from agentbench_kv.serving_bench.measurements import ServingArm
from agentbench_kv.serving_bench.servers import pool_tokens

FACTS = ModelFacts("qwen3", 2, 4, 2, 32, 4096, (1,))
OPTIONS = EngineOptions("micro", make_method("full-constrained", None))


@pytest.mark.parametrize("wire_class", [VllmEngineWire, SglangEngineWire])
def test_a_server_starts_with_the_method_in_use(
    wire_class: Callable[..., EngineWire], tmp_path: Path
) -> None:
    wire = wire_class(OPTIONS, FACTS, Path("python"), tmp_path, tmp_path, False, False)
    method = make_method("agentkv", 96, {"interval": 32})
    for expected in (OPTIONS.method, method):
        wire.use(expected)
        policy = Path(wire.launch().environment[VARIABLE])
        assert method_from(json.loads(policy.read_text())["method"]) == expected
    wire.close()


@pytest.mark.parametrize("left", [True, False])
def test_a_socket_that_could_not_connect_is_closed(
    left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a server that died a moment ago; one that was killed leaves its socket's file."""
    if left:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(str(tmp_path / "http"))
            server.listen()
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(socket, "socket", Noted)
    wire = VllmEngineWire(OPTIONS, FACTS, Path("python"), tmp_path, tmp_path, False, True)
    try:
        assert wire.lost()
        with pytest.raises(httpx.ConnectError):
            wire.details()
        assert [each.fileno() for each in made] == [-1, -1]
    finally:
        for each in made:
            each.close()
        wire.close()


INFO = 'INFO core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model="m"\n'


@pytest.mark.parametrize("stock", [False, True])
def test_vllms_model_runner_is_forced_under_the_plugin_and_read_of_its_log_as_shipped(
    stock: bool, tmp_path: Path
) -> None:
    """0.33 chooses V2 where nothing is said; V1 has the insides that the plug-in knows."""
    wire = VllmEngineWire(OPTIONS, FACTS, Path("python"), tmp_path, tmp_path, False, stock)
    assert wire.launch().environment.get("VLLM_USE_V2_MODEL_RUNNER") == (None if stock else "0")
    ran = [wire.told(log) for log in (INFO, f"{INFO}INFO Using V2 Model Runner\n", "WARNING x\n")]
    expected = ["V1", "V2", "not known"] if stock else ["V1"] * 3
    assert [each["model_runner"] for each in ran] == expected
    wire.close()


CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ""),
        ({"model_type": "qwen3_moe"}, ""),
        ({"model_type": "glm4", "partial_rotary_factor": 0.5}, "turns 50% of a head"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "turns 25% of a head"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' has frequencies"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' has frequencies"),
        ({"model_type": "cohere"}, "cohere has not been checked"),
    ],
)
def test_keys_are_turned_only_where_it_is_known_how(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Logical positions need no turning, so any model will do."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    facts = read_model(tmp_path)
    assert reason in facts.unturnable()
    refuse_method(make_method("streamingllm", 128), facts)
    paper = make_method("streamingllm@paper", 128)
    if not reason:
        refuse_method(paper, facts)
        return
    with pytest.raises(UsageError, match="positions=logical"):
        refuse_method(paper, facts)


def test_a_config_whose_rope_is_nonsense_is_one_line(tmp_path: Path) -> None:
    for nonsense in (["yarn"], {"partial_rotary_factor": "half"}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": nonsense}))
        with pytest.raises(PrerequisiteError, match="is not a decoder's"):
            read_model(tmp_path)


@pytest.mark.parametrize("argument", ["hf-overrides", "hf_overrides", "hf-overrides.rope_theta"])
@pytest.mark.parametrize("engine", [VllmEngine, SglangEngine])
def test_a_config_changed_on_the_command_line_is_not_the_one_keys_are_turned_by(
    engine: type[ServingEngine], argument: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(
        str(tmp_path),
        make_method("streamingllm@paper", 128),
        device="cpu",
        engine_args={argument: "{}"},
    )
    with pytest.raises(UsageError, match="--engine-arg hf-overrides"):
        engine.check_options(options)
    with pytest.raises(UsageError, match="--engine-arg hf-overrides"):
        engine.create(options)


LARGE = replace(FACTS, layers=28, kv_heads=8, head_dim=128, context_limit=40_960)
FREE = "agentbench_kv.engines.serving.model_facts.free_memory"


def value_of(words: Sequence[str], option: str) -> int:
    return int(words[list(words).index(f"--{option}") + 1])


def cached_tokens(
    wire_class: Callable[..., EngineWire], facts: ModelFacts, folder: Path, **options: Any
) -> int:
    """Return how many tokens a server's command line makes room for."""
    wire = wire_class(
        replace(OPTIONS, **options), facts, Path("python"), folder, folder, False, False
    )
    words = wire.launch().command
    wire.close()
    if wire_class is VllmEngineWire:
        size = value_of(words, "kv-cache-memory-bytes")
        assert size % facts.pool_bytes("float32") == 0
        return size // facts.pool_bytes("float32")
    return value_of(words, "max-total-tokens")


@pytest.mark.parametrize("wire_class", [VllmEngineWire, SglangEngineWire])
@pytest.mark.parametrize("facts", [FACTS, LARGE])
def test_a_cpu_gets_a_cache_for_all_sessions_or_half_of_what_the_weights_leave(
    wire_class: Callable[..., EngineWire],
    facts: ModelFacts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1 GiB would not do for a model of 0.6 billion parameters, and vLLM would not start."""
    size, weights = facts.pool_bytes("float32"), 3 << 30
    heavy = replace(facts, stored_bytes=weights // 2, stored_dtype="bfloat16")
    everybody = 5 * facts.context_limit
    monkeypatch.setattr(FREE, lambda: 1 << 50)
    found = cached_tokens(wire_class, heavy, tmp_path, concurrency=5)
    assert everybody <= found <= everybody * 1.02
    some = 3 * facts.context_limit
    monkeypatch.setattr(FREE, lambda: weights + 2 * some * size)
    assert cached_tokens(wire_class, heavy, tmp_path, concurrency=5) == some
    dummy = cached_tokens(wire_class, heavy, tmp_path, concurrency=5, load_format="dummy")
    assert dummy > some


def test_vllm_without_memory_for_a_context_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FREE, lambda: 2 * 10_000 * LARGE.pool_bytes("float32"))
    assert cached_tokens(VllmEngineWire, LARGE, tmp_path, engine_args={"max-model-len": "8192"})
    with pytest.raises(PrerequisiteError, match=r"8\.8 GiB.*max-model-len=9936"):
        cached_tokens(VllmEngineWire, LARGE, tmp_path)


def test_rows_of_one_byte_take_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FREE, lambda: 2 * 12_000 * LARGE.pool_bytes("float32"))
    method = make_method("full", None)
    options = replace(OPTIONS, kv_dtype="fp8", method=method, concurrency=5)
    wire = VllmEngineWire(options, LARGE, Path("python"), tmp_path, tmp_path, False, True)
    words = wire.launch().command
    wire.close()
    assert value_of(words, "kv-cache-memory-bytes") == 48_000 * LARGE.pool_bytes("fp8")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("wire_class", "kv_dtype", "per_token"),
    [
        (VllmEngineWire, "", "float32"),
        (VllmEngineWire, "fp8", "fp8"),
        (SglangEngineWire, "", "float32"),
        (SglangEngineWire, "fp8_e4m3", "fp8_e4m3"),
    ],
)
def test_a_pool_of_some_bytes_has_them_on_each_command_line(
    wire_class: Callable[..., EngineWire], kv_dtype: str, per_token: str, gpu: bool, tmp_path: Path
) -> None:
    """Equal memory is equal bytes, whatever a row takes; vLLM adds its placeholder block."""
    facts, asked = read_model(model_path("micro")), 40e6
    method = make_method("full", None)
    plan: Any = SimpleNamespace(model="micro", dtype="float32", pool_mb=asked / 1e6, engine_args={})
    arm = ServingArm(name="full", method="full", kv_dtype=kv_dtype)
    room = pool_tokens(plan, arm, per_query_head=False)
    options = replace(
        OPTIONS, method=method, kv_dtype=kv_dtype, max_live_tokens=room,
        device="cuda" if gpu else "cpu",
    )  # fmt: skip
    wire = wire_class(options, facts, Path("python"), tmp_path, tmp_path, gpu, True)
    words = wire.launch().command
    wire.close()
    block = 1
    if wire_class is VllmEngineWire:
        block = value_of(words, "block-size")
        tokens = (value_of(words, "num-gpu-blocks-override") - 1) * block
    else:
        tokens = value_of(words, "max-total-tokens")
    held = tokens * facts.pool_bytes(per_token)
    assert asked - facts.pool_bytes(per_token) < held < asked + block * facts.pool_bytes(per_token)
    assert facts.pool_bytes("float32") == (4 if kv_dtype else 1) * facts.pool_bytes(per_token)


@pytest.mark.parametrize("name", ["num-gpu-blocks-override", "max-total-tokens", "cells"])
def test_a_pool_is_not_sized_in_two_ways(name: str) -> None:
    """The argument was stronger, and tables went on saying that all pools were equal."""
    plan: Any = SimpleNamespace(
        model="micro", dtype="float32", pool_mb=40.0, engine_args={name: "5000", "a": "b"}
    )
    with pytest.raises(UsageError, match=f"--engine-arg {name} sizes the cache, too"):
        pool_tokens(plan, ServingArm(name="full", method="full"), per_query_head=False)


def test_what_a_cpu_gets_is_said_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FREE, lambda: 1 << 50)
    for options, said in ((OPTIONS, True), (replace(OPTIONS, max_live_tokens=9000), False)):
        wire = SglangEngineWire(options, FACTS, Path("python"), tmp_path, tmp_path, False, False)
        assert ("cache" in wire.details()) == said
        wire.close()


WINDOWED = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
VLLM, SGLANG = VllmEngine.check_options, SglangEngine.check_options


@pytest.mark.parametrize(
    ("change", "vllm", "sglang"),
    [
        ({}, "", ""),
        ({"model_type": "qwen3", "head_dim": 32}, "", ""),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "", ""),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic RoPE", "dynamic RoPE"),
        ({"model_type": "phi3", "sliding_window": None, "pad_token_id": 0}, "", ""),
        ({"model_type": "phi3", "sliding_window": 64, "pad_token_id": 0}, "a window of 64", "win"),
        ({"model_type": "mistral", "sliding_window": 64}, "a window of 64", "has windows"),
        ({"model_type": "mistral", "sliding_window": None}, "", ""),
        ({"model_type": "gpt_oss", "rope_scaling": YARN, **WINDOWED}, "", "has windows"),
        ({"model_type": "gpt_oss", **PLAIN, **WINDOWED}, "without YaRN", "has windows"),
        ({"model_type": "gemma3_text", **WINDOWED}, "", "has windows"),
        ({"model_type": "gemma2", **WINDOWED}, "nobody has checked", "has windows"),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64}, "", ""),
        ({"model_type": "qwen2", "use_sliding_window": True, **WINDOWED}, "nobody has", "has win"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 32}, "MLA", "MLA"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "state", "state"),
        ({"model_type": "unheard_of", "mamba_d_state": 16}, "state", "state"),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, "in chunks", "in chunks"),
        ({"dual_chunk_attention_config": {"chunk_size": 9}}, "in chunks", "in chunks"),
        ({"model_type": "unheard_of", "alibi": True}, "ALiBi", "ALiBi"),
        ({"attn_logit_softcapping": 50.0}, "", "capped attention logits"),
    ],
)
def test_what_eviction_would_make_wrong_is_refused_by_its_config(
    change: dict[str, Any], vllm: str, sglang: str, tmp_path: Path
) -> None:
    """In one line, before anything starts: no environment is looked for, no weights are there."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    options = EngineOptions(str(tmp_path), make_method("agentkv", 96), device="cpu")
    for check, reason in ((VLLM, vllm), (SGLANG, sglang)):
        if not reason:
            check(options)
            continue
        with pytest.raises(UsageError, match=reason) as refused:
            check(options)
        assert "\n" not in str(refused.value)


def test_a_window_in_every_layer_is_no_hindrance_where_nothing_is_evicted(tmp_path: Path) -> None:
    windowed = CONFIG | {"model_type": "mistral", "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(windowed))
    VLLM(EngineOptions(str(tmp_path), make_method("full", None), device="cpu"))


@pytest.mark.parametrize(
    ("check", "name", "most"), [(VLLM, "max-model-len", 4096), (SGLANG, "context-length", 4104)]
)
def test_an_engines_own_argument_asks_for_no_more_than_the_model_has(
    check: Callable[[EngineOptions], None], name: str, most: int, tmp_path: Path
) -> None:
    config = CONFIG | {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineOptions(str(tmp_path), make_method("agentkv", 96), device="cpu")
    check(replace(options, engine_args={name: str(most)}))
    for wrong in (str(most + 1), "0", "4k", "-1", "\u00b2", ""):
        with pytest.raises(UsageError, match=f"--engine-arg {name}={wrong}: expected"):
            check(replace(options, engine_args={name: wrong}))


@pytest.mark.parametrize(
    ("check", "name", "value", "what"),
    [
        (VLLM, "data-parallel-size", "2", "data parallelism"),
        (VLLM, "pipeline-parallel-size", "2", "pipeline parallelism"),
        (VLLM, "kv-cache-dtype", "fp8", "a quantised KV cache"),
        (VLLM, "data_parallel_size", "2", "data parallelism"),
        (VLLM, "pipeline-parallel_size", "2", "pipeline parallelism"),
        (VLLM, "kv_cache_dtype", "fp8", "a quantised KV cache"),
        (SGLANG, "tp_size", "2", "tensor parallelism"),
        (SGLANG, "dp-size", "2", "data parallelism"),
        (SGLANG, "pp", "4", "pipeline parallelism"),
        (SGLANG, "tensor-parallel-size", "2", "tensor parallelism"),
        (SGLANG, "kv-cache-dtype", "fp8_e5m2", "a quantised KV cache"),
    ],
)
def test_arguments_that_eviction_would_be_wrong_with_are_refused_before_anything_starts(
    check: Any, name: str, value: str, what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(str(tmp_path), make_method("agentkv", 96), device="cpu")
    dashed = name.replace("_", "-")
    with pytest.raises(UsageError, match=f"--engine-arg {dashed}={value}: .*{what}"):
        check(replace(options, engine_args={name: value}))
    harmless = {"kv-cache-dtype": "auto"}.get(dashed, "1")
    check(replace(options, engine_args={name: harmless, "tensor-parallel-size": "1"}))
    full = replace(options, method=make_method("full", None), engine_args={name: value})
    if dashed == "kv-cache-dtype":  # which would be called `full` all the same
        with pytest.raises(UsageError, match=f"{dashed}={value}: runs are labelled"):
            check(full)
    else:
        check(full)


DIVIDED = [
    ("tova", {}, "kept_set=per_layer"),
    ("agentkv", {"kept_set": "shared"}, "kept_set=shared"),
    ("triattention", {}, "statistics are of all heads"),
    ("expected-attention", {}, "statistics are of all heads"),
    ("random", {}, "the number of a head"),
]


@pytest.mark.parametrize(("name", "settings", "what"), DIVIDED)
@pytest.mark.parametrize("argument", ["tensor-parallel-size", "tensor_parallel_size", "tp"])
def test_what_needs_all_heads_is_refused_where_workers_have_some_each(
    argument: str, name: str, settings: dict[str, str], what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    method = make_method(name, 96, settings)
    options = EngineOptions(str(tmp_path), method, device="cpu", engine_args={argument: "2"})
    with pytest.raises(UsageError, match=f"{what}.* under tensor parallelism"):
        VLLM(options)
    VLLM(replace(options, engine_args={argument: "1"}))
    for other in (make_method("agentkv", 96), make_method("full", None)):
        VLLM(replace(options, method=other))
    spans = make_method("clear-tools", 96, {"exec": "span"})  # what ranks no rows
    VLLM(replace(options, method=spans))
    many = replace(options, engine_args={argument: "64"})
    with pytest.raises(UsageError, match=r"the model has \d KV heads, and eviction"):
        VLLM(replace(many, method=make_method("agentkv", 96)))
    VLLM(replace(many, method=make_method("full", None)))


def test_a_running_server_is_asked_for_no_method_that_a_start_refuses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked: list[str] = []
    options = EngineOptions(
        str(tmp_path), make_method("agentkv", 96), device="cpu",
        engine_args={"tensor-parallel-size": "2"},
    )  # fmt: skip
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._wire = SimpleNamespace(stock=False, full_as_shipped=True, options=options)
    engine._control = SimpleNamespace(call=lambda command, **_: asked.append(command))
    with pytest.raises(UsageError, match=r"kept_set=per_layer.* under tensor parallelism"):
        engine.reconfigure(make_method("tova", 96))
    assert asked == []


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (VLLM, "max-model"), (VLLM, "kv-cache-dt"), (VLLM, "kv_cache_d"), (VLLM, "pipeline"),
        (VLLM, "hf-over.rope_theta"), (VLLM, "kv-offloading-s"), (VLLM, "kv-cache-mem"),
        (SGLANG, "max-total"), (SGLANG, "context"), (SGLANG, "kv-cache-dt"), (SGLANG, "tp-s"),
        (SGLANG, "hicache-s"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["full", "agentkv"])
def test_the_beginning_of_a_name_is_refused(
    check: Any, name: str, method: str, tmp_path: Path
) -> None:
    """Servers take it for the whole, and what we refuse, or go by, would not be seen."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    chosen = make_method(method, None if method == "full" else 96)
    options = EngineOptions(str(tmp_path), chosen, device="cpu", engine_args={name: "2"})
    dashed = options.engine_args and next(iter(options.engine_args))
    with pytest.raises(UsageError, match=f"--engine-arg {dashed}: write the whole name, such as "):
        check(options)


VLLM_ROWS = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}


@pytest.mark.parametrize(
    ("wire_class", "known", "names"),
    [
        (VllmEngineWire, VllmEngine.kv_dtypes, VLLM_ROWS),
        (
            SglangEngineWire,
            SglangEngine.kv_dtypes,
            {"fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"},
        ),
    ],
)
def test_a_gpus_server_is_told_the_precision_of_its_rows_in_its_own_words(
    wire_class: Callable[..., EngineWire],
    known: Sequence[str],
    names: dict[str, str],
    tmp_path: Path,
) -> None:
    assert list(known) == list(names)
    full = replace(OPTIONS, method=make_method("full", None))
    for name, word in {"": "", **names}.items():
        options = replace(full, kv_dtype=name)
        wire = wire_class(options, FACTS, Path("python"), tmp_path, tmp_path, True, True)
        words = list(wire.launch().command)
        wire.close()
        found = [words[at + 1] for at, each in enumerate(words) if each == "--kv-cache-dtype"]
        assert found == ([word] if word else [])


@pytest.mark.parametrize("name", [*VLLM_ROWS, ""])
def test_a_cpu_has_vllms_rows_of_8_bit_floats_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(str(tmp_path), make_method("full", None), device="cpu", kv_dtype=name)
    VLLM(replace(options, device="cuda"))
    if not name.startswith("int"):
        VLLM(options)
        return
    with pytest.raises(UsageError, match=f"--kv-dtype {name}: vLLM's attention on a CPU") as said:
        VLLM(options)
    assert "use fp8, fp8_e4m3, fp8_e5m2" in str(said.value)
    assert "\n" not in str(said.value)


def test_an_engine_argument_has_one_name_however_it_is_spelled() -> None:
    """vLLM takes both; behind a dot are keys, not names."""
    given = {"max_model_len": "9", "hf_overrides.rope_theta": "1"}
    options = replace(OPTIONS, engine_args=given)
    assert options.engine_args == {"max-model-len": "9", "hf-overrides.rope_theta": "1"}
    with pytest.raises(UsageError, match=r"^--engine-arg max-model-len is given twice.*$"):
        replace(OPTIONS, engine_args=given | {"max-model-len": "9"})


def test_a_longrope_model_runs_in_sglang_up_to_its_original_context(tmp_path: Path) -> None:
    """SGLang chooses the factors of a whole batch by its longest session."""
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = CONFIG | {"model_type": "phi3", "sliding_window": None, "pad_token_id": 0}
    config |= {"rope_scaling": rope, "original_max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineOptions(str(tmp_path), make_method("agentkv", 96), device="cpu")
    VLLM(options)
    with pytest.raises(UsageError, match=r"LongRoPE.*context-length=1032"):
        SGLANG(options)
    SGLANG(replace(options, engine_args={"context-length": "1032"}))


def test_the_decoder_of_a_multimodal_folder_is_found(tmp_path: Path) -> None:
    """Published ones leave out what is their family's default."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512}
    config = {"model_type": "gemma3", "text_config": text, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model(tmp_path)
    assert (facts.family, facts.layers, facts.nested) == ("gemma3_text", 7, True)
    # Every sixth layer has no window.
    assert facts.windows == (512,) * 5 + (0, 512)
    assert (facts.q_heads, facts.kv_heads, facts.head_dim) == (8, 4, 256)
    one = facts.pool_bytes("bfloat16") // 7
    assert facts.bytes_per_token("bfloat16") == one
    assert facts.window_bytes("bfloat16") == WindowBytes(6 * one, 512)
    with pytest.raises(UsageError, match="torchvision"):
        VLLM(EngineOptions(str(tmp_path), make_method("agentkv", 96), device="cpu"))


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((0, 0, 0, 0), (1, 0)),
        ((8, 0, 8, 0), (1, 1)),
        ((8, 8, 8, 8, 8, 0), (1, 5)),
        ((8, 0, 0, 0), (3, 1)),
        ((8,) * 12 + (0,) * 13, (1, 1)),
    ],
)
def test_layers_of_one_kind_are_counted_in_groups_as_vllm_makes_them(
    windows: tuple[int, ...], groups: tuple[int, int]
) -> None:
    facts = replace(FACTS, layers=len(windows), windows=windows if any(windows) else ())
    counted = facts.groups_of(facts.full_layers), facts.groups_of(sum(map(bool, facts.windows)))
    assert counted == groups
    assert facts.groups == sum(groups)


def test_vllms_processes_keep_their_sockets_in_the_engines_folder(tmp_path: Path) -> None:
    wire = VllmEngineWire(OPTIONS, FACTS, Path("python"), tmp_path, tmp_path, False, False)
    environment = wire.launch().environment
    assert environment["VLLM_RPC_BASE_PATH"] == environment["TMPDIR"] == str(tmp_path)
    assert str(tmp_path) not in environment["TORCHINDUCTOR_CACHE_DIR"]
    wire.close()


METRICS = """
# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="101"} 1.0
"""


def test_vllm_as_shipped_says_how_much_of_its_cache_is_taken() -> None:
    assert tokens_taken(METRICS) == 25 * 32  # the placeholder block is nobody's
    assert tokens_taken(METRICS.replace("num_gpu_blocks", "other")) is None
    assert tokens_taken("") is None


@pytest.mark.parametrize("wire", [VllmEngineWire, SglangEngineWire, LlamaCppWire])
def test_a_record_says_what_was_said_of_a_servers_threads(
    wire: type[EngineWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier test of this process may have started the command line.
    monkeypatch.setattr(process_env, "_applied", set())
    made = object.__new__(wire)
    made.gpu = False
    for name in ("VLLM_CPU_OMP_THREADS_BIND", *EngineWire.threads):
        monkeypatch.delenv(name, raising=False)
    assert made._threads() == {}
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    said = "VLLM_CPU_NUM_OF_RESERVED_CPU=0 " * (wire is VllmEngineWire) + "OMP_NUM_THREADS=2"
    assert made._threads() == {"environment": f"{said} GOMP_SPINCOUNT=1000"}
    # The command line sets it for itself.
    monkeypatch.setattr(process_env, "_applied", {"GOMP_SPINCOUNT"})
    assert made._threads() == {"environment": said}
    made.gpu = True
    assert made._threads() == {}
