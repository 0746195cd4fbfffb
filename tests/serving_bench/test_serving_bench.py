"""The order in which arms are measured, what each gets, and what is skipped."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.budget import Budget
from agentbench_kv.cli import kvbench
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.results.files import LockedError
from agentbench_kv.serving_bench import bench
from agentbench_kv.serving_bench.arms import engine_arms, url_arms
from agentbench_kv.serving_bench.bench import ServingRun, measure_serving, rotated
from agentbench_kv.serving_bench.jobs import (
    Load,
    LoadJob,
    SessionShape,
    Target,
    Vocabulary,
    Workload,
)
from agentbench_kv.serving_bench.loadgen import JobResult
from agentbench_kv.serving_bench.measurements import ServingArm, ServingFolder, ServingPlan
from agentbench_kv.serving_bench.servers import RunningServer, serve_arm
from agentbench_kv.serving_bench.tables import serving_tables

NAMES = ("full", "full-constrained", "agentkv")
SHAPES = (SessionShape(100, 10), SessionShape(200, 10))
LOADS = (Load(4, concurrency=2), Load(4, rate=1.0))


def make_run(**changes: Any) -> ServingRun:
    plan: dict[str, Any] = {
        "engine": "embedded",
        "model": "micro",
        "arms": [ServingArm(name=name, method=name) for name in NAMES],
        "shapes": [shape.label for shape in SHAPES],
        "loads": [load.label for load in LOADS],
        "turns": 2,
        "tool_tokens": 5,
        "think_time_s": 0.0,
        "sessions": 4,
        "warmup": 0,
        "repeats": 4,
        "seed": 0,
    }
    workloads = tuple(Workload(shape, turns=2, tool_tokens=5) for shape in SHAPES)
    return ServingRun(ServingPlan(**{**plan, **changes}), workloads, LOADS)


def shape_of(job: LoadJob) -> SessionShape:
    call = job.sessions[0].calls[0]
    return SessionShape(call.new_tokens, call.output_tokens)


class Fake:
    """Stands for engines and for the client's process; notes what happens."""

    def __init__(self, context: int | None = 1000) -> None:
        self.started: list[str] = []
        self.running = 0
        self.most_running = 0
        self.jobs: list[tuple[str, LoadJob]] = []
        self._context = context
        self.about: dict[str, dict[str, Any]] = {}  # what each arm's engine says of itself

    @contextmanager
    def serve(self, plan: ServingPlan, arm: ServingArm, at_once: int) -> Any:  # noqa: ARG002
        assert at_once == 4
        self.started.append(arm.name)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            target, about = Target(arm.name, "gateway", "m"), self.about.get(arm.name, {})
            yield RunningServer(target, Vocabulary(9), self._context, about)
        finally:
            self.running -= 1

    def measure(self, job: LoadJob, warmed: Callable[[], None]) -> JobResult:
        warmed()
        self.jobs.append((job.target.base, job))
        sent = sum(len(session.calls) for session in job.sessions)
        return JobResult(load_figures(sent), None, {}, 0, [])


def load_figures(completed: int, failed: int = 0) -> dict[str, int | float]:
    return {
        "completed": completed, "failed": failed, "duration": 10.0,
        "total_output_tokens": 10 * bool(completed), "output_throughput": 1.0 * bool(completed),
        **({"mean_e2el_ms": 1000.0} if completed else {}),
    }  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(bench, "serve_arm", made.serve)
    monkeypatch.setattr(bench, "measure_apart", made.measure)
    return made


def measure(run: ServingRun, path: Path) -> list[tuple[Any, bool]]:
    told: list[tuple[Any, bool]] = []
    measure_serving(run, path, lambda measured, before: told.append((measured, before)))
    return told


def test_arms_are_first_equally_often() -> None:
    arms = make_run().plan.arms
    orders = [[arm.name for arm in rotated(arms, repetition)] for repetition in range(9)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted(NAMES * 3)
    assert orders[1] == ["full-constrained", "agentkv", "full"]


def test_every_repetition_measures_every_arm_one_at_a_time(fake: Fake, tmp_path: Path) -> None:
    told = measure(make_run(), tmp_path)
    assert fake.started == [
        *("full", "full-constrained", "agentkv"),
        *("full-constrained", "agentkv", "full"),
        *("agentkv", "full", "full-constrained"),
        *("full", "full-constrained", "agentkv"),
    ]
    assert (fake.most_running, fake.running) == (1, 0)
    assert len(told) == 4 * 3 * 4
    assert len(list(tmp_path.glob("rep*.json"))) == 4 * 3 * 4
    assert (tmp_path / "summary.json").is_file()
    places = {(m.repetition, m.arm): m.place for m, _ in told}
    assert places[1, "agentkv"] == 1
    assert places[2, "agentkv"] == 0


def test_together_every_arm_is_started_once(fake: Fake, tmp_path: Path) -> None:
    measure(make_run(together=True), tmp_path)
    assert sorted(fake.started) == sorted(NAMES)
    assert (fake.most_running, fake.running) == (3, 0)
    assert [base for base, _ in fake.jobs][4:8] == ["full-constrained"] * 4


def test_together_serving_engines_start_at_the_same_time(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    all_here = threading.Barrier(len(NAMES), timeout=30)

    @contextmanager
    def served(*asked: Any) -> Iterator[RunningServer]:
        all_here.wait()
        with fake.serve(*asked) as server:
            yield server

    monkeypatch.setattr(bench, "serve_arm", served)
    measure(make_run(together=True, engine="vllm"), tmp_path)
    assert sorted(fake.started) == sorted(NAMES)


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_together_if_one_does_not_start_the_others_end(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    @contextmanager
    def served(plan: ServingPlan, arm: ServingArm, at_once: int) -> Iterator[RunningServer]:
        if arm.name == "full-constrained":
            raise PrerequisiteError("no memory")
        with fake.serve(plan, arm, at_once) as server:
            yield server

    monkeypatch.setattr(bench, "serve_arm", served)
    with pytest.raises(PrerequisiteError, match="no memory"):
        measure(make_run(together=True, engine=engine), tmp_path)
    assert sorted(fake.started) == ["agentkv", "full"]
    assert (fake.running, fake.jobs) == (0, [])


def test_arms_of_a_repetition_get_the_same_sessions_and_nothing_is_sent_twice(
    fake: Fake, tmp_path: Path
) -> None:
    measure(make_run(), tmp_path)
    cells = [(shape_of(job), job.load) for _, job in fake.jobs]
    assert cells == [(shape, load) for shape in SHAPES for load in LOADS] * 12
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for number, (_, job) in enumerate(fake.jobs):
        seeds.setdefault((number // 12, *cells[number]), set()).add(job.seed)
    assert all(len(same) == 1 for same in seeds.values())
    assert len(set().union(*seeds.values())) == len(seeds) == 4 * 4


def test_what_was_measured_is_not_measured_again(fake: Fake, tmp_path: Path) -> None:
    measure(make_run(), tmp_path)
    next(tmp_path.glob("rep03-agentkv-200-10-c2.json")).unlink()
    fake.started.clear()
    fake.jobs.clear()
    told = measure(make_run(), tmp_path)
    assert fake.started == ["agentkv"]
    ((_, job),) = fake.jobs
    assert (shape_of(job), job.load) == (SHAPES[1], LOADS[0])
    assert [before for _, before in told].count(True) == 47


def test_what_has_failed_requests_is_measured_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run(repeats=1)
    figures = load_figures(6, failed=2)
    failing = JobResult(figures, None, {"HTTP 500": 2}, 0, [])
    with monkeypatch.context() as broken:
        broken.setattr(bench, "measure_apart", lambda *_: failing)
        assert all(measured.failed for measured, _ in measure(run, tmp_path))
    told = measure(run, tmp_path)
    assert [(measured.failed, before) for measured, before in told] == [(0, False)] * 12
    assert len(begun_again(tmp_path)) == 12
    assert [before for _, before in measure(run, tmp_path)] == [True] * 12
    assert len(fake.jobs) == 12


def begun_again(path: Path) -> list[str]:
    """Return what was begun more than once, and check that the tables say so."""
    found = [each for each in ServingFolder.read(path).measurements() if each.begun > 1]
    notes = [note for table in serving_tables([path]) for note in table.notes]
    said = " ".join(note for note in notes if note.startswith("begun more than once"))
    assert bool(said) == bool(found)
    assert all(f"{each.arm} {each.load} (1 of 1)" in said for each in found)
    return [each.file_name for each in found]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), KVBenchError("the server is gone")])
def test_an_ended_measurement_leaves_a_trace(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException
) -> None:
    """Or whoever ends the slow ones has an arm that looks fast."""
    run = make_run(repeats=1)

    def sixth_ends(*job: Any) -> JobResult:
        if len(fake.jobs) == 5:
            raise end
        return fake.measure(*job)

    with monkeypatch.context() as broken:
        broken.setattr(bench, "measure_apart", sixth_ends)
        with pytest.raises(type(end)):
            measure(run, tmp_path)
    measure(run, tmp_path)
    assert len(fake.jobs) == 12
    assert begun_again(tmp_path) == ["rep01-full-constrained-100-10-1-s.json"]


@pytest.mark.parametrize("counted", [True, False])
def test_a_removed_or_failed_measurement_leaves_a_trace(
    fake: Fake, tmp_path: Path, counted: bool
) -> None:
    run = make_run(repeats=1)
    measure(run, tmp_path)
    assert begun_again(tmp_path) == []
    path = tmp_path / "rep01-full-100-10-c2.json"
    if counted:
        path.unlink()
        notes = [note for table in serving_tables([tmp_path]) for note in table.notes]
        assert sum(path.name in note and "not there" in note for note in notes) == 4
    else:  # as a version left it that did not count
        (tmp_path / "attempts.json").unlink()
        path.write_text(json.dumps(json.loads(path.read_text()) | load_figures(7, failed=1)))
    measure(run, tmp_path)
    assert len(fake.jobs) == 13
    assert begun_again(tmp_path) == [path.name]
    tables = [table for table in serving_tables([tmp_path]) if SHAPES[0].label in table.title]
    told = [any("full c2 (1 of 1)" in note for note in table.notes) for table in tables]
    assert told == [True, True]  # under load, and at the best load


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({"method_code": "a"}, {"method_code": "b"}, "the code of method agentkv changed"),
        ({"method_code": "a"}, {"method_code": "a"}, ""),
        ({}, {"method_code": "b"}, ""),
        (
            {"calibration": {"sha256": "a"}},
            {"calibration": {"sha256": "b"}},
            "the calibration of method agentkv changed",
        ),
    ],
)
def test_a_method_that_changed_is_not_measured_into_the_same_folder(
    fake: Fake, tmp_path: Path, was: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    fake.about = {"agentkv": was}
    measure(make_run(repeats=1), tmp_path)
    (first, *_) = sorted(tmp_path.glob("rep01-agentkv-*"))
    first.unlink()
    fake.about = {"agentkv": now, "full": {"method_code": "of another method"}}
    if not said:
        assert len(measure(make_run(repeats=1), tmp_path)) == 12
        return
    with pytest.raises(UsageError, match=said):
        measure(make_run(repeats=1), tmp_path)
    assert len(list(tmp_path.glob("rep*.json"))) == 11


def test_what_is_refused_was_not_begun(fake: Fake, tmp_path: Path) -> None:
    fake._context = 20
    with pytest.raises(UsageError, match="has room for 20"):
        measure(make_run(repeats=1), tmp_path)
    assert not (tmp_path / "attempts.json").exists()


@pytest.mark.parametrize("text", ['{"rep01-a.json": "x"}', "[]"])
def test_counts_that_are_none_are_one_line(fake: Fake, tmp_path: Path, text: str) -> None:
    (tmp_path / "attempts.json").write_text(text)
    with pytest.raises(UsageError, match=r"attempts\.json"):
        measure(make_run(repeats=1), tmp_path)
    assert fake.jobs == []


def test_a_second_command_on_a_folder_is_refused(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would disturb what the first measures, and could send a server by URL what it knows."""
    run = make_run(repeats=1)
    refused = []

    def meanwhile(*job: Any) -> JobResult:
        with pytest.raises(LockedError, match=rf"{tmp_path} is being written by pid {os.getpid()}"):
            measure(run, tmp_path)
        refused.append((tmp_path / "attempts.json").read_text())
        return fake.measure(*job)

    monkeypatch.setattr(bench, "measure_apart", meanwhile)
    measure(run, tmp_path)
    assert len(refused) == len(fake.jobs) == 12
    assert begun_again(tmp_path) == []
    assert len(measure(run, tmp_path)) == 12  # the first has let go


def test_what_servers_by_url_may_know_is_never_sent_again(fake: Fake, tmp_path: Path) -> None:
    arms = [ServingArm(name=name, url=f"http://{name}") for name in ("a", "b")]
    run = make_run(arms=arms, engine="url", repeats=1)
    seeds = []
    for folder in ("one", "one", "two"):
        measure(run, tmp_path / folder)
        seeds.append({job.seed for _, job in fake.jobs})
        assert len(seeds[-1]) == 4  # the same for both arms
        fake.jobs.clear()
        for path in (tmp_path / folder).glob("rep*.json"):
            path.unlink()
    assert len(set().union(*seeds)) == 12


def test_by_url_the_arms_of_a_repetition_that_is_gone_on_with_have_the_same_arrivals(
    fake: Fake, tmp_path: Path
) -> None:
    """Of prompts that are drawn anew; another schedule was another load, and was paired."""
    run = make_run(arms=[ServingArm(name="a", url="http://a")], engine="url", repeats=1)
    jobs = []
    for _ in range(2):
        measure(run, tmp_path)
        jobs.append([job for _, job in fake.jobs])
        fake.jobs.clear()
        for path in tmp_path.glob("rep*.json"):
            path.unlink()
    first, again = jobs
    assert [job.arrivals for job in first] == [job.arrivals for job in again]
    assert len({job.arrivals for job in first}) == len(first)
    assert not {job.seed for job in first} & {job.seed for job in again}


def test_an_older_count_of_repetitions_goes_on(fake: Fake, tmp_path: Path) -> None:
    run = make_run(arms=[ServingArm(name="a", url="http://a")], engine="url", repeats=1)
    measure(run, tmp_path)
    sent = {job.seed for _, job in fake.jobs}
    for path in tmp_path.glob("rep*.json"):
        path.unlink()
    (tmp_path / "attempts.json").write_text('{"0": 1}')
    fake.jobs.clear()
    measure(run, tmp_path)
    assert not sent & {job.seed for _, job in fake.jobs}


def test_a_folder_without_a_salt_goes_on_as_it_began(fake: Fake, tmp_path: Path) -> None:
    run = make_run(arms=[ServingArm(name="a", url="http://a")], engine="url", repeats=1)
    measure(run, tmp_path / "new")
    plan = json.loads((tmp_path / "new" / "serving.json").read_text())
    assert plan.pop("salt")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "serving.json").write_text(json.dumps(plan))
    fake.jobs.clear()
    measure(run, tmp_path / "old")
    cells = zip(fake.jobs, [(s, load) for s in SHAPES for load in LOADS], strict=True)
    for (_, job), (shape, load) in cells:
        assert job.seed == bench._seed(0, 0, shape.label, load.label)


def test_every_measurement_says_where_it_was_made(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert fake.jobs == []
    for commit in ("a", "b"):
        monkeypatch.setattr(bench, "environment", lambda _, commit=commit: {"git_commit": commit})
        measure(make_run(repeats=1), tmp_path)
        for path in tmp_path.glob("rep01-full-1*.json"):
            if commit == "a":
                path.unlink()
    found = ServingFolder.read(tmp_path).measurements()
    assert {each.provenance["git_commit"] for each in found} == {"a", "b"}


def by_url(*words: str) -> Any:
    asked = ("bench", "serving", "--url", "a=http://a", "--concurrency", "4", "--sessions", "4")
    return CliRunner().invoke(kvbench, [*asked, "--repeats", "1", "--quiet", "--json", *words])


def test_a_load_test_that_nothing_answered_has_failed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = load_figures(0, failed=12)
    failing = JobResult(figures, None, {"HTTP 500: no": 12}, 0, [])
    words = ("--vocab", "100", "--shape", "100/10", "--out", str(tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(bench, "measure_apart", lambda *_: failing)
        done = by_url(*words)
    assert done.exit_code == 1
    said = "error: no request was answered: a, 100/10, c4: 12 of 12 requests failed: HTTP 500: no"
    assert done.stderr.splitlines()[-1] == said
    assert by_url(*words).exit_code == 0
    assert len(fake.jobs) == 1


def test_what_ids_are_drawn_from_is_part_of_the_plan(fake: Fake, tmp_path: Path) -> None:
    words = ("--shape", "100/10", "--out", str(tmp_path))
    paths = []
    for vocabulary in (
        ("--vocab", "100"),
        ("--vocab", "200"),
        ("--tokenizer", model_path("micro")),
    ):
        done = by_url(*words, *map(str, vocabulary))
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        assert document["plan"]["model"] == "m"  # the server's own, not --model's default
        paths.append(document["path"])
    assert len(set(paths)) == len(fake.jobs) == 3


def test_a_session_longer_than_the_context_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = Fake(context=224)
    monkeypatch.setattr(bench, "serve_arm", small.serve)
    monkeypatch.setattr(bench, "measure_apart", small.measure)
    with pytest.raises(UsageError, match="200/10 in 2 turns has 225 tokens; m has room for 224"):
        measure(make_run(), tmp_path)


def test_methods_are_checked_before_anything_starts() -> None:
    where = {"dtype": "float32", "device": "cpu"}
    arms = engine_arms(
        "embedded", "micro", [("full", None), ("agentkv", Budget(128))], {"interval": "64"}, **where
    )
    assert [arm.name for arm in arms] == ["full", "agentkv 128"]
    assert (arms[0].budget, arms[0].settings) == (None, {})
    assert (arms[1].budget, arms[1].interval) == (128, 64)
    both = [("agentkv", Budget(128)), ("agentkv,interval=32", Budget(128))]
    arms = engine_arms("embedded", "micro", both, {}, **where)
    assert [arm.name for arm in arms] == ["agentkv 128", "agentkv 128 interval=32"]
    for bad, message in (
        (("api", "m", [("full", None)], {}), "takes messages"),
        (("embedded", "micro", [("nosuch", Budget(5))], {}), "nosuch"),
        (("embedded", "micro", [("agentkv", None)], {}), "budget"),
        (("embedded", "micr", [("full", None)], {}), "micro"),
        (("embedded", "micro", [("agentkv", Budget(128))], {"nosuch": "1"}), "nosuch"),
    ):
        with pytest.raises(UsageError, match=message):
            engine_arms(*bad, **where)


def test_servers_are_named() -> None:
    arms = url_arms(["full=http://a:1/v1", "http://b:2/"])
    assert [(arm.name, arm.url) for arm in arms] == [
        ("full", "http://a:1"),
        ("server", "http://b:2"),
    ]
    with pytest.raises(UsageError, match="twice"):
        url_arms(["http://a:1", "http://b:2"])
    with pytest.raises(UsageError, match="expected NAME=URL"):
        url_arms(["a:1"])


def test_a_server_that_does_not_answer_is_one_line() -> None:
    arm = ServingArm(name="server", url="http://127.0.0.1:9")
    with (
        pytest.raises(PrerequisiteError, match="no model server answers"),
        serve_arm(make_run().plan, arm, 1),
    ):
        pass
