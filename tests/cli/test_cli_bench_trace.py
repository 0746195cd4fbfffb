"""`kvbench bench trace` and `bench serving --trace` from the command line to the tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRACE = [
    {
        "id": "a",
        "start_s": 0.0,
        "shared": [["system", 40]],
        "calls": [
            {"new_tokens": 90, "output_tokens": 6},
            {"new_tokens": 30, "output_tokens": 5, "gap_s": 0.5},
            {"new_tokens": 9, "output_tokens": 4, "fresh": True},
        ],
    },
    {
        "id": "b",
        "start_s": 0.2,
        "shared": [["system", 40]],
        "calls": [{"new_tokens": 70, "output_tokens": 5}],
    },
]
PROMPTS = 90 + 126 + 140 + 70
HITS = 96 + 40 + 40
SMALL = (
    *("bench", "serving", "--trace", "t.jsonl", "--budget", "32", "--set", "interval=4"),
    *("--set", "trigger=prefill+every", "--warmup", "1", "--repeats", "1", "--together"),
    *("--time-scale", "0.1", "--goodput", "ttft:60000", "--goodput", "e2el:600000"),
)


def wrote(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_trace_is_played_on_its_schedule_end_to_end(kvbench, tmp_path: Path) -> None:
    wrote(tmp_path / "t.jsonl", TRACE)
    done = kvbench(*SMALL, "--fixed-schedule", "--save-detailed", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["plan"]["trace"]["prompt_tokens"] == PROMPTS
    assert document["plan"]["trace"]["prefix_hits"] == pytest.approx(HITS / PROMPTS)
    assert [cell["arm"] for cell in document["cells"]] == ["full", "full-constrained", "agentkv 32"]
    for cell in document["cells"]:
        figures = {name: value["point"] for name, value in cell["figures"].items()}
        assert (cell["load"], cell["reasons"]) == ("schedule", [])
        assert (figures["completed"], figures["total_output_tokens"]) == (4, 20)
        assert figures["total_prompt_tokens"] == PROMPTS
        assert figures["prefix_hit_bound"] == pytest.approx(HITS / PROMPTS)
        # A session here shares nothing with another one.
        assert figures["prefix_hit_rate"] == pytest.approx(96 / PROMPTS)
        # No request is so slow: all are good, and so are both sessions.
        assert figures["request_goodput"] == pytest.approx(4 / figures["duration"])
        assert figures["session_goodput"] == pytest.approx(2 / figures["duration"])
        assert {"median_ttft_first_ms", "median_ttft_later_ms"} <= figures.keys()
    assert document["cells"][2]["kv"]["median_peak_live"] < 140
    (path,) = (tmp_path / document["path"]).glob("rep01-full-t*.json")
    requests = json.loads(path.read_text())["requests"]
    a, again, fresh, b = requests
    assert again["start"] >= a["start"] + a["latency_s"] + 0.05
    assert fresh["new_tokens"] == 140
    assert b["start"] >= 0.02

    shown = kvbench("report", "runs", "--format", "markdown")
    assert "serving, under load: t.jsonl, 2 sessions, micro, embedded" in shown.stdout
    heading = next(line for line in shown.stdout.splitlines() if line.startswith("| load "))
    first = [name.strip() for name in heading.split("|")[4:8]]
    assert first == ["good sessions/s", "good requests/s", "TTFT turns 2+ ms", "p99"]
    assert "its gaps and clock x 0.1" in shown.stdout
    assert "exact calls: not measured: no recorded answers came, or nobody asked" in shown.stdout
    assert "exact calls %" not in shown.stdout


def recorded(number: int, tool: bool) -> dict[str, object]:
    """A recorded session of two calls of a tool, or of plain answers."""
    function = {"name": "get_order", "arguments": json.dumps({"order": f"A{number}"})}
    call = {"id": "c", "type": "function", "function": function}
    said = {"content": "", "tool_calls": [call]} if tool else {"content": "I cannot say."}
    answer = {"role": "assistant", **said}
    back = (
        {"role": "tool", "tool_call_id": "c", "content": '{"price": 17}'}
        if tool
        else {"role": "user", "content": "Why?"}
    )
    head = [{"role": "system", "content": "You help."}, {"role": "user", "content": "My order?"}]
    properties = {"order": {"type": "string"}}
    schema = {"name": "get_order", "parameters": {"type": "object", "properties": properties}}
    messages = [*head, answer, back, answer, back, {"role": "assistant", "content": "Done."}]
    return {
        "id": f"s{number}",
        "messages": messages,
        "tools": [{"type": "function", "function": schema}],
    }


def test_recorded_answers_give_exact_calls_beside_speed(kvbench, tmp_path: Path) -> None:
    wrote(tmp_path / "t.jsonl", [recorded(number, True) for number in range(2)])
    done = kvbench(*SMALL, "--repeats", "2", "--concurrency", "2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    for cell in document["cells"]:
        assert cell["quality"]["calls"] == 4
        assert cell["quality"]["reason"] == ""
        assert cell["quality"]["seconds"] > 0
        assert bool(cell["quality"]["events"]) == (cell["arm"] == "agentkv 32")
        # What was replayed is no part of what was measured.
        assert cell["figures"]["total_output_tokens"]["n"] == 2
    files = sorted((tmp_path / document["path"]).glob("rep*.json"))
    kept = [path.name for path in files if "quality" in json.loads(path.read_text())]
    assert len(kept) == 3
    assert all(name.startswith("rep01") for name in kept)
    shown = kvbench("report", "runs", "--format", "markdown").stdout
    assert "exact calls %" in shown
    assert "of 4 recorded tool calls in 2 sessions those whose every token is the" in shown
    again = kvbench(*SMALL, "--repeats", "2", "--concurrency", "2", "--json")
    assert json.loads(again.stdout)["cells"] == document["cells"]


def test_sessions_without_an_answer_are_neither_timed_nor_counted(kvbench, tmp_path: Path) -> None:
    silent = recorded(0, True) | {"id": "silent", "messages": recorded(0, True)["messages"][:2]}
    wrote(tmp_path / "t.jsonl", [silent, *(recorded(number, True) for number in range(2))])
    done = kvbench(*SMALL, "--concurrency", "2", "--alone", "--json")
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert cell["quality"]["calls"] == 4
    assert cell["quality"]["parts"].keys() == {"s0", "s1"}


def test_exact_calls_that_were_left_out_are_measured_by_the_same_command(
    kvbench, tmp_path: Path
) -> None:
    wrote(tmp_path / "t.jsonl", [recorded(number, True) for number in range(2)])
    same = (*SMALL, "--concurrency", "2", "--json")
    first = json.loads(kvbench(*same, "--no-exact-calls").stdout)
    assert {str(cell["quality"]) for cell in first["cells"]} == {"None"}
    done = kvbench(*same)
    assert done.returncode == 0, done.stderr
    then = json.loads(done.stdout)
    assert [cell["quality"]["calls"] for cell in then["cells"]] == [4, 4, 4]
    assert [cell["figures"] for cell in then["cells"]] == [
        cell["figures"] for cell in first["cells"]
    ]


@pytest.mark.parametrize("right", [5, -1])
def test_exact_calls_that_do_not_add_up_are_refused(kvbench, tmp_path: Path, right: int) -> None:
    wrote(tmp_path / "t.jsonl", [recorded(number, True) for number in range(2)])
    done = kvbench(*SMALL, "--concurrency", "2", "--alone", "--json")
    (file,) = (tmp_path / json.loads(done.stdout)["path"]).glob("rep*.json")
    document = json.loads(file.read_text())
    document["quality"] |= {"calls_right": right, "parts": {}}
    file.write_text(json.dumps(document))
    shown = kvbench("report", "runs")
    assert shown.returncode == 2
    assert f"{right} right calls of 4 do not add up" in shown.stderr


def test_exact_calls_are_not_measured_without_calls_or_answers(kvbench, tmp_path: Path) -> None:
    wrote(tmp_path / "t.jsonl", [recorded(number, False) for number in range(2)])
    done = kvbench(*SMALL, "--concurrency", "2", "--method", "agentkv", "--json")
    assert done.returncode == 0, done.stderr
    for cell in json.loads(done.stdout)["cells"]:
        assert (cell["quality"]["calls"], cell["quality"]["calls_right"]) == (0, 0)
        assert cell["quality"]["reason"] == "no recorded answer calls a tool"
    shown = kvbench("report", "runs", "--format", "markdown").stdout
    assert "not measured: no recorded answer calls a tool" in shown
    assert "| not measured |" in shown


def test_exact_calls_can_be_left_out(kvbench, tmp_path: Path) -> None:
    wrote(tmp_path / "t.jsonl", [recorded(number, True) for number in range(2)])
    done = kvbench(*SMALL, "--concurrency", "2", "--no-exact-calls", "--alone", "--json")
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["arm"], cell["quality"]) == ("agentkv 32", None)


def test_a_runs_own_sessions_show_what_a_method_would_have_broken(kvbench, tmp_path: Path) -> None:
    played = kvbench("run", "--task", "micro/recall-1k", "--method", "full", "--limit", "3")
    assert played.returncode == 0, played.stderr
    (run,) = (tmp_path / "runs").iterdir()
    bench = ("bench", "serving", "--trace", "runs", "--concurrency", "3", "--warmup", "0")
    asked = (*bench, "--repeats", "1", "--set", "trigger=prefill+every", "--set", "interval=16")
    methods = ("--method", "agentkv", "--method", "random", "--budget", "64")
    done = kvbench(*asked, *methods, "--out", "b", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    right = {cell["arm"]: cell["quality"]["calls_right"] for cell in document["cells"]}
    (asked_for,) = {cell["quality"]["calls"] for cell in document["cells"]}
    # Its own answers are its own best, all of them.
    assert right["full"] == right["full-constrained"] == asked_for > 0
    assert right["random 64"] < right["agentkv 64"] < asked_for
    # To the token: what was read is what the run read.
    file = next((tmp_path / document["path"]).glob("rep01-full-m*.json"))
    trials = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert json.loads(file.read_text())["kv"]["prefill_tokens"] == sum(
        trial["kv"]["prefill_tokens"] for trial in trials
    )
    other = kvbench(*asked, "--model", "elsewhere")
    assert other.returncode == 2
    assert other.stderr.strip().endswith("the run's sessions are of micro; leave it out")
    more = kvbench(*asked, "--sessions", "9")
    assert more.returncode == 2
    assert "has 3 sessions, not 9" in more.stderr


CUT = {"status": "timeout", "score": None, "timing": {}, "error": "time"}


@pytest.fixture
def run(kvbench, tmp_path: Path) -> Path:
    """A run of three trials, of one of which nothing is changed but by a test."""
    played = kvbench("run", "--task", "micro/recall-1k", "--method", "full", "--limit", "3")
    assert played.returncode == 0, played.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def bench_of_run(kvbench, *more: str):
    bench = ("bench", "serving", "--trace", "runs", "--concurrency", "3", "--warmup", "0")
    small = ("--repeats", "1", "--alone", "--method", "agentkv", "--budget", "4096")
    return kvbench(*bench, *small, "--out", "b", *more)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda trial, _: trial.update(transcript=None), "have no transcript"),
        (lambda trial, _: trial.update(CUT), "were cut off"),
        (lambda _, said: said.pop("generated"), "have no tokens in their transcripts"),
        (lambda _, said: said.update(generated=[]), "have no tokens in their transcripts"),
        (lambda trial, _: trial.update(sample_id="another"), "are not of the run's samples"),
    ],
)
def test_sessions_of_a_run_that_cannot_be_played_are_named_and_counted(
    kvbench, run: Path, change: Callable[[Any, Any], object], why: str
) -> None:
    trials = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    path = run / trials[1]["transcript"]
    said = json.loads(path.read_text())
    change(trials[1], said)
    path.write_text(json.dumps(said))
    wrote(run / "samples.jsonl", trials)
    done = bench_of_run(kvbench)
    assert done.returncode == 0, done.stderr
    name = trials[1]["sample_id"]
    assert f"1 of the run's trials {why} and are left out: {name}" in done.stderr
    assert "2 of the 3 sessions of the run" in done.stdout
    assert "in 2 sessions those whose every token" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"generated": ["1 2', "is no transcript of a run"),
        (b"\xff\xfe", "is no transcript of a run"),
        (b"[1]", "is no transcript of a run"),
        (b'{"generated": 5}', "is no transcript of a run"),
        (b'{"generated": ["a b c"]}', "is no transcript of a run"),
        (b'{"generated": ["-1"]}', "a token has a number below 0"),
    ],
)
def test_a_broken_transcript_is_one_line(kvbench, run: Path, text: bytes, message: str) -> None:
    path = next((run / "transcripts").iterdir())
    path.write_bytes(text)
    done = bench_of_run(kvbench)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert path.name in line
    assert message in line


def test_a_run_without_a_spec_is_one_line(kvbench, run: Path) -> None:
    document = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(document | {"spec": {}}))
    done = bench_of_run(kvbench)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the run's spec is damaged" in line


def test_a_run_that_did_not_end_says_how_many_sessions_it_should_have(kvbench, run: Path) -> None:
    trials = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    wrote(run / "samples.jsonl", trials[:2])
    done = bench_of_run(kvbench)
    assert done.returncode == 0, done.stderr
    assert "2 of the 3 sessions of the run" in done.stdout


def test_first_trials_are_the_sessions_of_a_run_with_several(kvbench) -> None:
    drawn = ("--temperature", "2.5", "--trials", "2", "--limit", "2")
    played = kvbench("run", "--task", "micro/recall-1k", "--method", "full", *drawn)
    assert played.returncode == 0, played.stderr
    done = bench_of_run(kvbench)
    assert done.returncode == 0, done.stderr
    assert "sessions of the run" not in done.stdout


def test_a_run_that_dropped_messages_is_no_trace(kvbench) -> None:
    dropping = ("--method", "turn-window", "--budget", "256")
    played = kvbench("run", "--task", "micro/recall-1k", *dropping, "--limit", "1")
    assert played.returncode == 0, played.stderr
    done = kvbench("bench", "serving", "--trace", "runs", "--budget", "64")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("take a run whose method leaves messages as they are")


def test_a_generated_trace_is_written_and_described(kvbench, tmp_path: Path) -> None:
    done = kvbench("bench", "trace", "a.jsonl", "--sessions", "4", "--token-scale", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["sessions"], found["form"]) == (4, "kvbench")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert sum(len(row["calls"]) for row in rows) == found["calls"]
    again = kvbench("bench", "trace", "b.jsonl", "--from", "a.jsonl", "--sessions", "2")
    assert again.returncode == 0, again.stderr
    assert "2 sessions" in again.stdout
    half = (tmp_path / "a.jsonl").read_text().splitlines()[:2]
    assert (tmp_path / "b.jsonl").read_text().splitlines() == half


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "none.jsonl"], "cannot be read"),
        (["--trace", "t.jsonl", "--shape", "1k/10"], "--shape is for sessions that are all alike"),
        (["--trace", "t.jsonl", "--turns", "2"], "--turns is for sessions that are all alike"),
        (["--trace", "t.jsonl", "--sessions", "9"], "t.jsonl has 2 sessions, not 9"),
        (["--trace", "t.jsonl", "--think-time", "3"], "this trace has gaps of its own"),
        (["--trace", "u.jsonl", "--fixed-schedule"], "does not say when its sessions begin"),
        (["--fixed-schedule"], "--fixed-schedule is for a --trace"),
        (["--time-scale", "2"], "--time-scale is for a --trace"),
        (["--goodput", "ttft"], "expected KEY:MS with ttft, tpot, e2el"),
        (["--goodput", "itl:5"], "expected KEY:MS"),
        (["--goodput", "ttft:nan"], "expected KEY:MS"),
        (["--goodput", "tpot:5", "--goodput", "tpot:6"], "tpot is given twice"),
    ],
)
def test_what_cannot_be_played_is_one_line(
    kvbench, tmp_path: Path, arguments: list[str], message: str
) -> None:
    wrote(tmp_path / "t.jsonl", TRACE)
    wrote(tmp_path / "u.jsonl", [{"id": "a", "calls": TRACE[1]["calls"]}])
    done = kvbench("bench", "serving", "--budget", "64", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line
