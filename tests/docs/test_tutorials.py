"""The tutorials, followed literally: their files written, their commands run by a shell, in order.

A comment `# exit code N` behind a command says how it must end; without one it is 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
TUTORIALS = sorted(page.name for page in FOLDER.glob("i-*.md"))
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
CODE = re.compile(r"\s+# exit code (\d+)\b.*$")


def commands(block: str) -> list[tuple[str, int]]:
    """Return the commands of a shell block, one a line, with the exit code the page says."""
    found = []
    for line in block.splitlines():
        said = CODE.search(line)
        found.append((CODE.sub("", line), int(said[1]) if said else 0))
    return found


@pytest.fixture(scope="session")
def shell(tmp_path_factory) -> dict[str, str]:
    """Make an environment with `pip` and `kvbench` for a tutorial; return its variables.

    What this interpreter has is lent to it, so what a tutorial installs goes nowhere else.
    """
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old for `pip install -e .`: pip install -e '.[dev]'")
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    paths = {"base": str(place), "platbase": str(place)}
    lent = Path(sysconfig.get_path("purelib", vars=paths)) / "lent.pth"
    lent.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    lines = {"pip": "-m pip", "kvbench": "-c 'from agentbench_kv.cli import main; main()'"}
    for name, arguments in lines.items():
        script = place / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{python}" {arguments} "$@"\n')
        script.chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}
    # pip reads 0 as: no isolation, so that setuptools is the one of this interpreter.
    alone = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1"}
    path = os.pathsep.join([str(place / "bin"), clean["PATH"]])
    lends = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [clean.get("PYTHONPATH")])]
    )
    return {**clean, **alone, "PATH": path, "PYTHONPATH": lends, "OMP_NUM_THREADS": "1"}


def follow(page: str, folder: Path, variables: dict[str, str]) -> list[tuple[str, int, int, str]]:
    """Write the files and run the commands of a page; return each with its codes and output."""
    done = []
    for language, title, block in FENCE.findall(page):
        if title:
            (folder / title).write_text(block)
        for command, code in commands(block) if language == "bash" else ():
            ran = subprocess.run(
                ["bash", "-c", command],
                cwd=folder, env=variables, capture_output=True, text=True, timeout=900, check=False,
            )  # fmt: skip
            done.append((command, code, ran.returncode, ran.stdout + ran.stderr))
            if ran.returncode != code:
                break
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_does_what_it_says(name, shell, tmp_path):
    done = follow((FOLDER / name).read_text("utf-8"), tmp_path, shell)
    for command, expected, code, output in done:
        assert code == expected, f"{command}: exit code {code}, not {expected}\n{output}"
    assert len(done) > 5


def test_each_role_has_its_tutorial_and_it_is_listed():
    assert len(TUTORIALS) == 3
    listed = (FOLDER / "index.md").read_text("utf-8")
    assert all(f"]({name})" in listed for name in TUTORIALS)


@pytest.mark.parametrize("name", TUTORIALS)
def test_every_fence_of_a_tutorial_is_read(name):
    text = (FOLDER / name).read_text("utf-8")
    assert 2 * len(FENCE.findall(text)) == len(re.findall(r"^```", text, re.MULTILINE))


def test_a_command_that_ends_otherwise_than_said_is_noticed(tmp_path):
    page = "```bash\ntrue\nfalse  # exit code 1: as said\nfalse\ntrue\n```\n"
    done = follow(page, tmp_path, dict(os.environ))
    assert [(command, said, ended) for command, said, ended, _ in done] == [
        ("true", 0, 0), ("false", 1, 1), ("false", 0, 1),
    ]  # fmt: skip
