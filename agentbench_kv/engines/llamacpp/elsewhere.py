"""Running a module of ours in the environment's interpreter."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentbench_kv.engines.serving.links import link_packages
from agentbench_kv.errors import KVBenchError


@contextmanager
def environment_of() -> Iterator[dict[str, str]]:
    """Yield variables under which the interpreter finds our package and no other of ours."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as place:
        links = link_packages(Path(place) / "path", [], {})
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
        yield {**kept, "PYTHONPATH": str(links)}


def lines_of(python: Path, module: str, arguments: Sequence[str]) -> Iterator[str]:
    """Run `python -m module` and yield its lines as they come."""
    command = (str(python), "-m", module, *arguments)
    with (
        environment_of() as environment,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                yield line.rstrip("\n")
        except GeneratorExit:
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            said = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
            raise KVBenchError(said[-1])
