"""The index of a folder of runs: right whatever happens to it, and to the runs below it."""

from __future__ import annotations

import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentbench_kv.results import index, terminal
from agentbench_kv.results.index import (
    FILE,
    SORTS,
    EntryScore,
    Query,
    RunEntry,
    read_index,
    runs_lines,
    select_runs,
)
from agentbench_kv.results.run_info import HELD, Resume, RunStatus, read_info, write_info
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import build, summarize

KV = {"peak_live": 400, "longest_prefill": 90, "logical": 1000, "events": 2, "evicted": 600}


@pytest.fixture
def store(tmp_path, spec, make_trial):
    store = RunStore(tmp_path / "runs")
    for name, score in (("a", 1.0), ("b", 0.0), ("c", 1.0)):
        with store.open(name, spec | {"seed": ord(name)}, expected_trials=2) as run:
            run.append_trial(make_trial(score=score, kv=KV))
            run.append_trial(make_trial("s1", status="timeout", kv=KV))
        summarize(store.find(name))
    return store


@pytest.fixture
def derived(monkeypatch):
    """Names of the runs whose entries were derived and not found in the index."""
    names = []
    real = index._derived
    monkeypatch.setattr(index, "_derived", lambda path: names.append(path.name) or real(path))
    return names


def test_an_entry_holds_what_the_summary_says(store):
    first = read_index(store.root)[0]
    summary = build(store.find("a"))
    assert first == RunEntry(
        run_id="a",
        status="complete",
        created=store.find("a").info.created,
        task=summary.task,
        method="agentkv",
        budget=256,
        engine="embedded",
        model="models/micro",
        seed=97,
        samples=2,
        trials=2,
        expected_trials=2,
        score=EntryScore(0.5, summary.score.low, summary.score.high),
        peak_live=400.0,
        logical=1000.0,
        live_over_logical=0.4,
        events=4,
        evicted=1200,
        tokens_per_s=summary.tokens_per_s,
        failures={"timeout": 1},
        run_state=summary.validity.state.value,
    )


def test_a_warm_index_reads_no_run(store, derived):
    cold = read_index(store.root)
    assert sorted(derived) == ["a", "b", "c"]
    written = (store.root / FILE).stat().st_mtime_ns
    assert read_index(store.root) == cold
    assert len(derived) == 3
    assert (store.root / FILE).stat().st_mtime_ns == written


def test_only_what_changed_is_derived_again(store, derived, spec, make_trial):
    read_index(store.root)
    derived.clear()
    with store.open("b", spec | {"seed": ord("b")}, expected_trials=3) as run:
        run.append_trial(make_trial("s2", kv=KV))
    shutil.rmtree(store.root / "c")
    with store.open("d", spec):
        pass
    entries = {entry.run_id: entry for entry in read_index(store.root)}
    assert sorted(derived) == ["b", "d"]
    assert list(entries) == ["a", "b", "d"]
    assert (entries["b"].trials, entries["d"].run_state) == (3, "incomplete")


def test_a_replaced_file_is_noticed_even_if_time_and_size_are_the_same(store, derived):
    read_index(store.root)
    derived.clear()
    path = store.root / "a" / "samples.jsonl"
    before = path.stat()
    other = path.with_name("other")
    other.write_text(path.read_text().replace('"score":1.0', '"score":0.0'))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert read_index(store.root)[0].score.point == 0.0
    assert derived == ["a"]


def test_a_summary_is_never_read(store, derived):
    """Audit A10: `ls runs` believed an edited one."""
    honest = read_index(store.root)
    derived.clear()
    for name in ("a", "b"):
        path = store.root / name / "summary.json"
        path.write_text(path.read_text().replace('"point": 0.', '"point": 0.9'))
    (store.root / "c" / "summary.json").unlink()
    assert read_index(store.root) == honest
    assert derived == []
    (store.root / FILE).unlink()
    assert read_index(store.root) == honest


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff", b"[]", b'{"version":1}', b'{"version":1,"runs":{"a":[[1],{}]}}', b"torn"],
)
def test_a_damaged_index_is_rebuilt(store, content):
    right = read_index(store.root)
    whole = (store.root / FILE).read_bytes()
    (store.root / FILE).write_bytes(whole[: len(whole) // 2] if content == b"torn" else content)
    assert read_index(store.root) == right
    assert json.loads((store.root / FILE).read_bytes()) == json.loads(whole)


def test_an_index_of_another_version_is_not_believed(store, derived):
    read_index(store.root)
    derived.clear()
    path = store.root / FILE
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"version": 99}))
    read_index(store.root)
    assert len(derived) == 3


def test_a_folder_that_cannot_be_written_is_listed_all_the_same(store, monkeypatch):
    def refuse(_path, _data):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index, "write_atomic", refuse)
    assert [entry.run_id for entry in read_index(store.root)] == ["a", "b", "c"]
    assert not (store.root / FILE).exists()


def test_runs_that_cannot_be_read_stay_in_the_list(store):
    (store.root / "b" / "run.json").write_text('{"run_id"')
    (store.root / "no run").mkdir()
    entries = read_index(store.root)
    assert [entry.run_id for entry in entries] == ["a", "b", "c"]
    assert "is not a kvbench run record" in entries[1].problem
    assert entries[1].run_state == ""


def test_no_folder_no_runs_no_index(tmp_path):
    assert read_index(tmp_path / "none") == []
    assert read_index(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_interrupted_is_said_of_a_run_whose_writer_is_gone(store):
    info = read_info(store.root / "a")
    running = info.model_copy(update={"status": RunStatus.RUNNING, "heartbeat": 0.0})
    write_info(store.root / "a", running)
    assert read_index(store.root)[0].status == "interrupted"
    owner = "a process that is alive"
    alive = {"heartbeat": 4e9, "pid": os.getpid(), "host": socket.gethostname(), "owner": owner}
    write_info(store.root / "a", running.model_copy(update=alive))
    HELD.add(owner)
    try:
        assert read_index(store.root)[0].status == "running"
    finally:
        HELD.discard(owner)
    # No file changed since, but the writer is gone.
    assert read_index(store.root)[0].status == "interrupted"


def test_a_heartbeat_of_the_future_is_unclear(store):
    info = read_info(store.root / "a")
    ahead = {"status": RunStatus.RUNNING, "heartbeat": 4e9, "host": "elsewhere"}
    write_info(store.root / "a", info.model_copy(update=ahead))
    assert read_index(store.root)[0].status == "unclear"
    gone = {"host": socket.gethostname(), "pid": 2**22 + 1}
    write_info(store.root / "a", info.model_copy(update=ahead | gone))
    assert read_index(store.root)[0].status == "interrupted"


def test_a_run_that_was_taken_over_is_told_apart(store):
    info = read_info(store.root / "a")
    seized = Resume(at=2.0, taken_over="pid 7 on elsewhere, silent for 40 s")
    resumed = info.model_copy(update={"resumes": [seized, Resume(at=3.0)]})
    write_info(store.root / "a", resumed)
    write_info(store.root / "b", info.model_copy(update={"resumes": [Resume(at=3.0)]}))
    entries = read_index(store.root)
    assert [entry.taken_over for entry in entries] == [True, False, False]
    taken = select_runs(entries, Query(status="taken_over"))
    assert [(entry.run_id, entry.status) for entry in taken] == [("a", "complete")]
    table = terminal.console()
    with table.capture() as shown:
        table.print(*runs_lines(entries, None))
    assert shown.get().count("taken over") == 1


def test_a_half_written_index_is_removed_when_it_is_old(store):
    old, new = (store.root / f".{FILE}.{os.getpid()}.{n}.tmp" for n in (1, 2))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    read_index(store.root)
    assert not old.exists()
    assert new.exists()


def test_many_readers_at_once_agree(store):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: read_index(store.root), range(24)))
    assert all(answer == answers[0] for answer in answers)
    assert [path.name for path in store.root.glob(".*")] == [FILE]


ENTRIES = [
    RunEntry("x1", task="t/a", method="snapkv", model="/m/Qwen/", created=3, run_state="valid",
          status="complete", score=EntryScore(0.2, 0, 1), live_over_logical=0.5, tokens_per_s=9,
          failures={"timeout": 2}),
    RunEntry("x2", task="t/b", method="snapkv@rkv", model="micro", created=1,
          run_state="incomplete", status="interrupted", score=EntryScore(0.9, 0, 1),
          live_over_logical=0.1),
    RunEntry("x3", task="t/b", method="full", model="micro", created=2, run_state="valid",
          status="complete", tokens_per_s=11),
]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (Query(), ["x1", "x2", "x3"]),
        (Query(task="t/b"), ["x2", "x3"]),
        (Query(task="t/*", model="micro"), ["x2", "x3"]),
        (Query(method="snapkv"), ["x1", "x2"]),
        (Query(method="snapkv@rkv"), ["x2"]),
        (Query(model="Qwen"), ["x1"]),
        (Query(status="complete"), ["x1", "x3"]),
        (Query(status="incomplete"), ["x2"]),
        (Query(status="interrupted", task="t/a"), []),
        (Query(sort="score"), ["x2", "x1", "x3"]),
        (Query(sort="kv"), ["x2", "x1", "x3"]),
        (Query(sort="speed"), ["x3", "x1", "x2"]),
        (Query(sort="newest"), ["x1", "x3", "x2"]),
        (Query(sort="failures"), ["x1", "x2", "x3"]),
    ],
)
def test_filters_and_orders(query, names):
    assert [entry.run_id for entry in select_runs(ENTRIES, query)] == names


def test_the_command_line_offers_every_order_and_state():
    from agentbench_kv.cli import ls
    from agentbench_kv.results.validity import RunState

    assert set(ls.SORTS) == set(SORTS)
    assert set(ls.STATES) == {*RunStatus, "interrupted", "unclear", "taken_over", *RunState}
