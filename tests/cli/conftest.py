"""Running the command line: inside this process, or as a user does in one of its own."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from agentbench_kv.cli import main

Result = subprocess.CompletedProcess[str]


@pytest.fixture
def kvbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs `kvbench ARGS` in an empty folder, without a new process."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KVBENCH_")]:
        monkeypatch.delenv(name)

    log = logging.getLogger("agentbench_kv")

    def call(*args: str, **environment: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        # A process has one command line and one handler for its log; here they would add up.
        log.handlers.clear()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["kvbench", *args])
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        code = ended.value.code
        assert isinstance(code, int)
        return Result(args, code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def kvbench_process(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs `kvbench ARGS` in an empty folder and a new process."""

    def call(*args: str, **environment: str) -> Result:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}
        return subprocess.run(
            [sys.executable, "-c", "from agentbench_kv.cli import main; main()", *args],
            cwd=tmp_path,
            env={**clean, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return call
