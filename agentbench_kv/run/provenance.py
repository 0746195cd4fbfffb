"""Where a figure comes from: versions, code, hardware."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import agentbench_kv
from agentbench_kv.environments import process_env
from agentbench_kv.environments.processors import usable_cores
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.kvpress import KVPressMethod
from agentbench_kv.registry import distribution
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import METHOD_CODE
from agentbench_kv.run.checkout import code_sha, commit_of

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "kvpress")


def environment(device: str = "auto") -> dict[str, Any]:
    """Return versions, code and hardware of this process, of which an engine gets `device`."""
    package = Path(agentbench_kv.__file__).parent
    return {
        "kvbench": agentbench_kv.__version__,
        "git_commit": commit_of(package),
        "code_sha": code_sha(package),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(device),
        "kernels": kernels(),
    }


def refuse_other_model(run: RunReader, sha: str) -> None:
    """Refuse to go on with a run whose trials are another model's, of the same name or folder."""
    known = run.info.provenance.get("model_sha") if run.finished_trials() else None
    if known not in (None, sha):
        raise UsageError(
            f"the model {run.info.spec['model']} changed since run {run.info.run_id} began; "
            "choose another --out"
        )


def method_code(method: Method) -> dict[str, Any]:
    """Return what tells a method's code from the same code edited; nothing if no file holds it.

    It is the digest of the file that holds the method's class and of those of its bases outside
    this package; behind it stands the distribution that a plug-in is from.
    """
    return dict(_method_code(cast("type", type(method)), method.name))


@cache  # a class stays what it was when its module was imported, whatever its file says later
def _method_code(cls: type, name: str) -> dict[str, Any]:
    press = cls.press.cls.__mro__ if issubclass(cls, KVPressMethod) else ()
    bases = (each for each in (*cls.__mro__[1:], *press) if _is_foreign(each))
    own = _source(cls)
    if own is None:
        return {}
    found = dict.fromkeys((own, *filter(None, map(_source, bases))))
    code = hashlib.sha256("".join(found).encode()).hexdigest()[:16]
    packed = distribution("method", name) if _is_foreign(cls) else None
    return {METHOD_CODE: f"{code} {packed}" if packed else code}


def _is_foreign(cls: type) -> bool:
    root = cls.__module__.partition(".")[0]
    return root != agentbench_kv.__name__ and root not in sys.stdlib_module_names


def _source(cls: type) -> str | None:
    """Return the digest of the file a class is written in."""
    try:
        path = inspect.getsourcefile(cls)
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
    except (OSError, TypeError):  # typed into an interpreter
        return None


def hardware(device: str = "auto") -> dict[str, Any]:
    """Return processor, cores and accelerator, and the settings of waiting threads and of pages.

    Of several accelerators it is the one that `device` names, else the first; `usable_cores` are
    those that this process may use (`taskset`).
    """
    import torch

    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "gpu": _gpu_name(device),
        "settings": process_env.in_force(os.environ),
    }


def _gpu_name(device: str) -> str | None:
    import torch

    named = device.partition(":")[2]
    number = int(named) if named.isdecimal() else 0
    known = torch.cuda.is_available() and number < torch.cuda.device_count()
    return torch.cuda.get_device_name(number) if known else None


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
