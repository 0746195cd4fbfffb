"""The script for long sessions: its trace, the order and records of its cells, its table."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serving_shapes as shapes
import serving_shapes_table
from serving_shapes_records import pack, unpack
from serving_shapes_table import (
    ABOUT,
    CELL,
    DECODER,
    HARDWARE,
    TRACE,
    cell_path,
    counted,
    shapes_tables,
)
from serving_shapes_trace import TraceShape, write_trace

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import UsageError
from agentbench_kv.results.tables.model import Table
from agentbench_kv.run.recordings import record_file
from agentbench_kv.serving_bench.measurements import (
    LoadMeasurement,
    ServingArm,
    ServingFolder,
    ServingPlan,
)
from agentbench_kv.serving_bench.roofline import read_decoder

TRACE_FIGURES = {
    "form": "t", "sha256": "0", "sessions": 1, "calls": 1, "prompt_tokens": 1, "output_tokens": 1,
    "prefix_hits": 0.0,
}  # fmt: skip
SHAPE = TraceShape(prompt=900, output=60, turns=3, sessions=2, system=150, result=120)


def test_sessions_have_the_lengths_asked_for(tmp_path: Path) -> None:
    found = write_trace(tmp_path / "t.jsonl", SHAPE, "micro")
    assert record_file(tmp_path / "t.jsonl", "micro") == found
    assert [len(each.turns) for each in found] == [3, 3]
    for recording in found:
        first, *later = recording.turns
        assert abs(len(first.prompt) - 900) <= 8  # words have several tokens here
        assert all(abs(len(turn.answer) - 60) <= 8 for turn in recording.turns)
        assert all(120 <= len(turn.prompt) <= 160 for turn in later)


def test_most_of_a_first_prompt_is_tool_results_that_nobody_is_asked_for(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", SHAPE, "micro")
    one, other = (json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines())
    assert one["messages"][0] == other["messages"][0]  # which a prefix cache may hold
    assert one["messages"][1] != other["messages"][1]
    before = [m for m in one["messages"] if m.get("weight") == 0]
    results = [m for m in one["messages"] if m["role"] == "tool"]
    assert len(before) == len(results) - 2 >= 3


def test_a_trace_is_the_same_for_a_seed(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in "abc")
    write_trace(first, SHAPE, "micro")
    write_trace(second, SHAPE, "micro")
    write_trace(other, TraceShape(900, 60, 3, 2, 150, 120, seed=1), "micro")
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_a_prompt_without_room_for_a_result_is_refused(tmp_path: Path) -> None:
    small = TraceShape(prompt=200, output=60, turns=1, sessions=1, system=150, result=120)
    with pytest.raises(UsageError, match="no room for a system message of 150"):
        write_trace(tmp_path / "t.jsonl", small, "micro")


def test_every_cell_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    places = [(tmp_path / "a", "m", 1024)]
    plan = list(shapes.cells(places, ("embedded", "vllm"), 2, budgets=(256,)))
    assert len(plan) == 2 * 2 * 7
    assert [cell.repetition for cell in plan] == [0] * 14 + [1] * 14
    assert len({cell.folder for cell in plan}) == len(plan)
    first, second = ([c.arm.name for c in plan[at : at + 7]] for at in (0, 14))
    assert first == [
        *("full", "full@prefix", "full kv=int8", "clear-tools 512", "agentkv 256", "snapkv 256"),
        "agentkv@system,prefix=shared 256",
    ]
    assert second == [*first[1:], first[0]]
    some = shapes.cells(places, ("vllm",), 1, ["agentkv", "full kv=fp8"], (256, 512))
    assert [cell.arm.name for cell in some] == ["full kv=fp8", "agentkv 256", "agentkv 512"]
    (full,) = shapes.cells(places, ("vllm",), 1, ["full"])  # not every arm that begins so
    assert full.arm.name == "full"


def test_an_arm_that_is_none_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was measured in silence: not at all."""
    shapes.check_arms(["agentkv", "snapkv 256", "full@prefix"], ("vllm", "llamacpp"), [512], [256])
    words = ["run", "--model", "micro", "--prompt", "1k", "--engine", "embedded", "--sessions", "1"]
    assert shapes.main([*words, "--out", str(tmp_path), "--arm", "snapkv@1024"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --arm 'snapkv@1024': there is none; these are: full, ")


def test_what_is_left_is_told_by_what_was_measured(tmp_path: Path) -> None:
    plan = list(
        shapes.cells([(tmp_path, "m", 8192)], ("embedded", "vllm"), 2, ["full", "full@prefix"])
    )
    assert shapes.time_left(plan, plan) == "6 left, at least 0.0 h"
    for cell, record in zip(plan, ({"wall_s": 3600}, {"wall_s": 5, "error": "no"}), strict=False):
        cell.folder.mkdir(parents=True)
        (cell.folder / CELL).write_text(json.dumps(record))
    own = [cell for cell in plan if cell.engine == "embedded"]
    assert [cell.due(retry=False) for cell in own] == [False, False, True, True]
    assert [cell.due(retry=True) for cell in own] == [False, True, True, True]
    assert shapes.time_left(plan, plan[2:]) == "4 left, at least 2.0 h"
    assert shapes.time_left(plan, own[2:]) == "2 left, 2.0 h"


def test_an_engine_without_bfloat16_gets_what_is_nearest(tmp_path: Path) -> None:
    args = shapes.parsed(["run", "--model", "m", "--prompt", "8k", "--out", str(tmp_path)])
    found = {}
    for cell in shapes.cells([(tmp_path, "m", 8192)], shapes.ENGINES, 1, ["full"]):
        command = shapes.command_of(cell, args, 1000)
        found[cell.engine] = command[command.index("--dtype") + 1]
        sized = [word.partition("=")[0] for word in command if "=" in word and "import" not in word]
        assert (cell.engine, sized) in [
            *(("embedded", []), ("vllm", ["max-model-len"])),
            *(("sglang", ["context-length", "mem-fraction-static"]), ("llamacpp", ["cells"])),
        ]
    assert found == dict.fromkeys(shapes.ENGINES, "bfloat16") | {"llamacpp": "float16"}


def words(out: Path, *more: str) -> list[str]:
    small = ["--prompt", "700", "--output", "30", "--turns", "2", "--sessions", "2"]
    small += ["--system", "100", "--result", "100", "--dtype", "float32", "--threads", "1"]
    return ["run", "--model", "micro", *small, "--engine", "embedded", "--out", str(out), *more]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand for `kvbench`, which fails for agentkv; return the commands."""
    asked: list[list[str]] = []

    def kvbench(code: int) -> tuple[str, ...]:
        return (
            sys.executable,
            "-c",
            f"import sys; sys.stderr.write('no!\\n\\n'); sys.exit({code})",
        )

    real = shapes.command_of

    def command(cell: shapes.Cell, args: Any, longest: int) -> list[str]:
        asked.append(real(cell, args, longest))
        return list(kvbench(2 if cell.arm.name.startswith("agentkv") else 0))

    monkeypatch.setattr(shapes, "command_of", command)
    monkeypatch.setattr(shapes, "_measure_machine", lambda *_: None)
    return asked


def test_what_was_measured_is_not_measured_again(tmp_path: Path, fake: list[list[str]]) -> None:
    assert shapes.main(words(tmp_path, "--repeats", "1", "--arm", "full", "--arm", "agentkv")) == 0
    assert len(fake) == 3  # full, two budgets
    full = fake[0]
    for pair in (("--engine", "embedded"), ("--sessions", "2"), ("--warmup", "0")):
        assert full[full.index(pair[0]) + 1] == pair[1]
    assert {"--alone", "--no-exact-calls"} <= set(full)
    again = words(tmp_path, "--repeats", "2", "--arm", "full", "--arm", "agentkv")
    assert shapes.main(again) == 0
    assert len(fake) == 6
    assert shapes.main([*again, "--retry"]) == 0
    assert len(fake) == 10  # two budgets in two repetitions
    (record,) = (tmp_path / "micro-700/embedded/rep01/agentkv-1024").glob(CELL)
    assert json.loads(record.read_text())["error"] == "no!"


def test_an_interrupted_cell_leaves_no_record_but_what_it_began(
    tmp_path: Path, fake: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends slow repetitions has a fast arm: `kvbench` counts them in the cell's folder."""

    def interrupted(*_: Any) -> int:
        monkeypatch.undo()  # what stops the process waits for it, too
        raise KeyboardInterrupt

    place = tmp_path / "micro-700"
    begun = place / "embedded/rep01/full/run"
    plan = serving_plan("full")
    folder = ServingFolder.create(begun, plan, {})
    folder.begin(("full", "t", "c2", 0))
    monkeypatch.setattr(shapes.subprocess.Popen, "wait", interrupted)
    assert shapes.main(words(tmp_path, "--repeats", "1")) == 130
    assert not list(tmp_path.glob(f"**/{CELL}"))
    assert len(fake) == 1
    assert folder.begin(("full", "t", "c2", 0)) == 2
    record(place, "full@prefix", 0, 10.0, 800)
    (found,) = shapes_tables(tmp_path)
    told = "begun, and not there (running, interrupted or removed): embedded/rep01/full"
    assert told in found.notes


def test_a_cell_that_was_begun_twice_is_named(tmp_path: Path) -> None:
    place = tmp_path / "micro-700"
    record(place, "full", 0, 10.0, 800, begun=2)
    (place / TRACE).write_text("")
    ServingFolder.create(place / "embedded/rep01/full/other", serving_plan("full", seed=1), {})
    (found,) = shapes_tables(tmp_path)
    (note,) = (note for note in found.notes if "begun more than once" in note)
    assert "full c2 (1 of 1)" in note
    record(place, "full", 0, 10.0, 800, run="other", seed=1)
    with pytest.raises(UsageError, match="rep01/full holds 2 folders of measurements, not one"):
        shapes_tables(tmp_path)


def test_a_cell_that_was_removed_is_told_of_in_kept_records_too(
    tmp_path: Path, fake: list[list[str]]
) -> None:
    once = words(tmp_path / "out", "--repeats", "1", "--arm", "full")
    assert shapes.main(once) == 0
    place = tmp_path / "out" / "micro-700"
    shutil.rmtree(place / "embedded/rep01/full")
    record(place, "full@prefix", 0, 10.0, 800)
    said = "begun, and not there (running, interrupted or removed): embedded/rep01/full"
    assert said in notes_of_kept(tmp_path)
    assert shapes.main(once) == 0
    assert len(fake) == 2
    record(place, "full", 0, 9.0, 800)
    notes = notes_of_kept(tmp_path)
    assert said not in notes
    (again,) = (note for note in notes if note.startswith("begun more than once"))
    assert "embedded/rep01/full;" in again


def notes_of_kept(folder: Path) -> Sequence[str]:
    """Return the notes of the table of what is in `out`, kept in a file."""
    pack(folder / "out", folder / "kept.jsonl.xz")
    again = folder / "again"
    shutil.rmtree(again, ignore_errors=True)
    unpack(folder / "kept.jsonl.xz", again)
    (table,) = shapes_tables(again)
    return table.notes


def test_a_copied_cell_is_no_other_repetition(tmp_path: Path) -> None:
    place = tmp_path / "micro-8k"
    record(place, "full@prefix", 0, 10.0, 800)
    record(place, "agentkv", 0, 20.0, 100)
    cell, copy = (place / cell_path("embedded", number, "agentkv") for number in (0, 1))
    shutil.copytree(cell, copy)
    with pytest.raises(UsageError, match="a copied cell is no other one"):
        shapes_tables(tmp_path)
    about = json.loads((copy / CELL).read_text())
    (copy / CELL).write_text(json.dumps(about | {"repetition": 1}))
    with pytest.raises(UsageError, match="is a copy of another cell's measurement"):
        shapes_tables(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bfloat16"}, "has other settings than cells beside it"),
        ({"engine_args": {"a": "1"}}, "has other settings than cells beside it"),
        ({"trace": TRACE_FIGURES}, "played another trace than"),
    ],
)
def test_cells_of_other_settings_are_not_put_together(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    place = tmp_path / "micro-8k"
    record(place, "full@prefix", 0, 10.0, 800)
    record(place, "agentkv", 0, 20.0, 100)
    (plan,) = (place / cell_path("embedded", 0, "agentkv")).glob("*/serving.json")
    plan.write_text(json.dumps(json.loads(plan.read_text()) | changes))
    with pytest.raises(UsageError, match=said):
        shapes_tables(tmp_path)


def test_an_arm_of_other_settings_is_not_the_same_arm(tmp_path: Path) -> None:
    place = tmp_path / "micro-8k"
    for number in range(2):
        record(place, "agentkv", number, 20.0 + number, 100)
    (plan,) = (place / cell_path("embedded", 1, "agentkv")).glob("*/serving.json")
    document = json.loads(plan.read_text())
    document["arms"][0]["settings"] = {"interval": 8192}
    plan.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="has other settings than cells beside it"):
        shapes_tables(tmp_path)


def test_a_measurement_that_ignores_ctrl_c_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_STOP_S", 20.0)  # not to wait for what would be killed then
    ignoring = "import signal, time; signal.signal(2, signal.SIG_IGN); print(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        shapes._stop(process)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.usefixtures("fake")
def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes.main(words(tmp_path, "--repeats", "1", "--arm", "full")) == 0
    assert shapes.main(words(tmp_path, "--seed", "1")) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("holds sessions of another shape; choose another --out")
    assert len(said.splitlines()) == 1
    assert shapes.main(words(tmp_path, "--concurrency", "1")) == 2
    said = capsys.readouterr().err.strip()
    assert "was measured with --dtype float32, --concurrency 2, --threads 1; choose" in said
    assert shapes.main(["table", str(tmp_path / "none")]) == 2


def test_what_an_engine_gets_of_its_own_stays(
    tmp_path: Path, fake: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ("--arm", "full", "--repeats")
    assert shapes.main(words(tmp_path, *cells, "1", "--engine-arg", "all:a=1")) == 0
    assert "a=1" in fake[0]
    other = ("--engine-arg", "all:a=1", "--env", "embedded:X=2")
    assert shapes.main(words(tmp_path, *cells, "2", *other)) == 2
    assert "was measured with --engine-arg embedded:a=1 of its own" in capsys.readouterr().err
    assert shapes.main(words(tmp_path, *cells, "2", "--engine-arg", "all:a=1")) == 0
    assert shapes.own_of(shapes.parsed(words(tmp_path, *other)), "vllm")["env"] == {}


def test_a_folder_from_before_goes_on_and_notes_what_it_gets(
    tmp_path: Path, fake: list[list[str]]
) -> None:
    assert shapes.main(words(tmp_path, "--arm", "full", "--repeats", "1")) == 0
    about = tmp_path / "micro-700" / "about.json"
    known = json.loads(about.read_text())
    shape = known.pop("decoder")
    del known["engines"]
    about.write_text(json.dumps(known))
    again = words(tmp_path, "--arm", "full", "--repeats", "2", "--env", "embedded:X=2")
    assert shapes.main(again) == 0
    assert len(fake) == 2
    noted = json.loads(about.read_text())
    assert noted["engines"] == {"embedded": {"env": {"X": "2"}, "engine_arg": {}}}
    assert noted["decoder"] == shape
    assert shape["kv_width"] == read_decoder(model_path("micro")).kv_width


def test_the_machine_is_measured_as_cells_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "import json, os, sys; print(json.dumps([sys.argv[1], os.environ['OMP_NUM_THREADS']]))"
    monkeypatch.setattr(shapes, "_MACHINE", said)
    shapes._measure_machine(tmp_path / "a.json", "float32", {**os.environ, "OMP_NUM_THREADS": "7"})
    assert json.loads((tmp_path / "a.json").read_text()) == ["float32", "7"]
    monkeypatch.setattr(shapes, "_MACHINE", "raise SystemExit('no')")
    with pytest.raises(UsageError, match="cannot be measured: no"):
        shapes._measure_machine(tmp_path / "b.json", "float32", dict(os.environ))


LIMIT = {"name": "m", "gb_per_s": 10.0, "tflops": {"float32": 1000.0}, "source": "a test"}


def serving_plan(arm: str, seed: int = 0) -> ServingPlan:
    return ServingPlan(
        engine="embedded", model="micro", dtype="float32", arms=[ServingArm(name=arm, method=arm)],
        shapes=["t"], loads=["c2"], turns=0, tool_tokens=0, think_time_s=0.0, sessions=2, warmup=0,
        repeats=1, seed=seed,
    )  # fmt: skip


def record(
    place: Path,
    arm: str,
    number: int,
    speed: float,
    live: int,
    code: str | None = None,
    *,
    begun: int = 1,
    run: str = "run",
    seed: int = 0,
) -> None:
    """Write what a cell leaves behind."""
    here = {"hardware": {"cpu": "a processor"}, "git_commit": "a" * 40, "code_sha": code}
    folder = place / cell_path("embedded", number, arm)
    figures = {
        "output_throughput": speed, "failed": 0, "completed": 6, "median_tpot_ms": 1000 / speed,
        "duration": 8 / speed, "total_output_tokens": 8, "mean_e2el_ms": 1000 / speed,
        "mean_concurrent_decodes": 2.0, "median_ttft_first_ms": 3000.0,
        "median_ttft_later_ms": 500.0,
    }  # fmt: skip
    account = {
        "median_peak_bytes": 1e6 * live, "median_peak_live": live, "median_logical": 900.0,
        "mean_decode_kv": live, "events": 1, "session_resets": 0, "max_over_budget": 0,
        "bytes_read": 2_000_000 * live, "decode_tokens": 8,  # two are no answer's first
    }  # fmt: skip
    ServingFolder.create(folder / run, serving_plan(arm, seed), here).add(
        LoadMeasurement(
            arm=arm,
            shape="t",
            load="c2",
            repetition=0,
            place=0,
            begun=begun,
            date="",
            backend="",
            model_id="",
            num_prompts=6,
            max_concurrency=2,
            request_rate="inf",
            figures=figures,
            kv=account,
            pool_bytes=3_000_000 * live,
        )
    )
    done = {"engine": "embedded", "arm": arm, "repetition": number, "rank": 0, "wall_s": 1800.0}
    (folder / CELL).write_text(json.dumps(done))


@pytest.fixture
def shown(tmp_path: Path) -> Table:
    place = tmp_path / "micro-8k"
    for number in range(2):
        record(place, "full@prefix", number, 10.0 * (number + 1), 800)
        record(place, "agentkv", number, 20.0 * (number + 1), 100)
        (place / f"hardware-rep0{number + 1}.json").write_text(json.dumps(LIMIT))
    (place / TRACE).write_text("")
    failed = place / "vllm" / "rep01" / "full"
    failed.mkdir(parents=True)
    said = {"engine": "vllm", "arm": "full", "repetition": 0, "rank": 1, "wall_s": 0.0}
    (failed / CELL).write_text(json.dumps({**said, "error": "no such engine"}))
    (table,) = shapes_tables(tmp_path)
    return table


def test_the_table_pairs_repetitions_and_has_bytes_first(shown: Table) -> None:
    titles = [column.title for column in shown.columns]
    rows = {row.cells[1].value: dict(zip(titles, row.cells, strict=True)) for row in shown.rows}
    assert (
        titles.index("peak live MB a session") < titles.index("pool MB") < titles.index("peak live")
    )
    agentkv, full = rows["agentkv"], rows["full@prefix"]
    assert (agentkv["repeats"].value, agentkv["output tok/s"].value) == (2, 30.0)
    assert (agentkv["x base"].value, agentkv["base"].value) == (2.0, "full@prefix")
    assert full["x base"].value is None
    assert agentkv["peak live MB a session"].value == 100
    assert agentkv["pool MB"].value == 300
    assert agentkv["read MB a token"].value == 100
    assert (agentkv["TTFT turn 1 s"].value, agentkv["TTFT turns 2+ s"].value) == (3.0, 0.5)
    assert any("vllm full: no such engine (1 x)" in note for note in shown.notes)
    assert any("measured in 2.0 h" in note for note in shown.notes)
    assert any("fewest repetitions: 2" in note for note in shown.notes)


def test_cells_of_other_code_are_not_paired(tmp_path: Path) -> None:
    """Two states of one working tree were: only the commit was noted, and no note said so."""
    place = tmp_path / "micro-8k"
    for number, code in enumerate(("0123abcd" * 2, "fedc4567" * 2)):
        record(place, "full@prefix", number, 10.0 + number, 800, "0123abcd" * 2)
        record(place, "agentkv", number, 20.0 + 2 * number, 100, code)
    (place / TRACE).write_text("")
    (found,) = shapes_tables(tmp_path)
    ratio = [column.title for column in found.columns].index("x base")
    (agentkv,) = (row for row in found.rows if row.cells[1].value == "agentkv")
    assert (agentkv.cells[ratio].low, agentkv.cells[ratio].value) == (None, 2.0)  # of one pair
    (note,) = (note for note in found.notes if note.startswith("embedded: measured with 2 mac"))
    assert "code 0123abcd (" in note
    assert "code fedc4567 (" in note


def test_the_share_of_the_roofline_counts_what_was_read(shown: Table) -> None:
    at = [column.title for column in shown.columns].index("of the roofline %")
    share = {row.cells[1].value: row.cells[at].value for row in shown.rows}
    # By far most of a step are the bytes of two sessions: 2 x 800 MB, and 2 x 100 MB at twice the
    # speed, at 10 GB/s; tokens come at 10 and 20 a second.
    assert share["full@prefix"] == pytest.approx(0.16 * (10 + 20) / 2, rel=0.02)
    assert share["agentkv"] == pytest.approx(0.02 * (20 + 40) / 2, rel=0.1)


def test_the_limit_of_a_cell_is_that_measured_before_it(shown: Table, tmp_path: Path) -> None:
    """Hours after its repetition began, a machine may be twice as fast."""
    at = [column.title for column in shown.columns].index("of the roofline %")
    before = {row.cells[1].value: row.cells[at].value for row in shown.rows}
    for number in range(2):
        cell = tmp_path / "micro-8k" / cell_path("embedded", number, "agentkv")
        (cell / HARDWARE).write_text(json.dumps(LIMIT | {"gb_per_s": 20.0}))
    (table,) = shapes_tables(tmp_path)
    after = {row.cells[1].value: row.cells[at].value for row in table.rows}
    assert after["full@prefix"] == before["full@prefix"]
    assert after["agentkv"] == pytest.approx(before["agentkv"] / 2)


@pytest.mark.usefixtures("shown")
def test_the_share_of_the_roofline_is_that_of_the_shape_that_was_noted(tmp_path: Path) -> None:
    """Records are kept without their model; a column of their table was empty."""
    about = tmp_path / "micro-8k" / ABOUT
    shape = asdict(read_decoder(model_path("micro")))

    def shares() -> list[object]:
        (table,) = shapes_tables(tmp_path)
        at = [column.title for column in table.columns].index("of the roofline %")
        return [row.cells[at].value for row in table.rows]

    found = shares()
    about.write_text(json.dumps({DECODER: shape}))
    assert shares() == found
    about.write_text(json.dumps({DECODER: shape | {"common": 100 * 10**9}}))
    assert all(now > 10 * then for now, then in zip(shares(), found, strict=True))
    about.write_text(json.dumps({DECODER: None}))
    assert shares() == [None, None]


def test_a_model_that_the_roofline_does_not_count_has_no_share(tmp_path: Path) -> None:
    config = json.loads((model_path("micro") / "config.json").read_text())
    config |= {"num_experts": 8, "experts_of_tomorrow": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert counted(str(tmp_path)) is None
    assert counted(str(tmp_path / "nothing")) is None
    assert counted("micro") == read_decoder(model_path("micro"))


def test_nothing_is_shown_of_what_is_not_known(tmp_path: Path) -> None:
    assert serving_shapes_table.shapes_tables(tmp_path) == []


def test_what_only_one_engine_was_given_is_told(shown: Table, tmp_path: Path) -> None:
    assert not any("was given" in note for note in shown.notes)
    given = {"engines": {"embedded": {"env": {"X": "2"}, "engine_arg": {"a": "b"}}}}
    (tmp_path / "micro-8k" / ABOUT).write_text(json.dumps(given))
    (table,) = shapes_tables(tmp_path)
    assert "embedded was given: X=2 a=b" in table.notes


def test_a_share_above_the_whole_is_no_speed(shown: Table, tmp_path: Path) -> None:
    def told(table: Table) -> bool:
        return any("a fault of the measurement" in note for note in table.notes)

    assert told(shown)
    for number in (1, 2):
        fast = LIMIT | {"gb_per_s": 1000.0}
        (tmp_path / "micro-8k" / f"hardware-rep0{number}.json").write_text(json.dumps(fast))
    (table,) = shapes_tables(tmp_path)
    assert not told(table)


def test_the_fewest_pairs_are_told_where_there_are_more_repetitions(tmp_path: Path) -> None:
    place = tmp_path / "micro-8k"
    for number in range(9):
        record(place, "full@prefix", number, 10.0 + number, 800, "a" * 16)
        record(place, "agentkv", number, 20.0 + number, 100, "a" * 16 if number < 2 else "b" * 16)
    (place / TRACE).write_text("")
    (table,) = shapes_tables(tmp_path)
    assert "fewest pairs: 2; fewer than 9 decide nothing" in table.notes
    assert any("agentkv c2 2 of 9" in note for note in table.notes)


def test_threads_are_the_same_for_all_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        shapes.main(words(tmp_path, "--env", "embedded:OMP_NUM_THREADS=16"))
    assert "--threads says it, the same for all" in capsys.readouterr().err
