"""Who imports whom, what lies where, what the wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Container
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "agentbench_kv"
SHADOWED = {"adapters", "engines", "kernels", "results", "sglang", "tau2", "vllm"}
CORE_MUST_NOT_IMPORT = {"litellm", "bfcl_eval", "vllm", "sglang", "llama_cpp"}
EVERYBODY = {"", "errors"}  # the package itself, for its version
ALLOWED = {
    "accounting": set(),
    "adapters": {"encoders", "environments", "params", "results"},
    "analysis": {"budget", "kernels", "methods", "params", "results"},
    "budget": set(),
    "conformance": {
        "adapters", "analysis", "budget", "engines", "environments", "gateway", "memories",
        "methods", "phases", "registry", "results", "run",
    },
    "encoders": set(),
    "engines": {"accounting", "environments", "kernels", "methods", "phases"},
    "environments": set(),
    "errors": set(),
    "gateway": {"adapters", "engines", "methods", "phases"},
    "kernels": set(),
    "leaderboard": {
        "adapters", "budget", "engines", "gateway", "methods", "phases", "registry", "results",
        "run",
    },
    "memories": {"adapters", "environments", "gateway", "methods"},
    "methods": {"budget", "encoders", "kernels", "params"},
    "models": set(),
    "params": set(),
    "phases": {"methods"},
    "registry": {"adapters", "budget", "engines", "methods"},
    "results": {"accounting", "budget"},
    "run": {
        "adapters", "analysis", "budget", "encoders", "engines", "environments", "gateway",
        "kernels", "memories", "methods", "phases", "registry", "results", "training",
    },
    "serving_bench": {"budget", "engines", "gateway", "registry", "results", "run"},
    "sweeps": {"budget", "results", "run"},
    "training": {"adapters", "gateway", "methods", "results"},
}  # fmt: skip
ALLOWED["cli"] = set(ALLOWED)


def imported(path: Path, known: Container[str] = ()) -> set[str]:
    """Every module a file imports, wherever the import stands, those for annotations too.

    `from package import module` is an import of the module if that is `known`.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {name if name in known else node.module for name in full}
    return names


def modules() -> dict[str, Path]:
    """Our modules by their dotted names."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part_of(name: str) -> str:
    """The package or loose module that a dotted name belongs to."""
    return name.partition(".")[2].partition(".")[0]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Which of our modules each of them imports."""
    known = modules()
    return {
        name: {each for each in imported(path, known) if each in known} - {name}
        for name, path in known.items()
    }


def test_no_root_entry_shadows_a_package() -> None:
    assert not SHADOWED & {entry.name for entry in ROOT.iterdir()}


def test_every_package_has_its_place_and_five_modules_lie_loose() -> None:
    loose = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert loose | packages == {*ALLOWED}
    assert len(loose) <= 5


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_what_the_design_allows(package: str, graph: dict[str, set[str]]) -> None:
    ours = [name for name in graph if part_of(name) == package]
    allowed = {*ALLOWED[package], *EVERYBODY, package}
    assert ours
    wrong = [(name, each) for name in ours for each in graph[name] if part_of(each) not in allowed]
    assert not wrong


def test_packages_form_no_circle() -> None:
    TopologicalSorter(ALLOWED).prepare()


def test_files_form_no_circle(graph: dict[str, set[str]]) -> None:
    TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_the_core_never_imports_heavy_dependencies() -> None:
    for path in PACKAGE.rglob("*.py"):
        # What runs in a benchmark's environment, or in an engine's own process.
        if {"worker", "plugin", "server"} & set(path.relative_to(ROOT).parts):
            continue
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & CORE_MUST_NOT_IMPORT, path


@pytest.mark.slow
def test_what_is_published_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    """Build as `.ci/package` does: the source distribution, and from it the wheel."""
    pytest.importorskip("build", reason="the package build is missing; pip install -e '.[dev]'")
    command = ("git", "ls-files")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    files = set(listed.stdout.split())
    if not files:
        pytest.skip("not a git checkout: the list of files to package is unknown")
    source = tmp_path / "source"
    for name in files:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    (source / "runs").mkdir()
    (source / "runs/run.json").write_text("{}")
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    package = {name for name in files if name.startswith("agentbench_kv/")}
    assert any(name.endswith(".cu") for name in package)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == package
    with tarfile.open(sdist) as archive:
        members = [each.name for each in archive.getmembers() if each.isfile()]
    held = {name.partition("/")[2] for name in members if ".egg-info/" not in name}
    beside = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert held == package | beside


def test_no_two_classes_have_one_name() -> None:
    found = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, times in found.items() if times > 1}
