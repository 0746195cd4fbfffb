from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results import files, run_info
from agentbench_kv.results import store as run_store
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.run_info import STALE_S, RunInfo, RunStatus, read_info, write_info
from agentbench_kv.results.run_names import prefix_parts, run_id
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunStore, suggestion

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "runs")


def rewrite(path, **changes):
    write_info(path, read_info(path).model_copy(update=changes))


def test_the_run_id_is_readable_and_safe(spec):
    name = run_id(prefix_parts(spec), spec)
    prefix, _, digest = name.rpartition("-")
    assert prefix == "micro_recall-1k-agentkv-b256-micro-s3"
    assert len(digest) == 10
    assert int(digest, 16) >= 0
    wild = run_id(["../..", "a/b c", "", "é" * 500, "." * 9], {})
    assert "/" not in wild
    assert not wild.startswith(".")
    assert len(wild) < 200
    assert prefix_parts({"budget": None, "model": "org/name/"})[2:4] == ["bnone", "name"]


def test_long_names_are_cut_and_no_name_is_empty():
    parts, digest = run_id(["x" * 500, "y" * 500], {}).rsplit("-", 1)
    assert parts == f"{'x' * 40}-{'y' * 40}"
    assert len(run_id(["x" * 40] * 20, {})) == 160 + 1 + len(digest)
    assert run_id(["", "../.."], {}) == f"run-{digest}"


@settings(max_examples=50, deadline=None)
@given(spec=st.dictionaries(st.text(max_size=5), json_values, min_size=1), data=st.data())
def test_the_run_id_ignores_the_order_of_keys_and_sees_every_value(spec, data):
    shuffled = dict(data.draw(st.permutations(list(spec.items()))))
    assert run_id(["x"], shuffled) == run_id(["x"], spec)
    name = data.draw(st.sampled_from(sorted(spec)))
    assert run_id(["x"], spec | {name: "another value"}) != run_id(["x"], spec)


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_a_spec_without_an_exact_json_form_is_refused(value):
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        run_id(["x"], {"odd": value})


def test_a_clean_exit_completes_and_an_exception_fails_the_run(store, spec):
    with store.open("a", spec):
        assert RunReader(store.root / "a").info.status is RunStatus.RUNNING
    assert RunReader(store.root / "a").info.status is RunStatus.COMPLETE

    def crash():
        with store.open("b", spec):
            raise RuntimeError("engine fell over")

    with pytest.raises(RuntimeError):
        crash()
    info = RunReader(store.root / "b").info
    assert (info.status, info.error) == (RunStatus.FAILED, "RuntimeError: engine fell over")


def test_ctrl_c_is_an_interruption_and_no_failure(store, spec):
    with pytest.raises(KeyboardInterrupt), store.open("a", spec):
        raise KeyboardInterrupt
    reader = RunReader(store.root / "a")
    assert reader.interrupted
    assert reader.info.error is None
    with store.open("a", spec):
        assert not reader.interrupted


def test_a_resume_keeps_records_and_accumulates_active_seconds(store, spec, make_trial):
    with store.open("a", spec, {"git": "1", "gpu": None}, expected_trials=3) as run:
        run.append_trial(make_trial("x"))
        with run.playing():
            time.sleep(0.05)
    first = run.info
    with store.open("a", spec, {"git": "2", "gpu": None}) as run:
        run.annotate({"git": "3", "engine": "9"})
        assert run.finished_trials() == {("x", 0)}
        run.append_trial(make_trial("y"))
        with run.playing():
            time.sleep(0.05)
    last = run.info
    assert first.wall_s >= 0.05
    assert last.wall_s >= first.wall_s + 0.05
    assert last.created == first.created
    assert last.expected_trials == 3
    assert last.provenance == {"git": "1", "gpu": None}
    assert last.resumes[0].changed == {"git": ("1", "3"), "engine": (None, "9")}


def test_a_resume_by_a_newer_version_does_not_say_what_the_first_start_did_not(
    store, spec, make_trial
):
    """Its `code_sha` would be taken for that of trials which other code played."""
    with store.open("a", spec, {"kvbench": "1"}) as run:
        run.annotate({"engine": "9"})
        run.append_trial(make_trial("x"))
    newer = {"kvbench": "2", "code_sha": "new", "gpu": None}
    with store.open("a", spec, newer) as run:
        run.append_trial(make_trial("y"))
    with store.open("a", spec, newer) as run:
        run.annotate({"engine": "9", "context_limit": 8})
        run.append_trial(make_trial("z"))
    assert run.info.provenance == {"kvbench": "1", "engine": "9"}
    changed = {"kvbench": ("1", "2"), "code_sha": (None, "new")}
    both = [changed, changed | {"context_limit": (None, 8)}]
    assert [resume.changed for resume in run.info.resumes] == both


def test_a_start_that_finishes_nothing_says_nothing_of_the_trials_there_are(
    store, spec, make_trial
):
    """An upgrade that was tried and undone made a run incomparable."""
    with store.open("a", spec, {"torch": "1"}) as run:
        run.annotate({"engine": "9"})
        run.append_trial(make_trial("x"))
    with store.open("a", spec, {"torch": "2"}) as run:
        run.annotate({"engine": "10"})
        run.append_trial(make_trial("y", status="engine_error"))
    assert run.info.resumes == []
    with store.open("a", spec, {"torch": "1"}) as run:
        run.append_trial(make_trial("y"))
        run.annotate({"engine": "10"})  # late
    assert [resume.changed for resume in run.info.resumes] == [{"engine": ("9", "10")}]
    assert run.info.provenance == {"torch": "1", "engine": "9"}


def test_a_run_is_of_the_versions_that_played_it(store, spec, make_trial):
    """What a start had that finished no trial says nothing of those that come later."""
    with store.open("a", spec, {"torch": "1", "gpu": "A"}) as run:
        run.annotate({"engine": "9", "model_sha": "m"})
        run.append_trial(make_trial("x", status="engine_error"))
    with store.open("a", spec, {"torch": "2"}) as run:
        run.annotate({"engine": "10"})
        run.append_trial(make_trial("x"))
    assert run.info.provenance == {"torch": "2", "engine": "10"}
    assert run.info.resumes == []


def test_the_time_between_the_last_heartbeat_and_a_kill_counts(store, spec, make_trial):
    """Trials that ended in it count, so a run that was killed must not look faster."""
    with store.open("a", spec) as run:
        run.append_trial(make_trial("x"))
    path = store.root / "a"
    beat = time.time() - 40
    rewrite(path, status=RunStatus.RUNNING, heartbeat=beat, pid=2**22 + 1, wall_s=1.0)
    os.utime(path / "samples.jsonl", (beat + 4, beat + 4))
    began = time.monotonic()
    for _ in range(2):
        with store.open("a", spec) as run:
            counted = run.info.wall_s
        assert 5.0 <= counted < 5.1 + time.monotonic() - began


def test_only_the_time_of_trials_counts_if_they_are_timed(store, spec, monkeypatch):
    """Starting and stopping an engine is no part of a run's speed."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(run_store, "time", clock)

    def play(seconds):
        with store.open("a", spec) as run:
            now[0] += 30
            with run.playing():
                now[0] += seconds
                run.expect(1)
                inside = run.info.wall_s
            now[0] += 8
        return inside, run.info.wall_s

    with store.open("a", spec) as run:  # an engine that did not start
        now[0] += 100
        run.expect(1)
    assert play(5) == (5, 5)
    assert play(2) == (7, 7)


def test_annotations_and_expectations_reach_the_disk(store, spec):
    with store.open("a", spec, {"git": "1"}) as run:
        run.annotate({"template_sha": "abc", "when": run_store.Path("/x")})
        run.expect(12)
        info = RunReader(run.path).info
    assert info.provenance == {"git": "1", "template_sha": "abc", "when": "/x"}
    assert info.expected_trials == 12


def test_the_last_record_of_a_trial_wins(store, spec, make_trial):
    with store.open("a", spec) as run:
        for status in ("infra_error", "infra_error", "timeout"):
            run.append_trial(make_trial("x", status=status))
        run.append_trial(make_trial("y", status="infra_error"))
        assert [record.status for record in run.trials()] == ["timeout", "infra_error"]
        assert run.finished_trials() == {("x", 0)}
        lost = [record.key for record in run.trial_lines().records if not record.finished]
        assert sorted(lost) == [("x", 0), ("x", 0), ("y", 0)]


def test_turns_of_an_abandoned_attempt_are_dropped(store, spec):
    def turns(*indexes, **fields):
        return [TurnRecord(sample_id="x", trial=0, turn=i, **fields) for i in indexes]

    with store.open("a", spec) as run:
        run.append_turns(turns(0, 1, 2, 3, events=1))
        run.append_turns([])
        run.append_turns(turns(0, 1))
        assert run.turns() == turns(0, 1)


def test_another_spec_in_the_same_directory_is_refused(store, spec):
    store.open("a", spec).close()
    for other in (spec | {"budget": 512}, spec | {"extra": 1}, {"task": spec["task"]}):
        with pytest.raises(UsageError, match="another spec") as caught:
            store.open("a", other)
        assert "\n" not in str(caught.value)


def test_a_second_writer_in_the_same_process_is_refused(store, spec):
    with store.open("a", spec), pytest.raises(UsageError, match=f"pid {os.getpid()}"):
        store.open("a", spec)
    store.open("a", spec).close()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"age": 0}, True),
        ({"age": STALE_S - 10}, True),
        ({"age": STALE_S}, False),
        ({"age": 10 - STALE_S}, True),
        ({"age": -3600}, False),
        ({"age": 0, "status": RunStatus.FAILED}, False),
    ],
)
def test_another_machine_holds_the_run_while_its_heartbeat_is_fresh(
    store, spec, change, refused, monkeypatch
):
    monkeypatch.setattr(run_info, "WATCH_S", 0.05)
    store.open("a", spec).close()
    change = {"status": RunStatus.RUNNING, "host": "elsewhere", "pid": 1} | change
    rewrite(store.root / "a", heartbeat=time.time() - change.pop("age"), **change)
    if not refused:
        store.open("a", spec).close()
        return
    with pytest.raises(UsageError, match=r"pid 1 on elsewhere \(heartbeat \d+ s ago\)"):
        store.open("a", spec)


def beat_ahead(path, seconds=3600.0, **changes):
    """Leave the run of a writer elsewhere whose clock is ahead."""
    changes = {"status": RunStatus.RUNNING, "host": "elsewhere", "pid": 1} | changes
    rewrite(path, heartbeat=time.time() + seconds, **changes)


def test_a_heartbeat_of_the_future_that_moves_holds_the_run(store, spec, monkeypatch):
    """Its writer is alive, and only its clock is wrong: another machine's, an hour ahead."""
    monkeypatch.setattr(run_info, "WATCH_S", 60.0)
    store.open("a", spec).close()
    path = store.root / "a"
    beat_ahead(path)
    watched = threading.Event()
    monkeypatch.setattr(run_info.logger, "info", lambda *_: watched.set())

    def beat():
        watched.wait(60)
        beat_ahead(path, 3605.0)

    writer = threading.Thread(target=beat)
    writer.start()
    with pytest.raises(UsageError, match=r"pid 1 on elsewhere, whose clock is 3600 s ahead"):
        store.open("a", spec)
    writer.join()
    assert not RunReader(path).info.resumes


def test_a_clock_that_was_put_right_while_it_was_watched_is_a_fresh_heartbeat(
    store, spec, monkeypatch
):
    monkeypatch.setattr(run_info, "WATCH_S", 0.05)
    store.open("a", spec).close()
    path = store.root / "a"
    beat_ahead(path)
    monkeypatch.setattr(run_info.logger, "info", lambda *_: beat_ahead(path, 0.0))
    with pytest.raises(UsageError, match=r"pid 1 on elsewhere \(heartbeat 0 s ago\)"):
        store.open("a", spec)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"host": "elsewhere", "age": 100}, "pid 77 on elsewhere, silent for 100 s"),
        ({"host": "elsewhere", "age": -100}, "pid 77 on elsewhere, its clock 100 s ahead"),
        ({"host": socket.gethostname(), "age": 100}, ""),  # no such process: it was killed
        ({"host": "elsewhere", "age": 100, "status": RunStatus.FAILED}, ""),
    ],
)
def test_a_run_that_was_taken_over_says_from_whom(store, spec, monkeypatch, left, said):
    monkeypatch.setattr(run_info, "WATCH_S", 0.05)

    def no_such(_pid, _signal):
        raise ProcessLookupError

    monkeypatch.setattr(run_info.os, "kill", no_such)
    store.open("a", spec).close()
    left = {"status": RunStatus.RUNNING, "pid": 77} | left
    rewrite(store.root / "a", heartbeat=time.time() - left.pop("age"), **left)
    store.open("a", spec).close()
    assert [resume.taken_over for resume in store.find("a").info.resumes] == [said] * bool(said)


def test_a_run_that_was_taken_over_and_goes_on_says_so_once(store, spec, make_trial, monkeypatch):
    monkeypatch.setattr(run_info, "WATCH_S", 0.05)
    with store.open("a", spec, {"torch": "1"}) as run:
        run.append_trial(make_trial("x"))
    changes = {"status": RunStatus.RUNNING, "pid": 77, "host": "elsewhere"}
    rewrite(store.root / "a", heartbeat=time.time() - 100, **changes)
    said = "pid 77 on elsewhere, silent for 100 s"
    with store.open("a", spec, {"torch": "2"}) as run:
        assert [(each.taken_over, each.changed) for each in run.info.resumes] == [(said, {})]
        run.append_trial(make_trial("y"))
    changed = {"torch": ("1", "2")}
    assert [(each.taken_over, each.changed) for each in run.info.resumes] == [(said, changed)]


def hold(path, ready, done):
    """Hold a run's lock, as a process that was stopped in the middle."""
    with files.exclusive(path):
        ready.set()
        done.wait(60)


def test_a_lock_that_is_held_too_long_is_one_line_that_says_by_whom(store, spec, monkeypatch):
    monkeypatch.setattr(files, "LOCK_S", 0.1)
    store.open("a", spec).close()
    ready, done = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold, args=(store.root / "a", ready, done))
    holder.start()
    assert ready.wait(60)
    try:
        with pytest.raises(PrerequisiteError) as caught:
            store.open("a", spec)
    finally:
        done.set()
        holder.join()
    who = f"pid {os.getpid()} on {socket.gethostname()}"
    assert f".lock was held for 0.1 s by {who}: let that process go on (kill -CONT)" in str(
        caught.value
    )
    store.open("a", spec).close()


def test_a_lock_is_waited_for(store, spec):
    store.open("a", spec).close()
    ready, done = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold, args=(store.root / "a", ready, done))
    holder.start()
    assert ready.wait(60)
    threading.Timer(0.2, done.set).start()
    store.open("a", spec).close()
    assert done.is_set()
    holder.join()


def test_the_same_pid_after_a_restart_does_not_hold_the_run(store, spec):
    """A restarted container gives the new process the pid of the dead one."""
    store.open("a", spec).close()
    rewrite(store.root / "a", status=RunStatus.RUNNING, heartbeat=time.time(), owner="before")
    assert RunReader(store.root / "a").interrupted
    store.open("a", spec).close()


def test_the_heartbeat_is_refreshed_in_the_background(store, spec, monkeypatch):
    monkeypatch.setattr(run_store, "BEAT_S", 0.01)
    with store.open("a", spec) as run, run.playing():
        before = run.info
        deadline = time.monotonic() + 10
        while run.info.heartbeat == before.heartbeat and time.monotonic() < deadline:
            time.sleep(0.01)
        after = run.info
    assert after.heartbeat > before.heartbeat
    assert after.wall_s > before.wall_s


def test_a_writer_whose_run_was_taken_over_stops(store, spec, make_trial, monkeypatch):
    run = store.open("a", spec)
    run.append_trial(make_trial("mine"))
    rewrite(run.path, owner="thief", pid=4242, host="elsewhere")
    real = time.time
    monkeypatch.setattr(run_store.time, "time", lambda: real() + 2 * STALE_S)
    with pytest.raises(UsageError, match="taken over by pid 4242 on elsewhere"):
        run.append_trial(make_trial("late"))
    with pytest.raises(UsageError, match="taken over"):
        run.close()
    assert run.info.owner == "thief"
    assert run.finished_trials() == {("mine", 0)}


def test_a_suspended_writer_that_kept_its_run_goes_on(store, spec, make_trial, monkeypatch):
    with store.open("a", spec) as run:
        real = time.time
        monkeypatch.setattr(run_store.time, "time", lambda: real() + 2 * STALE_S)
        run.append_trial(make_trial("late"))
        assert run.finished_trials() == {("late", 0)}


def test_many_threads_append_whole_lines(store, spec, make_trial):
    with store.open("a", spec) as run:

        def work(worker):
            for trial in range(10):
                run.append_trial(make_trial(f"s{worker}", trial))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(run.finished_trials()) == 60
        assert not run.trial_lines().unreadable


def test_transcripts_of_any_sample_id_stay_inside_the_run(store, spec, make_trial):
    ids = ["a/b", "a_b", "../../etc/passwd", "", ".", "A" * 900, "é\ud800", "a b", "A_B"]
    with store.open("a", spec) as run:
        paths = {run.save_transcript(name, 0, {"id": name}) for name in ids}
        assert len({path.lower() for path in paths}) == len(ids)
        for path in paths:
            assert (run.path / path).resolve().parent == (run.path / "transcripts").resolve()
        name = run.save_transcript("x", 1, [{"role": "user", "content": "\ud800"}])
        assert run.transcript(make_trial("x", 1, transcript=name))[0]["content"] == "\ud800"
        assert run.transcript(make_trial("x", 1)) is None


def test_a_transcript_path_out_of_the_run_is_not_followed(store, spec, make_trial):
    store.root.mkdir()
    (store.root / "secret.json").write_text("1")
    with store.open("a", spec) as run:
        assert run.transcript(make_trial(transcript="../secret.json")) is None


def test_leftovers_of_a_killed_process_are_removed(store, spec):
    with store.open("a", spec) as run:
        run.save_transcript("x", 0, {})
    here = files.pid_space()
    dead, alive, elsewhere = f"{here}.{2**22 + 1}", f"{here}.{os.getpid()}", f"0ther0ne.{2**22 + 1}"
    folders = (run.path, run.path / "transcripts")
    killed = [folder / f".x.json.{dead}.2.tmp" for folder in folders]
    # Whether that process of another machine is alive, nobody can tell.
    written = [folder / f".x.json.{who}.2.tmp" for folder in folders for who in (alive, elsewhere)]
    old = [folder / f".x.json.{alive}.3.tmp" for folder in folders]
    for path in killed + written + old:
        path.write_text("half")
    for path in old:
        os.utime(path, (0, 0))
    store.open("a", spec).close()
    assert [path.exists() for path in killed + written + old] == [False] * 2 + [True] * 4 + [
        False
    ] * 2


def test_what_a_live_writer_is_writing_is_left_alone(store, spec):
    """A second start of the same command is refused, and takes nothing away."""
    with store.open("a", spec) as run:
        half = run.path / f".run.json.{files.pid_space()}.{2**22 + 1}.2.tmp"
        half.write_text("half")
        with pytest.raises(UsageError, match="is being written"):
            store.open("a", spec)
        assert half.exists()


def test_a_place_that_cannot_be_a_folder_is_one_clear_line(tmp_path, spec):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrerequisiteError, match="cannot write") as caught:
        RunStore(tmp_path / "file").open("a", spec)
    assert "\n" not in str(caught.value)


def test_a_deleted_run_directory_is_noticed(store, spec, make_trial):
    run = store.open("a", spec)
    shutil.rmtree(run.path)
    with pytest.raises(PrerequisiteError, match="cannot write"):
        run.append_trial(make_trial())
    with pytest.raises(PrerequisiteError, match="cannot write"):
        run.close()


def test_a_closing_error_never_hides_the_real_one(store, spec):
    def crash():
        with store.open("a", spec) as run:
            shutil.rmtree(run.path)
            raise KeyError("the real one")

    with pytest.raises(KeyError, match="the real one"):
        crash()


def test_a_broken_run_json_is_one_clear_line(store, spec):
    store.open("a", spec).close()
    (store.root / "a" / "run.json").write_text('{"run_id": 3')
    with pytest.raises(UsageError, match="not a kvbench run record"):
        store.open("a", spec)


def test_a_seed_that_is_no_single_value_is_no_run_record(store, spec):
    """Runs are put together by it, which a list cannot be."""
    store.open("a", spec).close()
    path = store.root / "a" / "run.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"spec": spec | {"seed": [1]}}))
    with pytest.raises(UsageError, match=r"not a kvbench run record: .*no single value"):
        read_info(path.parent)


def test_run_json_of_a_newer_version_is_read(store, spec):
    store.open("a", spec).close()
    path = store.root / "a" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"newer": True}))
    assert RunReader(path.parent).info.run_id == "a"


def test_runs_are_found_by_path_and_id_and_near_misses_suggested(store, spec):
    store.open("micro-agentkv-b256-1a2b", spec).close()
    (store.root / "not-a-run").mkdir()
    assert store.names() == ["micro-agentkv-b256-1a2b"]
    for name in (store.names()[0], str(store.root / store.names()[0])):
        assert store.find(name).info.spec == spec
    for typo in ("micro-agentkv-b255-1a2b", "agentkv-B256"):
        with pytest.raises(UsageError, match=r"did you mean micro-agentkv-b256-1a2b\?"):
            store.find(typo)
    with pytest.raises(UsageError, match="no run 'zzz'"):
        store.find("zzz")
    assert RunStore(store.root / "none").names() == []
    assert suggestion("", ["a"]) == ""


def test_a_run_is_found_by_the_start_of_its_hash(store, spec):
    names = ("a-b64-0123456789", "b-b64-0123ffffff", "deadbeef", "x-0123")
    for name in names:
        with store.open(name, spec):
            pass
    assert store.find("01234567").path.name == names[0]
    assert store.find("0123f").path.name == names[1]
    assert store.find("deadbeef").path.name == "deadbeef"
    with pytest.raises(UsageError, match=r"0123 is 3 runs: a-b64-0123456789, b-.*; say more"):
        store.find("0123")
    for no_hash in ("012", "b64", "0123456789a", "01234567890", "", "0124"):
        with pytest.raises(UsageError, match="no run"):
            store.find(no_hash)


def test_a_run_is_found_by_a_relative_path(store, spec, monkeypatch):
    store.open("a", spec).close()
    monkeypatch.chdir(store.root.parent)
    assert RunStore(store.root / "elsewhere").find("runs/a").info.spec == spec


def test_names_are_sorted_and_suggestions_are_few(store, spec):
    known = [f"micro-agentkv-b{size}" for size in (128, 256, 384, 512)]
    for name in reversed(known):
        store.open(name, spec).close()
    assert store.names() == known
    assert suggestion("AGENTKV", known) == f"; did you mean {' or '.join(known[:3])}?"
    assert suggestion("b51", known) == "; did you mean micro-agentkv-b512?"


def test_a_dead_pid_is_told_from_one_we_may_not_signal(monkeypatch):
    def refuse(_pid, _signal):
        raise PermissionError

    monkeypatch.setattr(run_info.os, "kill", refuse)
    facts = {"status": "running", "created": 0, "heartbeat": 0, "pid": 1, "owner": "x"}
    info = RunInfo(run_id="r", spec={}, host=socket.gethostname(), **facts)
    assert not run_info.is_gone(info)


def test_records_read_back_as_written(store, spec, make_trial):
    record = make_trial("x", kv={"events": 2}, metrics={"think_right": 1, "think_asked": 2})
    with store.open("a", spec) as run:
        run.append_trial(record)
        assert run.trials() == [record]
        assert isinstance(run.trials()[0], TrialRecord)


def keep(run, name, content):
    with run.keeping(name) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


def failing(run):
    yield b"half"
    assert len([*run.checkpoint("").iterdir()]) == 3
    assert run.checkpoints() == ["one", "other"]
    raise OSError("it breaks")


def test_a_checkpoint_is_replaced_whole_or_not_at_all(store, spec):
    with store.open("a", spec) as run:
        assert run.checkpoints() == []
        keep(run, "one", b"first")
        keep(run, "other", b"second")
        with pytest.raises(PrerequisiteError, match="cannot write"):
            keep(run, "one", failing(run))
        assert run.checkpoint("one").read_bytes() == b"first"
        assert len([*run.checkpoint("").iterdir()]) == 2
        keep(run, "one", b"third")
        run.drop_checkpoints(["other", "never"])
        assert run.checkpoints() == ["one"]
    assert run.checkpoint("one").read_bytes() == b"third", "a later start may go on from it"
    half = run.checkpoint(f".one.{files.pid_space()}.999999999.1.tmp")
    half.write_bytes(b"of a process that was killed")
    with store.open("a", spec) as run:
        assert not half.exists()
        run.drop_checkpoints(run.checkpoints())
    assert not run.checkpoint("").exists()


def test_a_run_that_is_taken_over_between_two_records_is_written_no_more(store, spec, make_trial):
    """However fresh the heartbeat: a process may be stopped right before it appends."""
    run = store.open("a", spec)
    run.append_trial(make_trial("mine"))
    keep(run, "a", b"mine")
    rewrite(run.path, owner="thief", pid=4242, host="elsewhere")
    for write in (
        lambda: run.append_trial(make_trial("late")),
        lambda: run.save_transcript("late", 0, {}),
        lambda: keep(run, "a", b"late"),
        lambda: run.drop_checkpoints(["a"]),
    ):
        with pytest.raises(run_store.RunLostError, match="taken over by pid 4242 on elsewhere"):
            write()
    with pytest.raises(run_store.RunLostError):
        run.close()
    assert run.finished_trials() == {("mine", 0)}
    assert not (run.path / "transcripts").exists()


def test_a_silent_writer_elsewhere_whose_heartbeat_moves_holds_the_run(store, spec, monkeypatch):
    """Its clock is behind by an hour, which says nothing about whether it is alive."""
    monkeypatch.setattr(run_info, "WATCH_S", 60.0)
    store.open("a", spec).close()
    path = store.root / "a"
    beat_ahead(path, -3600.0)
    monkeypatch.setattr(run_info.logger, "info", lambda *_: beat_ahead(path, -3595.0))
    with pytest.raises(run_info.RunHeldError, match="whose clock is 3600 s behind this clock"):
        store.open("a", spec)


def test_a_process_of_another_container_on_this_host_is_not_judged_by_its_number(store, spec):
    """Two containers may share the host's name and have each a process of this number."""
    store.open("a", spec).close()
    beside = {"status": RunStatus.RUNNING, "heartbeat": time.time(), "owner": "other"}
    rewrite(store.root / "a", machine="another kernel pid:[1]", **beside)
    with pytest.raises(run_info.RunHeldError, match=f"pid {os.getpid()}"):
        store.open("a", spec)
