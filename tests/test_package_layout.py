"""The wheel holds everything, and the root shadows nobody's package."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHADOWED = {"adapters", "engines", "kernels", "results", "sglang", "tau2", "vllm"}
CORE_MUST_NOT_IMPORT = {"litellm", "bfcl_eval", "vllm", "sglang", "llama_cpp"}
ALLOWED = {
    "kernels": {"kernels", "errors"},
    "methods": {"methods", "kernels", "budget", "errors", "params"},
    "phases": {"phases", "methods", "errors"},
    "engines": {"engines", "accounting", "methods", "kernels", "phases", "environments", "errors"},
    "analysis": {"analysis", "methods", "kernels", "results", "budget", "errors"},
    "results": {"results", "accounting", "budget", "errors"},
    "loadgen": {"loadgen", "errors"},
    "environments": {"environments", "errors"},
    "adapters": {"adapters", "results", "environments", "errors", "params"},
    "gateway": {"gateway", "engines", "adapters", "phases", "errors"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_no_root_entry_shadows_a_package() -> None:
    assert not SHADOWED & {entry.name for entry in ROOT.iterdir()}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_what_the_design_allows(package: str) -> None:
    wrong = []
    for path in (ROOT / "agentbench_kv" / package).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            inside = parts[0] == "agentbench_kv" and len(parts) > 1
            if inside and parts[1] not in ALLOWED[package]:
                wrong.append((path.name, name))
    assert not wrong


def test_the_core_never_imports_heavy_dependencies() -> None:
    for path in (ROOT / "agentbench_kv").rglob("*.py"):
        # What runs in a benchmark's environment, or in an engine's own process.
        if {"worker", "plugin", "server"} & set(path.relative_to(ROOT).parts):
            continue
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & CORE_MUST_NOT_IMPORT, path


@pytest.mark.slow
def test_the_wheel_holds_packages_and_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not files:
        pytest.skip("not a git checkout: the list of files to package is unknown")
    for name in files:
        if name.startswith("agentbench_kv/") or name in {"pyproject.toml", "README.md", "LICENSE"}:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    missing = {name for name in files if name.startswith("agentbench_kv/") and name not in held}
    assert not missing
    assert not {name for name in held if name.startswith("tests/")}
