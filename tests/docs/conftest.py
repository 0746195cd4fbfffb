"""What the guides have in common: their code blocks, installed, and their commands, run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
KVBENCH = [sys.executable, "-c", "from agentbench_kv.cli import main; main()"]


@dataclass(frozen=True)
class Guide:
    """A page that builds one plug-in: its text, and the folder where it is followed."""

    text: str
    folder: Path

    def block(self, language: str) -> str:
        """The first code block of a language on the page."""
        found = re.search(rf"^```{language}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        assert found, language
        return found[1]

    def commands(self) -> list[str]:
        """The `kvbench` lines of the first shell block, comments removed."""
        lines = [line.partition("  #")[0].strip() for line in self.block("bash").splitlines()]
        assert lines[0] == "pip install -e ."
        assert all(line.startswith("kvbench ") for line in lines[1:]), lines
        return lines[1:]

    def install(self) -> None:
        """What `pip install -e .` does: the module and its entry points, on the path."""
        project = tomllib.loads(self.block("toml"))
        (module,) = project["tool"]["setuptools"]["py-modules"]
        self.add(module, self.block("python"), project["project"]["entry-points"])

    def add(self, module: str, source: str, groups: dict[str, dict[str, str]]) -> None:
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{module}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
        lines: list[str] = []
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines))

    def run(self, command: str, code: int = 0) -> str:
        """Run a command of the page and return what it prints; on stderr if it has to fail."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [*KVBENCH, *shlex.split(command)[1:]],
            cwd=self.folder,
            env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == code, f"{command}: {done.returncode}\n{done.stderr}"
        return done.stderr if code else done.stdout


@pytest.fixture
def guide(tmp_path: Path) -> Callable[[str], Guide]:
    """Return a function that opens a page of docs/ and installs its example in a new folder."""

    def opened(name: str) -> Guide:
        page = Guide((DOCS / name).read_text("utf-8"), tmp_path)
        page.install()
        return page

    return opened
