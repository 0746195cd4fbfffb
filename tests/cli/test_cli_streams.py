"""Streams as shells leave them: closed, full, of another encoding, or without a reader."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.cli.streams import Notes

START = [sys.executable, "-c", "from agentbench_kv.cli import main; main()"]
PLAY = ["run", "--engine", "scripted", "--model", "gold", "--task", "micro/recall-1k"]
PLAY += ["--limit", "3"]


@pytest.fixture
def kvbench_in_shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that starts `kvbench ARGS` from a shell, with redirections."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}

    def call(redirections: str, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {redirections}', "sh", *START, *args],
            cwd=tmp_path,
            env={**clean, **more},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return call


@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_one_line(kvbench_in_shell: Callable[..., Any]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    for args in (["env", "list"], ["ls", "runs"]):  # by click, and by rich
        done = kvbench_in_shell(">/dev/full", *args)
        assert (done.returncode, done.stderr) == (
            2,
            "kvbench: cannot write the output: No space left on device\n",
        )


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """As `kvbench ls methods | head -1` does; the code is that of click's own programs."""
    for args in (["env", "list"], ["ls", "runs"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*START, *args],
            cwd=tmp_path,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_closed_streams_do_not_make_their_numbers_those_of_files(
    kvbench_in_shell: Callable[..., Any], tmp_path: Path
) -> None:
    """A record opened as file 1 or 2 would receive whatever anything prints."""
    done = kvbench_in_shell("<&- >&- 2>&-", *PLAY)
    assert done.returncode == 0
    (run,) = tmp_path.glob("runs/*")
    assert json.loads((run / "run.json").read_bytes())["status"] == "complete"
    lines = (run / "samples.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [1.0] * 3


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*START, *PLAY]
    done = subprocess.run(command, cwd=tmp_path, stderr=writer, capture_output=False, check=False)
    os.close(writer)
    assert done.returncode == 0
    (run,) = tmp_path.glob("runs/*")
    assert json.loads((run / "run.json").read_bytes())["status"] == "complete"


@pytest.mark.slow
@pytest.mark.parametrize(
    "encoding",
    ["ascii", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("latin-1", "utf-8"))],
)
def test_any_encoding_of_stdout_will_do(
    kvbench_in_shell: Callable[..., Any], tmp_path: Path, encoding: str
) -> None:
    """A sample's name holds what neither ASCII nor Latin-1 has, and half a character."""
    assert kvbench_in_shell("", *PLAY, "-q").returncode == 0
    (run,) = tmp_path.glob("runs/*")
    samples = run / "samples.jsonl"
    samples.write_text(samples.read_text().replace("recall-1k-0", "r\u00e9call \u2192 \u6f22"))
    (run / "run.json").write_text(
        (run / "run.json").read_text().replace('"error": null', '"error": "\u2192"')
    )
    for args in (["show", str(run)], ["show", str(run), "--json"]):
        done = subprocess.run(
            [*START, *args],
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        if "--json" in args:
            assert json.loads(done.stdout.decode(encoding))


def test_notes_never_raise(tmp_path: Path) -> None:
    """On a full disk, and once the file is closed."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w", buffering=1) as full:
        notes = Notes(full)
        for _ in range(3):
            assert notes.write("said\n") == 5
            notes.flush()
        assert not notes.isatty()
    closed = (tmp_path / "closed").open("w")
    closed.close()
    assert Notes(closed).write("said") == 4


def test_a_stream_without_a_number_costs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in memory that is closed: for each line a file was opened, and stayed open."""
    gone, opened = io.TextIOWrapper(io.BytesIO()), list[Any]()
    gone.close()

    def note(path: Any, *args: Any, opens: Callable[..., int] = os.open, **named: Any) -> int:
        opened.append(path)
        return opens(path, *args, **named)

    monkeypatch.setattr(os, "open", note)
    notes = Notes(gone)
    assert notes.write("said") == 4
    notes.flush()
    assert os.devnull not in opened
