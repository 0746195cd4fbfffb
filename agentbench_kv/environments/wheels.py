"""Wheels that no index holds: built once from a source distribution and kept for this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentbench_kv.environments.locations import Report, home
from agentbench_kv.environments.sdist import BuiltWheel
from agentbench_kv.errors import PrerequisiteError

# Runs a command with additions to the environment; raises if it fails.
Run = Callable[[Sequence[str], Mapping[str, str]], None]


def cached_wheel(wanted: BuiltWheel) -> Path | None:
    """Return the wheel that was built on such a processor before, if there is one."""
    return next(iter(sorted(_folder(wanted).glob("*.whl"))), None)


def wheel_of(wanted: BuiltWheel, python: Path, run: Run, report: Report) -> Path:
    """Return the wheel, building it with the pip of `python` if this machine has not yet."""
    folder = _folder(wanted)
    if (found := cached_wheel(wanted)) is not None:
        report(f"using {found}")
        return found
    missing = [tool for tool in wanted.tools if shutil.which(tool) is None]
    if missing:
        raise PrerequisiteError(
            f"building {wanted.requirement} needs {', '.join(missing)}; install it, for example "
            f"with the system's package manager"
        )
    report(f"building {wanted.requirement}, once: about {wanted.minutes} minutes on two cores")
    folder.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-I", "-m", "pip", "wheel", "--no-input", "--disable-pip-version-check"]
    source = ["--no-deps", "--no-binary", wanted.distribution]
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as place:
        run([*pip, *source, "--wheel-dir", place, wanted.requirement], wanted.settings)
        (made,) = Path(place).glob("*.whl")
        return made.rename(folder / made.name)


def _folder(wanted: BuiltWheel) -> Path:
    """Return where the wheel is kept: code for one processor may not run on another."""
    digest = hashlib.sha256(wanted.pinned() + _processor().encode()).hexdigest()
    return home() / "wheels" / f"{wanted.distribution}-{wanted.version}-{digest[:12]}"


def _processor() -> str:
    """Name the machine and the instruction sets of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.system()} {platform.machine()} {os.name} {flags}"
