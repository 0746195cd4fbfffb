"""Whether a task works: agents of known score, complete records, no leaks, nothing played twice.

What `kvbench selftest task` runs; a plug-in's own tests call it the same way. The agents go through
the same runner, gateway, sessions and records as a model.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentbench_kv.adapters.base import SCRIPTED_AGENTS, ScriptedAgent, Task
from agentbench_kv.conformance import CheckResult, guarded
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.registry import load_task
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunStore
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.run.trial import sample_key

DEFAULT_LIMIT = 5
_LONGEST_ID = 256
_SHOWN = 3


class _StoppedError(Exception):
    """A run interrupted on purpose."""


@dataclass(frozen=True)
class _Plan:
    """What all runs of the suite have in common."""

    base: RunSpec  # unresolved
    settings: Mapping[str, str]
    out: Path

    def spec(self, agent: ScriptedAgent, trials: int = 1) -> RunSpec:
        return resolve(replace(self.base, model=agent, trials=trials), self.settings)

    def create_task(self) -> Task:
        return load_task(self.base.task).create(self.spec("gold").task_params)

    def run(self, agent: ScriptedAgent, folder: str, trials: int = 1) -> RunReader:
        spec = self.spec(agent, trials)
        run_one(spec, self.out / folder, lambda *_: None)
        return RunStore(self.out / folder).find(spec.id)


def suite_task(name: str, settings: Mapping[str, str]) -> str:
    """Return the task whose suite proves this one: itself, or its stand-in (`Task.stand_in`)."""
    return load_task(name).stand_in(settings) or name


def task_suite(
    task: str,
    *,
    limit: int | None = DEFAULT_LIMIT,
    settings: Mapping[str, str] | None = None,
    concurrency: int = 8,
) -> dict[str, list[CheckResult]]:
    """Run every check there is on one task.

    Of its first `limit` samples, all if None; `settings` are the task's, as text; `concurrency`
    sessions are driven at once. A part that raises is one failed result. UsageError or
    PrerequisiteError if there is no such task, or its environment or data are missing.
    """
    with tempfile.TemporaryDirectory(prefix="kvbench-selftest-") as folder:
        base = RunSpec("scripted", "gold", "full", None, task, limit=limit, concurrency=concurrency)
        plan = _with_longest_answer(_Plan(base, settings or {}, Path(folder)))
        parts = (_check_samples, _check_gold, _check_corrupt, _check_null, _check_resume)
        missing = (UsageError, PrerequisiteError)
        names = ("samples", "gold", "corrupt", "null", "resume")
        found = (guarded(partial(check, plan), missing) for check in parts)
        return dict(zip(names, found, strict=True))


def _with_longest_answer(plan: _Plan) -> _Plan:
    """Return the plan with answers long enough for everything that the known agents say."""
    task = plan.create_task()
    try:
        samples = task.samples(plan.base.limit, 0)
        texts = (
            t for agent in SCRIPTED_AGENTS for each in samples for t in task.script(each, agent)
        )
        # No tokenizer makes more tokens of a text than it has bytes; one more ends the answer.
        longest = max((len(text.encode()) for text in texts), default=0) + 1
    except (UsageError, PrerequisiteError):
        raise
    except Exception:  # noqa: BLE001  the checks meet it again, and say so
        return plan
    finally:
        task.close()
    return replace(plan, base=replace(plan.base, max_tokens=max(longest, plan.base.max_tokens)))


def _check_samples(plan: _Plan) -> list[CheckResult]:
    task = plan.create_task()
    try:
        first, again = task.samples(plan.base.limit, 0), task.samples(plan.base.limit, 0)
        fewer = task.samples(max(len(first) - 1, 1), 0)
    finally:
        task.close()
    ids = [sample.id for sample in first]
    twice = [name for name, count in Counter(map(sample_key, ids)).items() if count > 1]
    unsafe = [repr(name) for name in ids if not _safe(name)]
    right_count = bool(first) and (plan.base.limit is None or len(first) <= plan.base.limit)
    return [
        CheckResult("there are samples, no more than asked for", right_count, str(len(ids))),
        CheckResult("two calls give the same samples", first == again),
        CheckResult("fewer are the first ones", fewer == first[: len(fewer)]),
        _none("ids are unique", twice),
        _none("ids are short, printable texts", unsafe),
    ]


def _safe(name: object) -> bool:
    plain = isinstance(name, str) and name.isprintable() and name == name.strip()
    return plain and 0 < len(str(name)) <= _LONGEST_ID


def _check_gold(plan: _Plan) -> list[CheckResult]:
    """Two trials of each sample: the second finds what the first left behind."""
    run = plan.run("gold", "runs", trials=2)
    trials = run.trials()
    outcomes = defaultdict(set)
    for trial in trials:
        outcomes[trial.sample_id].add((trial.status, trial.score))
    differing = [sample for sample, found in outcomes.items() if len(found) > 1]
    return [
        _none("gold scores 100 %", _wrong(trials, 1.0), f"{len(trials)} trials"),
        _none("a second pass gives the same", differing),
        *_check_records(run, trials, 2),
    ]


def _check_records(
    run: RunReader, trials: Sequence[TrialRecord], per_sample: int
) -> list[CheckResult]:
    turns = Counter(turn.key for turn in run.turns())
    counts = Counter(trial.sample_id for trial in trials)
    resets = [t.sample_id for t in trials if t.session_resets]
    incomplete = [t.sample_id for t in trials if not _complete(run, t, turns[t.key])]
    missing = [name for name, count in counts.items() if count != per_sample]
    return [
        _none("every trial has one record", missing, f"{len(trials)} records"),
        _none("records are complete", incomplete, "turns, usage, prompt hash, transcript"),
        _none("no session is reset", resets, "0 resets"),
    ]


def _complete(run: RunReader, trial: TrialRecord, turns: int) -> bool:
    transcript = run.path / (trial.transcript or "")
    counted = turns == trial.usage.requests > 0 and trial.kv.logical > 0
    return bool(counted and trial.prompt_sha and transcript.is_file())


def _check_corrupt(plan: _Plan) -> list[CheckResult]:
    declared = load_task(plan.base.task).corrupt_score
    trials = plan.run("corrupt", "runs").trials()
    if declared is None:
        return _check_below_gold(trials, plan.base.limit is None)
    wrong = _wrong(trials, declared)
    return [_none(f"corrupt scores {declared:g} as built", wrong, _mean(trials))]


def _check_below_gold(trials: Sequence[TrialRecord], whole: bool) -> list[CheckResult]:
    """Demand less than gold of the whole set: in some samples what is corrupted does not matter."""
    scored = _none("corrupt is scored", [_describe(t) for t in trials if t.score is None])
    name, low = "corrupt scores less than gold", any(trial.score != 1.0 for trial in trials)
    if not low and not whole:
        why = "these few samples cannot tell: all keep their points; --full can"
        return [scored, CheckResult(name, True, why, skipped=True)]
    return [scored, CheckResult(name, low, _mean(trials))]


def _check_null(plan: _Plan) -> list[CheckResult]:
    """Measure the floor, demand nothing: some tasks are right to reward doing nothing."""
    trials = plan.run("null", "runs").trials()
    broken = [_describe(trial) for trial in trials if trial.score is None and trial.error]
    return [_none("null comes to an end", broken, f"floor: {_mean(trials)}")]


def _check_resume(plan: _Plan) -> list[CheckResult]:
    """Interrupt a run and go on with it; then ask for it again when it is complete."""
    # One session at a time, or a few samples would all be under way when the first has ended.
    width = 1 if plan.base.limit is not None else plan.base.concurrency
    spec, out = replace(plan.spec("gold"), concurrency=width), plan.out / "resumed"
    ended: list[str] = []

    def stop(_: RunSpec, done: int, expected: int, ended: TrialRecord | str | None) -> None:
        if isinstance(ended, TrialRecord) and 0 < done < expected:
            raise _StoppedError

    def record_end(_: RunSpec, _done: int, _all: int, record: TrialRecord | str | None) -> None:
        if isinstance(record, TrialRecord):
            ended.append(record.sample_id)

    with suppress(_StoppedError):
        run_one(spec, out, stop)
    first = RunStore(out).find(spec.id).trials()
    before = {trial.sample_id for trial in first if trial.finished}
    run_one(spec, out, record_end)
    resumed, wanted = list(ended), RunStore(out).find(spec.id).trials()
    run_one(spec, out, record_end)
    played = Counter([*before, *resumed])
    # One trial has begun for each that has ended by the time the run hears of it.
    few = len(wanted) <= 2 * width
    return [
        _none("nothing is played twice", [name for name, n in played.items() if n > 1],
              f"{len(before)} before, {len(resumed)} after the interruption"),
        CheckResult("the interruption came in between", bool(resumed) or few),
        CheckResult("nothing is lost", set(played) == {trial.sample_id for trial in wanted}),
        _none("gold scores 100 % again", _wrong(wanted, 1.0)),
        _none("a complete run plays nothing", ended[len(resumed) :]),
    ]  # fmt: skip


def _mean(trials: Sequence[TrialRecord]) -> str:
    if not trials:
        return "no trials"
    return f"{statistics.fmean(trial.headline for trial in trials):.1%} over {len(trials)}"


def _wrong(trials: Sequence[TrialRecord], expected: float) -> list[str]:
    return [_describe(trial) for trial in trials if trial.score != expected]


def _describe(trial: TrialRecord) -> str:
    reason = (trial.error or "").strip().splitlines()
    said = f" ({reason[-1][:120]})" if reason else ""
    return f"{trial.sample_id}: {trial.status} {trial.score}{said}"


def _none(name: str, problems: Sequence[str], detail: str = "") -> CheckResult:
    """Make a check that holds if there are no problems; it names the first few."""
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return CheckResult.unless("; ".join(problems[:_SHOWN]) + more, name, detail)
