"""The engine in the vLLM it was written for; skipped where its environment is not built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.conformance.engines import engine_suite
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.host import ALLOW_UNTESTED, refuse_untested
from agentbench_kv.engines.serving.refusals import refuse_method
from agentbench_kv.engines.vllm.engine import VllmEngine, on_gpu, shown_gpus
from agentbench_kv.engines.vllm.plugin import launch
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method

MICRO = Path(launch.__file__).parents[3] / "models" / "micro"


@pytest.mark.engine
def test_every_symbol_the_plugin_uses_is_there(in_vllm: Callable[[str], str]) -> None:
    code = "from agentbench_kv.engines.vllm.plugin.launch import problems; print(problems())"
    assert in_vllm(code).splitlines()[-1] == "[]"


@pytest.mark.engine
def test_a_symbol_that_changed_is_named(in_vllm: Callable[[str], str]) -> None:
    code = """
from agentbench_kv.engines.vllm.plugin import launch
launch.SYMBOLS = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("moon_phase",),
    "vllm.v1.request:RequestStatus.ASLEEP": (),
    "vllm.v1.nowhere:x": (),
}
print(launch.problems())
"""
    printed = in_vllm(code).splitlines()[-1]
    for word in ("has no moon_phase", "ASLEEP", "vllm.v1.nowhere"):
        assert word in printed


@pytest.mark.engine
def test_tiles_are_the_ones_vllm_writes(in_vllm: Callable[[str], str]) -> None:
    code = """
import torch
from vllm import _custom_ops as ops
import vllm._C
from agentbench_kv.engines.vllm.plugin.blocks import pack_tiles, unpack_tiles
for isa, dtype, size, dim in (
    ("vec", torch.float32, 32, 64),
    ("vec", torch.float32, 128, 128),
    ("vec", torch.bfloat16, 64, 128),
    ("vec16", torch.float32, 16, 64),
    ("amx", torch.bfloat16, 32, 64),
    ("amx", torch.bfloat16, 64, 32),
):
    heads, blocks = 2, 3
    rows = blocks * size
    cache = torch.zeros(blocks, heads, size, 2 * dim, dtype=dtype)
    keys, values = cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
    k, v = (torch.randn(rows, heads, dim).to(dtype) for _ in range(2))
    try:
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(rows), isa)
    except Exception as error:
        print("not here:", isa, error)
        continue
    K, V = unpack_tiles(cache, isa)
    assert torch.equal(K.transpose(1, 2).reshape(rows, heads, dim), k), isa
    assert torch.equal(V.transpose(1, 2).reshape(rows, heads, dim), v), isa
    assert torch.equal(pack_tiles(K, V, isa), cache), isa
    print("same:", isa, size, dim)
"""
    assert in_vllm(code).count("same:") >= 3


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("vllm_python")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_conformance(family: str) -> None:
    results = engine_suite("vllm", families=[family])
    wrong = [
        f"{part}: {check.name}: {check.detail}"
        for part, checks in results.items()
        for check in checks
        if not check.ok
    ]
    assert not wrong
    assert sum(len(checks) for checks in results.values()) > 20


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("vllm_python")
def test_an_engine_core_that_is_killed_is_started_again(
    survives_a_kill: Callable[[VllmEngine, str], None],
) -> None:
    method = make_method("full-constrained", None)
    engine = VllmEngine.create(EngineOptions("micro", method, device="cpu", concurrency=2))
    survives_a_kill(engine, "EngineCore")


@pytest.mark.engine
@pytest.mark.usefixtures("vllm_python")
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MICRO, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 77}))
    words = ["run", "--engine", "vllm", "--model", str(model), "--limit", "1"]
    done = CliRunner().invoke(
        kvbench, [*words, "--budget", "256", "--out", str(tmp_path / "runs"), "-q"]
    )
    assert done.exit_code != 0
    said = str(done.exception)
    assert "the vllm backend did not start (exit code 1): RuntimeError: The size of tensor" in said
    assert "ulimit" not in said
    assert "Traceback" not in done.output


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_version", lambda: ("vllm", "0.34.0"))
    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    with pytest.raises(
        SystemExit, match=r"0\.34\.0 is here.*0\.32\.0 and 0\.33\.0.*--allow-untested-engine"
    ):
        launch.main()


@pytest.mark.parametrize("build", ["", "+cpu", "+cu129"])
def test_a_build_of_a_tested_version_is_taken(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    refuse_untested("vLLM", f"0.33.0{build}", launch.TESTED)
    for other in ("0.33.1", "0.33.0rc1", "0.33.0.post1"):
        with pytest.raises(SystemExit, match="is here, the adapter was tested with"):
            refuse_untested("vLLM", f"{other}{build}", launch.TESTED)


def test_a_set_per_query_head_is_refused() -> None:
    with pytest.raises(UsageError, match="rows per KV head"):
        refuse_method(make_method("snapkv@original", 256))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype"):
        VllmEngine.check_compute("float8", "cpu")


def test_devices_by_name() -> None:
    assert on_gpu("cuda:1")
    assert not on_gpu("cpu")
    for wrong in ("gpu", "cudax", "", "cuda:", "cuda:x", "cuda:-1", "cpu:0"):
        with pytest.raises(UsageError, match="is none; use auto, cpu, cuda or cuda:N"):
            on_gpu(wrong)


@pytest.mark.parametrize(
    ("device", "seen", "arguments", "shown"),
    [
        ("cuda", "4,5", {}, None),
        ("cuda:1", None, {}, "1"),
        ("cuda:1", "4, 5", {}, "5"),
        ("cuda:1", "GPU-a,GPU-b,GPU-c", {"tensor-parallel-size": "2"}, "GPU-b,GPU-c"),
        ("cuda:2", None, {"tp-size": "2"}, "2,3"),
    ],
)
def test_a_server_sees_the_gpu_that_was_named(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    seen: str | None,
    arguments: dict[str, str],
    shown: str | None,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    options = EngineOptions("m", make_method("full", None), device=device, engine_args=arguments)
    assert shown_gpus(options).get("CUDA_VISIBLE_DEVICES") == shown


def test_a_gpu_that_is_not_shown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=4 shows 1 GPUs"):
        shown_gpus(EngineOptions("m", make_method("full", None), device="cuda:1"))
