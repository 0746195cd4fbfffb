"""`kvbench ls runs`: filters, limits, hostile names, and nothing heavy loaded when warm."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from agentbench_kv.results.index import FILE, read_index, runs_lines
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_names import prefix_parts, run_id
from agentbench_kv.results.store import RunStore


@pytest.fixture
def runs(tmp_path):
    """Four runs in `runs/`, where `kvbench` looks."""
    store = RunStore(tmp_path / "runs")
    for number, method in enumerate(("full", "agentkv", "snapkv@rkv", "[red]h2o[/red]\x1b[2J")):
        spec = {"method": method, "task": f"t/{number % 2}", "budget": 64, "model": "micro"}
        with store.open(f"run-{number}", spec, expected_trials=1) as run:
            score = {"status": "scored", "score": number / 4}
            run.append_trial(TrialRecord(sample_id="s", trial=0, seed=0, **score))
    return store.root


def names(result) -> list[str]:
    return [row["run_id"] for row in json.loads(result.stdout)]


def test_filters_sort_and_their_environment(kvbench, runs):
    assert names(kvbench("ls", "runs", "--json")) == [f"run-{n}" for n in range(4)]
    assert names(kvbench("ls", "runs", "--task", "t/1", "--json")) == ["run-1", "run-3"]
    assert names(kvbench("ls", "runs", "--json", KVBENCH_METHOD="snapkv")) == ["run-2"]
    ranked = kvbench("ls", "runs", "--sort", "score", "--status", "complete", "--json")
    assert names(ranked) == ["run-3", "run-2", "run-1", "run-0"]
    assert (runs / FILE).is_file()


@pytest.mark.usefixtures("runs")
def test_the_table_is_cut_and_says_so(kvbench):
    out = kvbench("ls", "runs", "--limit", "1").stdout
    assert "run-0" in out
    assert "run-1" not in out
    assert "and 3 more; --limit 0 shows all" in out
    assert "run-3" in kvbench("ls", "runs", "--limit", "0").stdout


def in_a_terminal(folder, columns):
    """Run `kvbench ls runs` on a pseudo-terminal; return its lines."""
    leader, follower = pty.openpty()
    code = "from agentbench_kv.cli import main; main()"
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    listing = subprocess.Popen(
        [sys.executable, "-c", code, "ls", "runs"], cwd=folder, stdout=follower, env=environment
    )
    os.close(follower)
    parts = []
    with contextlib.suppress(OSError):  # what Linux says at the end
        while part := os.read(leader, 65536):
            parts.append(part)
    os.close(leader)
    assert listing.wait() == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", b"".join(parts).decode()).splitlines()


@pytest.fixture
def hashed(tmp_path):
    """Runs of two tasks, with ids as long as real ones."""
    store = RunStore(tmp_path / "runs")
    for number, task in enumerate(("bfcl/multi_turn_long_context", "micro/recall-1k")):
        spec = {"method": "streamingllm@paper", "task": task, "budget": "25%", "seed": number}
        name = run_id(prefix_parts(spec), spec)
        with store.open(name, spec, expected_trials=2) as run:
            for trial in range(2):
                run.append_trial(
                    TrialRecord(sample_id="s", trial=trial, seed=0, status="scored", score=1)
                )
    return store


def test_rows_stay_whole_at_80_columns_and_name_the_run(kvbench, hashed, tmp_path):
    lines = in_a_terminal(tmp_path, 80)
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "streamingllm@paper" in line]
    assert [row[1:4] for row in rows] == [["streamingllm@paper", "25%", "100.0"]] * 2
    for row, name in zip(rows, hashed.names(), strict=True):
        assert name.rpartition("-")[2].startswith(row[0])
        assert json.loads(kvbench("show", row[0], "--json").stdout)["summary"]["run_id"] == name
    assert [line.strip() for line in lines if "/" in line and " " not in line.strip()] == [
        "bfcl/multi_turn_long_context", "micro/recall-1k",
    ]  # fmt: skip
    assert "left out: " in "\n".join(lines)


def test_a_wide_terminal_shows_everything(hashed, tmp_path):
    lines = in_a_terminal(tmp_path, 300)
    assert [line.split()[0] for line in lines[1:]] == hashed.names()
    assert "tok/s" in lines[0]


def test_a_pipe_gets_one_whole_line_a_run(kvbench, hashed):
    long = "x" * 160 + "-0123456789"
    with hashed.open(long, {"method": "m" * 150, "task": "t"}):
        pass
    lines = kvbench("ls", "runs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", *hashed.names()]
    assert "m" * 150 in lines[-1]


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 120, 200])
def test_no_width_breaks_the_table(hashed, width):
    entries = read_index(hashed.root)
    screen = Console(width=width, file=io.StringIO())
    for line in runs_lines(entries, width):
        screen.print(line)
    text = screen.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    if width >= 60:
        assert text.count("100.0 [") + text.count("100.0% [") == 2


def test_equal_hashes_are_not_cut(hashed):
    entries = read_index(hashed.root)
    twins = [msgspec.structs.replace(entry, run_id=f"{n}-0123456789")
             for n, entry in enumerate(entries)]  # fmt: skip
    screen = Console(width=80, file=io.StringIO())
    for line in runs_lines(twins, 80):
        screen.print(line)
    assert "0-0123456789" in screen.file.getvalue()


@pytest.mark.usefixtures("runs")
def test_names_are_data(kvbench):
    out = kvbench("ls", "runs").stdout
    assert "[red]h2o[/red]\\x1b[2J" in out
    assert "\x1b" not in out


@pytest.mark.usefixtures("runs")
def test_nothing_to_show_says_what_there_is(kvbench):
    out = kvbench("ls", "runs", "--task", "t/9").stdout
    assert out == "none of the 4 runs in runs is like that; tasks there: t/0, t/1\n"
    assert kvbench("ls", "runs", "--out", "none").stdout == "no runs in none\n"
    assert kvbench("ls", "runs", "--sort", "size").returncode == 2


def test_task_names_are_data_too(kvbench, runs):
    with RunStore(runs).open("hostile", {"method": "full", "task": "[red]\x1b[2J"}):
        pass
    assert "[red]\\x1b[2J, t/0" in kvbench("ls", "runs", "--method", "none").stdout


def test_an_unreadable_run_is_listed_with_the_reason(kvbench, runs):
    (runs / "run-2" / "run.json").write_text("{")
    out = kvbench("ls", "runs").stdout
    assert "unreadable" in out
    assert "run-2: runs/run-2/run.json is not a kvbench run record" in out


@pytest.mark.usefixtures("runs")
def test_a_warm_listing_loads_neither_torch_nor_scipy(kvbench, tmp_path):
    kvbench("ls", "runs")
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom agentbench_kv.cli.ls import ls\n"
        "done = CliRunner().invoke(ls, ['runs'])\nassert 'run-0' in done.output, done.output\n"
        "sys.exit(bool({'torch', 'scipy', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
