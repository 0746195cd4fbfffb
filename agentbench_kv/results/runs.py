"""Runs as everybody reads them, and groups of runs that count together.

Identity, figures and scores are derived from the records alone: these are read once and let go,
what was derived of them stays. `summary.json` is never read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_info import RunInfo
from agentbench_kv.results.run_reader import RunReader, latest_trials
from agentbench_kv.results.stats import Scores, pass_k, pass_scores
from agentbench_kv.results.summary import Summary, derive
from agentbench_kv.results.validity import RunState, foresees, remembers, triggered_samples

# Index and seed of one of a sample's trials: two runs that share both played the same.
Trial = tuple[int, int]
# Two figures of each sample's trials, such as right and asked.
Parts = dict[str, dict[Trial, tuple[float, float]]]
SCORE = "score"
# What a session held at most and read, as records call it; bytes over all layers and heads.
SIZES = ("peak_bytes", "bytes_read", "peak_live")
LOGICAL = "logical"  # tokens that a session ever saw, of which `peak_live` is a share
# What a method does not set and scores depend on: only runs alike in it compare.
CONDITIONS = (
    "temperature",
    "max_tokens",
    "timeout_s",
    "dtype",
    "task_params",
    "context_limit",
    "tool_syntax",
)
# What runs of one group may differ in; the budget tells groups of one label apart, and the label
# says the precision of cached rows.
_FREE = frozenset(
    {"seed", "limit", "trials", "concurrency", "max_live_tokens", "budget", "kv_dtype"}
)


@dataclass(frozen=True)
class Setting:
    """Where methods compete: task, model (last part of its path) and engine."""

    task: str
    model: str
    engine: str

    @property
    def null(self) -> bool:
        """Whether its runs are of the agent that does nothing: what a task gives for free."""
        return self.engine == "scripted" and self.model == "null"


@dataclass(frozen=True)
class Problem:
    """A folder that could not be read as a run, or a line of one that was not understood."""

    path: Path
    reason: str


class Run:
    """One run: its spec, what was derived of its records, and how to read them again."""

    def __init__(
        self,
        path: Path,
        info: RunInfo,
        records: Sequence[TrialRecord],
        summary: Summary,
        read: Callable[[], list[TrialRecord]],
    ) -> None:
        self.path = path  # the run directory; of a run in a baseline, the file and the run's id
        self.info = info
        self.summary = summary
        self.budget: int | str | None = summary.budget
        self._read = read
        _ = self.tokens  # a budget nobody can read is this run's problem, not that of all
        # Headline score of each sample's trials; a failed trial counts 0.
        self.scores: dict[str, dict[Trial, float]] = {}
        # Group of each sample that belongs to one (LoCoMo: the conversation).
        self.clusters = {r.sample_id: r.cluster for r in records if r.cluster is not None}
        # What each trial was asked: its first prompt, and the recorded session it was asked about.
        self.prompts = {
            record.key: f"{record.prompt_sha}{record.metrics.get('session_sha', '')}"
            for record in records
            if record.prompt_sha is not None
        }
        # Hash of the system message of each session that `kvbench fidelity` played.
        self.systems = {
            record.sample_id: str(found)
            for record in records
            if (found := record.metrics.get("system_sha")) is not None
        }
        # Each of `SIZES`, and `LOGICAL`, of each sample's trials that reached the engine.
        self.sizes: dict[str, dict[str, list[int]]] = {name: {} for name in (*SIZES, LOGICAL)}
        # Sub-score to right and asked of each sample's trials, by index and seed as scores are.
        self.counts: dict[str, Parts] = {}
        # Mean without bounds to total and count of each sample's trials.
        self.means: dict[str, Parts] = {}
        self.failed: Counter[str] = Counter()  # failed trials of each sample
        # Failed trials that do not say what was asked.
        self.uncounted: dict[str, set[Trial]] = {}
        # Past sessions that came from files, by sample and trial: of trials that read a past, and
        # were not tried again, which goes on behind what was read before.
        self.from_files: dict[tuple[str, int], int] = {}
        self.triggered = triggered_samples(records)
        self.fired = Counter(record.sample_id for record in records if record.kv.events)  # trials
        self.busy_s = sum(record.timing.e2e_s or 0.0 for record in records)  # of all trials
        for record in records:
            self._count(record)

    def _count(self, record: TrialRecord) -> None:
        sample, trial = record.sample_id, (record.trial, record.seed)
        self.scores.setdefault(sample, {})[trial] = record.headline
        if record.kv.peak_live:
            for name, sizes in self.sizes.items():
                size = getattr(record.kv, name)
                if name == "bytes_read":  # what a method asks by itself reads, too
                    size += record.kv.auxiliary_bytes_read
                sizes.setdefault(sample, []).append(size)
        found = record.sub_scores
        if isinstance(record.metrics.get("ingest_s"), int | float) and record.attempts == 1:
            self.from_files[record.key] = int(record.metrics.get("ingest_files") or 0)
        self.failed[sample] += record.score is None
        if record.score is None and not found:
            self.uncounted.setdefault(sample, set()).add(trial)
        for known, pairs in ((self.counts, found), (self.means, record.means)):
            for name, pair in pairs.items():
                known.setdefault(name, {}).setdefault(sample, {})[trial] = pair

    def records(self) -> list[TrialRecord]:
        """Read the record that counts for each (sample, trial) again, sorted by key."""
        return sorted(self._read(), key=lambda record: record.key)

    @property
    def run_id(self) -> str:
        return self.info.run_id

    @property
    def spec(self) -> dict[str, Any]:
        return self.info.spec

    @property
    def method(self) -> str:
        """`name` or `name@preset`, and the precision of cached rows where it is another.

        So that nothing quantised is taken for the `full` that others are measured by.
        """
        name, precision = self.summary.method or "?", self.spec.get("kv_dtype")
        if not precision:
            return name
        return f"{name} kv={precision}" + " simulated" * (self.summary.engine == "embedded")

    @cached_property
    def tokens(self) -> int | None:
        """The budget in tokens; a share counts by the median session's length."""
        if self.budget is None:
            return None
        logical = self.summary.kv.median_logical if self.summary.kv else 0
        return Budget.parse(self.budget).at(int(logical))

    @property
    def compressed(self) -> bool:
        """Whether the method takes a budget: one that keeps everything has none in its spec."""
        return self.budget is not None

    @cached_property
    def label(self) -> str:
        """The method, and in parentheses the parameters that a `--set` changed."""
        changed = self.info.provenance.get("changed_settings")
        if not isinstance(changed, dict) or not changed:
            return self.method
        settings = ", ".join(f"{name}={value}" for name, value in sorted(changed.items()))
        return f"{self.method} ({settings})"

    @property
    def sessions(self) -> int:
        """How many trials reached the engine."""
        return sum(map(len, self.sizes["peak_live"].values()))

    def unsized(self, name: str) -> int:
        """Count the sessions whose record does not have a size: 0 bytes are unknown, not none."""
        found = [size for sizes in self.sizes[name].values() for size in sizes]
        # Of what is read, a session of one-token answers has none; an engine that counts, some.
        return 0 if name == "bytes_read" and any(found) else found.count(0)

    @cached_property
    def setting(self) -> Setting:
        model = (self.summary.model or "?").rstrip("/").rsplit("/", 1)[-1]
        return Setting(self.summary.task or "?", model, self.summary.engine or "?")

    @property
    def valid(self) -> bool:
        """Whether the run may be ranked, as far as its own records tell."""
        return self.summary.validity.state is RunState.VALID

    @property
    def reason(self) -> str | None:
        validity = self.summary.validity
        return None if self.valid else f"{validity.state.value}: {'; '.join(validity.reasons)}"

    @property
    def remembers(self) -> bool:
        """Whether its method has a memory of past sessions."""
        return remembers(self.spec, self.info.provenance)

    @property
    def foresees(self) -> bool:
        """Whether its method was told what its sessions still need."""
        return foresees(self.spec, self.info.provenance)

    @property
    def in_flight(self) -> float | None:
        """Sessions driven at once, on average while trials were played."""
        wall = self.info.wall_s
        return self.busy_s / wall if self.busy_s and wall > 0 else None


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[Problem]]:
    """Load every run at or directly below the given paths.

    Sorted by task, model, engine, method, budget and seed; with the folders and lines that were
    skipped. A UsageError if a path does not exist or there is no run in all of them.
    """
    runs: list[Run] = []
    problems: list[Problem] = []
    wanted = list(paths)
    for folder in run_folders(wanted):
        try:
            run = load_run(folder)
        except (UsageError, OSError, ValueError) as error:
            problems.append(Problem(folder, " ".join(str(error).split())))
            continue
        runs.append(run)
        notes = (note for note in run.summary.notes if note.startswith("samples.jsonl"))
        problems += [Problem(folder, note) for note in notes]
    if not runs:
        places = ", ".join(map(str, wanted))
        why = f" ({problems[0].path}: {problems[0].reason})" if problems else ""
        raise UsageError(f"no run in {places}{why}; kvbench run writes one")

    def order(run: Run) -> tuple[Any, ...]:
        place = (*astuple(run.setting), run.compressed, run.label)
        return (*place, run.tokens or 0, run.summary.seed or 0, run.run_id)

    return sorted(runs, key=order), problems


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories at or directly below some paths, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist; name a run directory or a folder of runs")
        inside = sorted(each.parent for each in path.glob("*/run.json")) if path.is_dir() else []
        own = [path] if (path / "run.json").is_file() else []
        found |= dict.fromkeys([*own, *inside])
    return list(found)


def load_run(folder: Path) -> Run:
    """Load one run; a folder that is none, or whose record makes no sense, is a UsageError."""
    reader = RunReader(folder)
    info, lines = reader.info, reader.trial_lines()
    records = latest_trials(lines.records)
    return Run(folder, info, records, derive(info, lines), reader.trials)


@dataclass(frozen=True)
class RunGroup:
    """Runs of one method, settings and budget in one setting, at least one, earliest first.

    Two runs that share the index and seed of a sample's trial played the same one: the earliest
    counts.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The earliest run, whose identity is that of all."""
        return self.runs[0]

    @property
    def budget(self) -> int | str | None:
        return self.first.budget

    @property
    def compressed(self) -> bool:
        """Whether it competes at a budget."""
        return self.first.compressed

    @property
    def holds_less(self) -> bool:
        """Whether it competes by memory: it has a budget, or its rows take fewer bytes."""
        return self.compressed or bool(self.first.spec.get("kv_dtype"))

    @property
    def method(self) -> str:
        """The method's name without preset and settings, with the precision of its rows."""
        name, kv, precision = self.first.method.partition(" kv=")
        return name.partition("@")[0] + kv + precision

    @property
    def name(self) -> str:
        return self.label if self.budget is None else f"{self.label} at {self.budget}"

    @property
    def measured(self) -> list[Run]:
        """Its runs as repetitions of a speed: a copy of a run is none."""
        return list({(run.run_id, run.info.created): run for run in self.runs}.values())

    def fired(self, samples: Collection[str] = ()) -> float:
        """Return the share of its trials, of some samples or of all, that had an event."""
        pairs = [(run, each) for run in self.runs for each in samples or run.scores]
        trials = sum(len(run.scores.get(sample, ())) for run, sample in pairs)
        return sum(run.fired[sample] for run, sample in pairs) / trials if trials else 0.0

    @cached_property
    def triggered(self) -> set[str]:
        return set().union(*(run.triggered for run in self.runs))

    def sizes(self, name: str) -> dict[str, list[int]]:
        """Return a size of each sample's trials that reached the engine, of all runs.

        Empty if a session of any run does not say: a mean over the others would be of others.
        """
        found: dict[str, list[int]] = {}
        if any(run.unsized(name) for run in self.runs):
            return found
        for run in self.runs:
            for sample, sizes in run.sizes[name].items():
                found.setdefault(sample, []).extend(sizes)
        return found

    @cached_property
    def clusters(self) -> dict[str, str]:
        return {name: group for run in self.runs for name, group in run.clusters.items()}

    @cached_property
    def trials(self) -> dict[str, list[float]]:
        found: dict[str, dict[Trial, float]] = {}
        for run in self.runs:
            for sample, scores in run.scores.items():
                found[sample] = {**scores, **found.get(sample, {})}
        return {sample: list(scores.values()) for sample, scores in found.items()}

    @property
    def repeated(self) -> int:
        """Trials that more than one of the runs played; all but the earliest are left out."""
        played = sum(len(scores) for run in self.runs for scores in run.scores.values())
        return played - sum(map(len, self.trials.values()))

    def scores(
        self, metric: str = SCORE, asked: Mapping[str, float] | None = None
    ) -> Scores | None:
        """Return a score, `pass^k` or sub-score sample by sample; None if no run has it.

        `asked` is what a trial of a sample is asked, for failed trials that do not say: nothing
        was right.
        """
        k = pass_k(metric)
        if metric == SCORE:
            return Scores.of_trials(self.trials, self.clusters)
        if k is not None:
            found = pass_scores(self.trials, k, self.clusters)
            return found if found.parts else None
        counts = self._sums(lambda run: run.counts.get(metric, {}), asked or {})
        return Scores.of_counts(counts, self.clusters) if counts else None

    def means(self, metric: str) -> Scores | None:
        """Return total and count of a mean without bounds by sample; None if no run has it.

        Samples whose trials all failed have none.
        """
        totals = self._sums(lambda run: run.means.get(metric, {}), {})
        return Scores.of_counts(totals, self.clusters) if totals else None

    def _sums(
        self, parts: Callable[[Run], Parts], asked: Mapping[str, float]
    ) -> dict[str, tuple[float, float]]:
        """Add up two figures over each sample's trials; a run counts for those it was first at."""
        sums: dict[str, tuple[float, float]] = {}
        seen: set[tuple[str, Trial]] = set()
        for run in self.runs:
            own = parts(run)
            for sample, trial in ((name, each) for name in run.scores for each in run.scores[name]):
                pair = own.get(sample, {}).get(trial)
                if pair is None and sample in asked and trial in run.uncounted.get(sample, ()):
                    pair = (0.0, asked[sample])
                if pair is not None and (sample, trial) not in seen:
                    old = sums.get(sample, (0.0, 0.0))
                    sums[sample] = (old[0] + pair[0], old[1] + pair[1])
                seen.add((sample, trial))
        return sums


def grouped(runs: Iterable[Run]) -> list[RunGroup]:
    """Put the runs of one setting together that only differ in seed and amount."""
    known = list(runs)
    groups: dict[tuple[str, Any], list[Run]] = {}
    for run, name in zip(known, variants(known), strict=True):
        groups.setdefault((name, run.budget), []).append(run)
    return [
        RunGroup(name, tuple(sorted(same, key=lambda run: (run.info.created, run.run_id))))
        for (name, _), same in groups.items()
    ]


def variants(runs: Sequence[Run]) -> list[str]:
    """Name each run: its label, and in brackets what sets it apart from others so labelled."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(_fixed(run))
    return [_variant(run, by_label[run.label]) for run in runs]


def by_setting(runs: Iterable[Run]) -> dict[Setting, list[Run]]:
    """Sort runs by task, model and engine, in the order they come."""
    settings: dict[Setting, list[Run]] = {}
    for run in runs:
        settings.setdefault(run.setting, []).append(run)
    return settings


def asked_once(groups: Iterable[RunGroup], metric: str) -> dict[str, float]:
    """Return what one trial of a sample is asked of a sub-score, from any run that says so."""
    found: dict[str, float] = {}
    for run in chain.from_iterable(group.runs for group in groups):
        for sample, pairs in run.counts.get(metric, {}).items():
            asked = sum(each for _, each in pairs.values())
            counted = len(run.scores[sample]) - len(run.uncounted.get(sample, ()))
            if counted > 0 and asked:
                found.setdefault(sample, asked / counted)
    return found


def budget_order(budget: int | str | None) -> tuple[int, float]:
    """Sort key: none first, then tokens, then shares, then what is no budget."""
    if budget is None:
        return (0, 0.0)
    try:
        parsed = Budget.parse(budget)
    except UsageError:
        return (3, 0.0)
    return (1, float(parsed.tokens or 0)) if parsed.share is None else (2, parsed.share)


def _variant(run: Run, others: Sequence[dict[str, Any]]) -> str:
    apart = [
        f"{name}={value}"
        for name, value in sorted(_fixed(run).items())
        if any(other.get(name, value) != value for other in others)
        or (name.startswith("params.") and any(name not in other for other in others))
    ]
    return f"{run.label} [{', '.join(apart)}]" if apart else run.label


def _fixed(run: Run) -> dict[str, Any]:
    spec = dict(run.spec)
    params = spec.pop("params", None)
    # Runs of 0.1 do not say what they were calibrated on, so they are no repeats of those that do.
    spec["calibration"] = str(spec.get("calibration") or "unknown")[:12]
    flat = {name: value for name, value in spec.items() if name not in _FREE}
    changed = params if isinstance(params, dict) and run.label == run.method else {}
    return flat | {f"params.{name}": value for name, value in changed.items()}
