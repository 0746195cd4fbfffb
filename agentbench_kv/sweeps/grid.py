"""From a sweep's file to its runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.run.spec import RunSpec, default_methods, resolve, unresolved
from agentbench_kv.sweeps.config import OPTION_NAMES, RunGrid, RunOptions, SweepFile

MOST_RUNS = 10_000
LOADED = 5  # first parts of `warm`: the model with what it was loaded for
_FIELDS = {
    "timeout": "timeout_s",
    "engine-arg": "engine_args",
    "allow-untested-engine": "allow_untested",
}
_SETTINGS = ("set", "engine-arg")
# What a worker must load anew when it changes varies slowest, what only changes the method last.
_FIRST = ("engine", "model", "dtype", "device", "context-limit")
_LAST = ("task", "seed", "method", "budget", "set")
_ORDER = (*_FIRST, *(each for each in OPTION_NAMES if each not in (*_FIRST, *_LAST)), *_LAST)


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep, and what it needs of a machine."""

    spec: RunSpec
    cpus: int = 1
    gpus: int = 0

    @property
    def name(self) -> str:
        return self.spec.id

    @property
    def needs(self) -> tuple[int, int]:
        return (self.cpus, self.gpus)

    @property
    def warm(self) -> tuple[str, ...]:
        """What a worker has loaded that played this run last; alike runs follow each other."""
        spec = self.spec
        model = (spec.engine, spec.model, spec.dtype, spec.device, str(spec.context_limit))
        server = (spec.concurrency, spec.max_live_tokens, sorted(spec.engine_args.items()))
        return (*model, spec.kv_dtype, *map(str, server), spec.method.partition("@")[0])


def jobs_of(sweep: SweepFile, instead: Mapping[str, Any]) -> list[SweepRun]:
    """Expand a sweep to resolved runs, equal ones once; `instead` replaces options of all grids.

    UsageError for what no run can be, too many runs, and exclusions that exclude nothing.
    """
    grids = [(each, {**each.given(), **instead}) for each in sweep.runs]
    count = sum(_size(options) for _, options in grids)
    if count > MOST_RUNS:
        raise UsageError(f"the sweep has {count:,} runs; expected at most {MOST_RUNS:,}")
    found: dict[str, SweepRun] = {}
    used = [False] * len(sweep.exclude)
    for grid, options in grids:
        for point in _points(options):
            matched = [_matches(each, point) for each in sweep.exclude]
            used = [was or now for was, now in zip(used, matched, strict=True)]
            if not any(matched):
                job = _job(grid, point)
                found.setdefault(job.name, job)
    for number, each in enumerate(used):
        if not each:
            raise UsageError(f"exclude[{number}] matches no run; mend it or take it out")
    if not found:
        raise UsageError("nothing to run: every run is excluded")
    return _alike_together(list(found.values()))


def _job(grid: RunGrid, point: Mapping[str, Any]) -> SweepRun:
    return SweepRun(resolve(_spec(point), point.get("set", {})), grid.cpus, grid.gpus)


def _spec(point: Mapping[str, Any]) -> RunSpec:
    fields = {_FIELDS.get(name, name.replace("-", "_")): value for name, value in point.items()}
    fields.pop("set", None)
    return unresolved(**fields)


def _alike_together(jobs: Sequence[SweepRun]) -> list[SweepRun]:
    """Order runs so that those that load the same follow each other, else as they come."""
    first: dict[tuple[str, ...], int] = {}
    for number, job in enumerate(jobs):
        for length in (LOADED, len(job.warm)):
            first.setdefault(job.warm[:length], number)
    return sorted(jobs, key=lambda job: (first[job.warm[:LOADED]], first[job.warm]))


def _size(options: Mapping[str, Any]) -> int:
    return math.prod(
        math.prod(map(len, values.values())) if name in _SETTINGS else len(values)
        for name, values in options.items()
    )


def _points(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every point of a grid: one value for each option."""
    if "method" not in options:
        spec = unresolved(engine=options.get("engine", [None])[0])
        methods = list(default_methods(spec.engine, options.get("budget", ())))
        options = {**options, "method": methods}
    names = [name for name in _ORDER if name in options]
    axes = [
        list(_combinations(options[name])) if name in _SETTINGS else options[name] for name in names
    ]
    for values in product(*axes):
        yield dict(zip(names, values, strict=True))


def _combinations(settings: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    for values in product(*settings.values()):
        yield dict(zip(settings, values, strict=True))


def _matches(excluded: RunOptions, point: Mapping[str, Any]) -> bool:
    """Whether a point has one of the values of every option that an exclusion names."""
    spec = _spec(point)
    for name, wanted in excluded.given().items():
        if name in _SETTINGS:
            held: Mapping[str, str] = point.get(name, {})
            if not all(held.get(key) in values for key, values in wanted.items()):
                return False
        else:
            field = _FIELDS.get(name, name.replace("-", "_"))
            known = [getattr(_spec({name: each}), field) for each in wanted]
            if name == "budget":
                known = [Budget.parse(each) for each in wanted]
            if getattr(spec, field) not in known:
                return False
    return True
