"""`kvbench bench serving` from the command line to the tables, on the micro model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SMALL = (
    *("bench", "serving", "--budget", "64", "--set", "interval=16", "--shape", "150/24"),
    *("--turns", "2", "--tool-tokens", "60", "--concurrency", "2", "--sessions", "2"),
    *("--warmup", "0", "--repeats", "1", "--together"),
)
ARMS = ["full", "full-constrained", "agentkv 64"]


def test_full_constrained_and_agentkv_end_to_end(kvbench, tmp_path: Path) -> None:
    done = kvbench(*SMALL, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [cell["arm"] for cell in document["cells"]] == ARMS
    for cell in document["cells"]:
        assert cell["reasons"] == []
        assert cell["figures"]["completed"]["point"] == 4
        assert cell["figures"]["total_output_tokens"]["point"] == 4 * 24
        assert cell["figures"]["total_input_tokens"]["point"] == 2 * (150 + 60)
        assert cell["kv"]["median_logical"] == 150 + 60 + 2 * 24
    full, _, agentkv = document["cells"]
    assert (full["kv"]["events"], agentkv["kv"]["events"]) == (0, 2 * (2 * 24 // 16))
    assert agentkv["kv"]["mean_decode_kv"] < full["kv"]["mean_decode_kv"]
    assert "agentkv 64" in done.stderr

    folder = Path(document["path"])
    files = sorted(path.name for path in (tmp_path / folder).glob("rep*.json"))
    assert files == [
        "rep01-agentkv-64-150-24-c2.json",
        "rep01-full-150-24-c2.json",
        "rep01-full-constrained-150-24-c2.json",
    ]
    one = json.loads((tmp_path / folder / files[0]).read_text())
    assert {"act", "others", "think", "tool"} == set(one["kv"]["phases"])
    assert all(one["kv"]["phases"].values())

    again = kvbench(*SMALL, "--json", "--quiet")
    assert json.loads(again.stdout) == document
    assert again.stderr == ""

    shown = kvbench("report", "runs", "--format", "markdown")
    assert shown.returncode == 0, shown.stderr
    assert "serving, under load: 150/24, 2 turns, micro, embedded" in shown.stdout
    assert "| c2 | agentkv 64 | 1 |" in shown.stdout
    other = kvbench("report", "runs", "--table", "accuracy")
    assert (other.returncode, other.stdout) == (2, "")


def test_methods_alone_are_measured_without_the_standard_arms(kvbench, tmp_path: Path) -> None:
    done = kvbench(*SMALL, "--method", "full@prefix", "--alone", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [cell["arm"] for cell in document["cells"]] == ["full@prefix"]
    (file,) = (tmp_path / document["path"]).glob("rep*.json")
    one = json.loads(file.read_text())
    assert one["pool_bytes"] >= one["kv"]["median_peak_bytes"] > 0
    assert one["kv"]["bytes_read"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "16k"], "expected prompt/generated"),
        (["--method", "nosuch", "--budget", "64"], "nosuch"),
        ([], "budget"),
        (["--budget", "64", "--wire", "vllm"], "--wire is for servers at --url"),
        (["--budget", "64", "--shape", "40k/1"], "micro has room for 32768"),
        (["--url", "nowhere"], "expected NAME=URL"),
        (["--url", "http://127.0.0.1:9", "--vocab", "100"], "no model server answers"),
        (["--budget", "64", "--load-format", "dummy"], "loads real weights only"),
        (["--budget", "64", "--engine-arg", "x"], "--engine-arg 'x': expected key=value"),
        (["--engine", "api", "--budget", "64"], "takes messages"),
        (["--method", "clear-tools", "--budget", "64"], "name recorded messages: --trace FILE"),
    ],
)
def test_what_cannot_run_is_one_line(kvbench, arguments: list[str], message: str) -> None:
    done = kvbench("bench", "serving", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def traced(tmp_path: Path, uses: int = 4) -> str:
    """Write a trace of one session with so many tool uses; return its file."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    said: list[dict[str, object]] = [{"role": "user", "content": "Look."}]
    for number in range(uses):
        function = {"name": "look", "arguments": json.dumps({"at": number})}
        asked = [{"id": f"c{number}", "type": "function", "function": function}]
        words = " ".join(f"w{number}x{word}" for word in range(60))
        said.append({"role": "assistant", "content": "", "tool_calls": asked})
        said.append({"role": "tool", "tool_call_id": f"c{number}", "content": words})
    said.append({"role": "assistant", "content": "Seen."})
    path = tmp_path / "said.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": said, "tools": tools}) + "\n")
    return str(path)


def test_clear_tools_beside_full_and_a_method_that_evicts(kvbench, tmp_path: Path) -> None:
    methods = ("--method", "clear-tools,keep=1", "--method", "agentkv,interval=16")
    done = kvbench(
        *("bench", "serving", "--trace", traced(tmp_path), *methods, "--method", "full@prefix"),
        *("--budget", "600", "--concurrency", "1", "--warmup", "1", "--repeats", "2", "--json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    cells = {cell["arm"]: cell for cell in document["cells"]}
    assert list(cells) == [
        *("full", "full-constrained", "clear-tools 600 keep=1", "agentkv 600 interval=16"),
        "full@prefix",
    ]
    full, cleared = cells["full"], cells["clear-tools 600 keep=1"]
    assert cleared["reasons"] == []
    assert cleared["figures"]["failed"]["point"] == 0
    for name in ("total_input_tokens", "total_output_tokens", "completed"):
        assert cleared["figures"][name] == full["figures"][name]
    assert cleared["kv"]["recomputed"] > 0 == full["kv"]["recomputed"]
    assert cleared["kv"]["median_peak_bytes"] < full["kv"]["median_peak_bytes"]
    found = cleared["kv"]["prefill_tokens"] - cleared["kv"]["recomputed"]
    assert found == full["kv"]["prefill_tokens"]
    assert cleared["quality"]["calls"] == full["quality"]["calls"] == 4
    assert cleared["quality"]["events"] == cleared["kv"]["events"] > 0
    shown = kvbench("report", "runs", "--format", "markdown")
    assert "computed again" in shown.stdout
    assert "without what the method drops" in shown.stdout


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("clear-tools,exec=span", "which is exec=text"),
        ("summarise", "asks the model what to drop"),
        ("oracle-tools", "must know which results are needed later"),
    ],
)
def test_drops_that_cannot_be_planned_are_one_line(
    kvbench, tmp_path: Path, method: str, message: str
) -> None:
    given = ("--trace", traced(tmp_path), "--method", method, "--budget", "600")
    done = kvbench("bench", "serving", *given)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def test_a_policy_that_never_triggers_is_not_ranked(kvbench, tmp_path: Path) -> None:
    done = kvbench(
        *("bench", "serving", "--trace", traced(tmp_path, 1), "--concurrency", "1"),
        *("--method", "clear-tools,trigger=5000", "--warmup", "0", "--repeats", "1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    *_, cleared = json.loads(done.stdout)["cells"]
    assert cleared["reasons"] == ["never triggered: no session came to trigger=5000"]
