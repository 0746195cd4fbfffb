"""What `.ci/run nightly` builds, and the tests that it builds it for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agentbench_kv.environments import PROFILES

ROOT = Path(__file__).parents[2]
LOOP = ROOT.joinpath(".ci", "run").read_text(encoding="utf-8").partition("declare -A needs")
BUILT = re.findall(r'^  \[([\w-]+)\]="(.+)"$', LOOP[2], re.MULTILINE)


def test_every_environment_there_has_tests_that_need_it() -> None:
    assert {name for name, _ in BUILT} == {"vllm", "sglang", "llamacpp", "mem0", "graphiti"}
    for name, paths in BUILT:
        assert name in PROFILES
        for path in map(ROOT.joinpath, paths.split()):
            files = [*path.rglob("*.py")] if path.is_dir() else [path]
            text = "".join(file.read_text(encoding="utf-8") for file in files)
            assert name in text
            assert "pytest.mark.engine" in text or "pytest.mark.slow" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_what_is_there_is_not_built_and_what_cannot_be_is_said(tmp_path: Path) -> None:
    stand_ins = {
        "kvbench": """
[ "$2 $3" = "check vllm" ] && exit 0
[ "$2" = check ] && exit 2
echo "kvbench $*" >>"$home/said"
[ "$3" != mem0 ]""",
        "python": 'echo "python $*" >>"$home/said"',
        "timeout": 'shift; exec "$@"',
    }
    for name, code in stand_ins.items():
        tmp_path.joinpath(name).write_text(f"#!/usr/bin/env bash\n{code}\n", encoding="utf-8")
        tmp_path.joinpath(name).chmod(0o755)
    script = f"set -euo pipefail\nhome={tmp_path}\nexport home\n{LOOP[1]}{LOOP[2]}"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ("bash", "-c", script), capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert ran.returncode == 0, ran.stderr
    tests = dict(BUILT)
    expected = []
    for name in ("sglang", "llamacpp", "mem0", "graphiti"):
        expected.append(f"kvbench env create {name}")
        if name != "mem0":
            expected.append(f"python -m pytest -m engine {tests[name]}")
    assert tmp_path.joinpath("said").read_text(encoding="utf-8").splitlines() == expected
    (line,) = ran.stdout.splitlines()
    assert line.startswith(f"skipped: {tests['mem0']}, because the environment mem0 could not")
