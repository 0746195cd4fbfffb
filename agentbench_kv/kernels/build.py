"""Compiling the kernels on first use, into a cache of the user, and finding the threads they share.

A library is named after everything it depends on (sources, compiler, processor, flags) and what it
holds, is built in a folder of its own and renamed into place: a build that is killed or runs twice
at once does no harm, and a file that was damaged later is told by its name and built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from agentbench_kv.errors import PrerequisiteError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
CACHE_VARIABLE = "KVBENCH_KERNEL_CACHE"
FLAGS_VARIABLE = "KVBENCH_KERNEL_FLAGS"
TIMEOUT_S = 600
STALE_S = 3600
PATIENCE_S = 1.0
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")


@dataclass(frozen=True)
class Toolchain:
    """How one library is compiled."""

    kind: str  # `cpu` or `cuda`
    command: tuple[str, ...]  # all but the output's name
    about: str  # the compiler's version and what it compiles for

    @property
    def key(self) -> str:
        """Name of the build: 16 hexadecimal digits."""
        # Not where the sources lie: an engine's process finds them through a link of its own.
        words = [word.replace(str(SOURCES), "") for word in self.command]
        digest = hashlib.sha256(repr((words, self.about)).encode())
        for path in sorted(SOURCES.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16]


def toolchain(kind: str) -> Toolchain:
    """Find the compiler for `cpu` or `cuda` (PrerequisiteError without it, or without a GPU)."""
    if kind == "cpu":
        return _cpu_toolchain()
    if not torch.cuda.is_available():
        raise PrerequisiteError("PyTorch sees no CUDA device; see kvbench doctor")
    major, minor = torch.cuda.get_device_capability()
    return _nvcc_toolchain((f"{major}{minor}",))


def library(kind: str) -> Path:
    """Return the library, built once; PrerequisiteError with the compiler's first complaint."""
    tools = toolchain(kind)
    return cached(f"kvb-{kind}-{tools.key}", tools.command, f"{kind} kernels", tools.about)


def cached(name: str, command: tuple[str, ...], what: str, about: str = "") -> Path:
    """Return the library that a compiler's command makes, which is all but the output's name.

    It is kept as `NAME-DIGEST.so` in the cache, or in a folder of this user among the temporary
    ones where the cache cannot be written, which is said when something is put there.
    """
    own = own_folder()
    for folder in (cache_folder(), *([own] if own.exists() and _is_mine(own) else [])):
        if (found := _whole(folder, name)) is not None:
            return found
    with _workplace() as place, _note_if_slow(f"{what}, once ({about})" if about else what):
        draft = place / "draft.so"
        _compile(command, draft, what)
        try:
            return draft.replace(place.parent / f"{name}-{_digest(draft)}.so")
        except OSError as error:
            raise PrerequisiteError(f"cannot write {place.parent}: {error.strerror}") from error


def _whole(folder: Path, name: str) -> Path | None:
    """Find a library that holds what its name says; one that does not is removed."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError):
            if path.stem.rpartition("-")[2] == _digest(path):
                return path
            path.unlink()
            logger.info("kvbench: %s was damaged and is compiled again", path)
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextmanager
def _note_if_slow(what: str) -> Iterator[None]:
    """Say what is compiled once it has taken `PATIENCE_S`."""
    timer = threading.Timer(PATIENCE_S, logger.info, ("kvbench: compiling the %s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cache_folder() -> Path:
    """Return `$KVBENCH_KERNEL_CACHE`, or `kvbench/kernels` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    cached = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cached).expanduser().absolute() / "kvbench" / "kernels"


def own_folder() -> Path:
    """Return the folder of this user among the temporary ones."""
    return Path(tempfile.gettempdir()) / f"kvbench-kernels-{os.getuid()}"


def find_compiler() -> str:
    chosen = os.environ.get("CXX", "").strip()
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        if shutil.which(_words("CXX", name)[0]):
            return name
    said = f"CXX={chosen} is not on this machine; unset it" if chosen else "none found"
    raise PrerequisiteError(f"no C++ compiler ({said}, or install g++)")


def _cpu_toolchain() -> Toolchain:
    found = find_compiler()
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = ("-x", "c++", "-std=c++17", "-O3", native, "-fPIC", "-shared", "-pthread", "-Wno-psabi")
    command = (*shlex.split(found), *flags, *_extra_flags(), str(SOURCES / "kvbench.cu"))
    return Toolchain("cpu", command, f"{_version(found)}, {native} on {_processor()}")


def _nvcc_toolchain(architectures: tuple[str, ...]) -> Toolchain:
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc") or shutil.which(str(Path(home or "/usr/local/cuda") / "bin/nvcc"))
    if nvcc is None:
        raise PrerequisiteError("nvcc not found; install the CUDA toolkit or set CUDA_HOME")
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]
    # PTX too, which the driver compiles for a newer GPU: a cache may be shared with one.
    newest = max(architectures, key=int)
    targets.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    flags = ("-std=c++17", "-O3", "-Xcompiler=-fPIC", "-shared", *targets)
    command = (nvcc, *flags, *_extra_flags(), str(SOURCES / "kvbench.cu"))
    return Toolchain("cuda", command, f"{_version(nvcc)}, sm_{'+'.join(architectures)}")


def _extra_flags() -> list[str]:
    return _words(FLAGS_VARIABLE, os.environ.get(FLAGS_VARIABLE, ""))


def _words(variable: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise PrerequisiteError(f"{variable}={text}: {error}; write it as in a shell") from None


@cache
def _version(compiler: str) -> str:
    """Return the line of `--version` that carries a number."""
    done = run_compiler((*shlex.split(compiler), "--version"))
    lines = [line.strip() for line in done.stdout.splitlines() if any(c.isdigit() for c in line)]
    return next((line for line in reversed(lines) if "release" in line), lines[0] if lines else "?")


@cache
def _processor() -> str:
    """Name the instruction sets that `native` stands for, so that a shared cache stays right."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    name = next((line for line in lines if line.startswith("model name")), platform.machine())
    return f"{name.rpartition(':')[2].strip()} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _compile(command: tuple[str, ...], output: Path, what: str) -> None:
    done = run_compiler((*command, "-o", str(output)))
    if done.returncode or not output.exists():
        said = (done.stderr or done.stdout).strip().splitlines()
        complaint = next((line for line in said if "error" in line), said[-1] if said else "")
        raise PrerequisiteError(
            f"{Path(command[0]).name} could not compile the {what} "
            f"(exit {done.returncode}): {complaint.strip()[:300]}"
        )


def run_compiler(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a command; PrerequisiteError if it cannot be started, or takes `TIMEOUT_S`."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PrerequisiteError(f"cannot run {command[0]}: {error}") from error


@contextmanager
def _workplace() -> Iterator[Path]:
    """Yield a new folder in the cache, or in the user's own folder if that cannot be written."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        place = _new_folder(cache)
    except OSError as error:
        own = own_folder()
        logger.warning(
            "cannot write the kernel cache %s (%s): the kernels are kept in %s; set %s",
            *(cache, error.strerror, own, CACHE_VARIABLE),
        )
        place = _new_own_folder(own)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _new_folder(parent: Path) -> Path:
    _sweep(parent)
    return Path(tempfile.mkdtemp(prefix=".build-", dir=parent))


def _new_own_folder(parent: Path) -> Path:
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_mine(parent):
            raise PermissionError(None, "it belongs to somebody else")
        return _new_folder(parent)
    except OSError as error:
        raise PrerequisiteError(f"cannot write {parent} ({error.strerror}) either") from error


def _is_mine(folder: Path) -> bool:
    """Whether nobody else can have put anything into a folder."""
    about = folder.lstat()
    mine = about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(about.st_mode) and mine


def _sweep(folder: Path) -> None:
    for old in folder.glob(".build-*"):
        # Another process may finish, and remove its folder, at any time.
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > STALE_S:
                shutil.rmtree(old, ignore_errors=True)


def team_function() -> int | None:
    """Return the address of `GOMP_parallel` in the OpenMP runtime that PyTorch runs on, if any.

    GNU's, Intel's and LLVM's runtimes all have it. Their threads wait actively for some time after
    each parallel operation: kernels with threads of their own would compete with them for cores.
    """
    for path in _loaded_runtimes():
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _loaded_runtimes() -> list[str]:
    """Return the OpenMP libraries among the files this process has mapped, PyTorch's first."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.partition("/")[1] + line.partition("/")[2] for line in lines)
    return sorted(filter(_RUNTIME.search, paths), key=lambda path: "torch" not in path)
