"""Where a figure comes from: versions, code, hardware."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import agentbench_kv
from agentbench_kv.environments import process_env
from agentbench_kv.run.checkout import code_sha, commit_of

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "kvpress")


def environment() -> dict[str, Any]:
    """Return versions, code and hardware of this process."""
    package = Path(agentbench_kv.__file__).parent
    return {
        "kvbench": agentbench_kv.__version__,
        "git_commit": commit_of(package),
        "code_sha": code_sha(package),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "kernels": kernels(),
    }


def hardware() -> dict[str, Any]:
    """Return processor, cores and accelerator, and the settings of waiting threads and of pages."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": gpu,
        "settings": process_env.in_force(os.environ),
    }


def kernels() -> str:
    """Return the kernel backend that tensors of the default device use."""
    import torch

    from agentbench_kv.kernels import describe_backend

    return describe_backend("cuda" if torch.cuda.is_available() else "cpu")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
