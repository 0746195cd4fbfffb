"""What to run: a resolved specification, and the grid a command line stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Capability, spelled_arguments
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.syntax import choose_syntax
from agentbench_kv.registry import load_engine, load_task, make_method, names
from agentbench_kv.results.records import checked
from agentbench_kv.results.run_names import prefix_parts, run_id

ENGINE, MODEL, TASK = "embedded", "micro", "micro/recall-5k"  # where none is named
_LONGEST_S = 366 * 86400  # beyond some such number, waiting for a lock overflows
_RARE = (
    *("task_params", "engine_args", "context_limit", "max_live_tokens", "tool_syntax"),
    *("allow_untested", "calibration", "kv_dtype"),
)
_MOST = {"trials": 10_000, "concurrency": 10_000, "max_tokens": 10**9}


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at a budget, on an engine, model and task, with trials and a seed.

    Everything that can change a figure is here and in the run id; nothing else is.
    """

    engine: str
    model: str
    method: str  # `name` or `name@preset`
    budget: Budget | None  # None for methods without one; what `Budget.parse` reads is taken too
    task: str
    params: dict[str, Any] = field(default_factory=dict)  # all of the method's, with their values
    limit: int | None = None  # first samples only
    trials: int = 1  # attempts per sample
    seed: int = 0  # of samples and sampling
    concurrency: int = 16  # sessions driven at once
    temperature: float = 0.0
    max_tokens: int = 1024  # per assistant message
    timeout_s: float = 3600.0  # per trial
    dtype: str = "float32"
    device: str = "auto"
    task_params: dict[str, Any] = field(default_factory=dict)  # all of the task's
    engine_args: dict[str, str] = field(default_factory=dict)  # for a serving engine's command line
    context_limit: int = 0  # tokens a session may have, where it is not what the model was made for
    max_live_tokens: int = 0  # in the cache at once, over all sessions; 0: what memory holds
    tool_syntax: str = ""  # how the model writes calls, where it is not what its template shows
    allow_untested: bool = False  # another version of a serving engine than the tested one
    kv_dtype: str = ""  # precision of cached rows, where it is not the dtype
    calibration: str = ""  # hash of the statistics the method scores with; see `run.calibration`

    def __post_init__(self) -> None:
        if self.budget is not None:
            object.__setattr__(self, "budget", Budget.parse(self.budget))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> RunSpec:
        """Return the spec that a run has recorded; UsageError for a damaged or a later one."""
        if unknown := sorted(document.keys() - cls.__dataclass_fields__.keys()):
            raise UsageError(
                f"the run's spec has {', '.join(unknown[:3])}, which this version of kvbench does "
                "not know; read it with the version that played it"
            )
        try:
            # A budget is recorded as it is spelled, and checked where it is parsed.
            checked({**document, **dict.fromkeys(document.keys() & {"budget"})}, cls)
        except ValueError as error:
            raise UsageError(
                f"the run's spec is damaged ({error}): take a whole copy of its run.json, or play "
                "it again: kvbench run"
            ) from None
        return cls(**document)

    @property
    def id(self) -> str:
        """The run's directory name."""
        plain = self.document()
        return run_id(prefix_parts(plain), plain)

    def document(self) -> dict[str, Any]:
        """Return the spec as a run records it; what few runs have, only of those.

        `RunSpec.of(document)` is the same spec.
        """
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["budget"] = None if self.budget is None else self.budget.spelled
        return {name: value for name, value in plain.items() if value or name not in _RARE}

    @cached_property
    def built_method(self) -> Method:
        """The method with this run's budget and parameters, built once."""
        return make_method(self.method, self.budget, self.params)

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The method's and the task's parameters that are not the defaults."""
        return {**self.built_method.changed_settings(), **self.changed_task_settings}

    @property
    def changed_task_settings(self) -> dict[str, Any]:
        """The task's parameters that are not the defaults."""
        task = load_task(self.task)
        usual, declared = task.create({}).settings(), task.parameters()
        # What a task fills in says which data is on this machine, and is nobody's choice.
        filled = {k for k, v in usual.items() if k in declared and v != declared[k].default}
        return {
            key: value
            for key, value in self.task_params.items()
            if value != usual.get(key) and key not in filled
        }

    def trial_seed(self, sample: str, trial: int) -> int:
        """Return the seed of one trial: the same for every method, engine and budget."""
        text = f"{self.seed}/{self.task}/{sample}/{trial}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def unresolved(**options: Any) -> RunSpec:
    """Return the spec of options as they are given; None stands for the default."""
    plain = {name: value for name, value in options.items() if value is not None}
    plain = {"engine": ENGINE, "model": MODEL, "task": TASK, "method": "", "budget": None} | plain
    for name in ("tool_syntax", "kv_dtype"):
        plain[name] = plain.get(name, "").replace("auto", "")
    plain.setdefault("concurrency", load_engine(plain["engine"]).at_once)
    return RunSpec(**plain)


def resolve(spec: RunSpec, settings: Mapping[str, str]) -> RunSpec:
    """Check every name and value of a spec and fill in what they resolve to.

    UsageError for anything that cannot run; nothing has been started then.
    """
    check_arguments(spec.engine, spec.engine_args)
    task = load_task(spec.task)
    for name, most in _MOST.items():
        if not 1 <= getattr(spec, name) <= most:
            raise UsageError(f"{name} {getattr(spec, name)}: expected at least 1, at most {most:,}")
    if not 0 <= spec.temperature <= 100:
        raise UsageError(f"temperature {spec.temperature}: expected 0 to 100")
    if not 0 < spec.timeout_s <= _LONGEST_S:
        raise UsageError(f"timeout {spec.timeout_s}: expected seconds above 0, at most a year")
    if spec.limit is not None and spec.limit < 1:
        raise UsageError(f"limit {spec.limit}: expected at least 1 sample")
    if spec.tool_syntax:
        choose_syntax(spec.tool_syntax, "", ())
        if Capability.TEXT in load_engine(spec.engine).capabilities:
            raise UsageError(
                f"--tool-syntax {spec.tool_syntax}: engine {spec.engine!r} reads calls itself"
            )
    check_limits(spec.engine, spec.context_limit, spec.max_live_tokens)
    known = load_engine(spec.engine).kv_dtypes
    if spec.kv_dtype and spec.kv_dtype not in known:
        raise UsageError(
            f"--kv-dtype {spec.kv_dtype}: engine {spec.engine!r} has no such rows; it knows: "
            f"{', '.join(known) or 'none but the dtype'}"
        )
    own = {key: value for key, value in settings.items() if key in task.parameters()}
    rest = {key: value for key, value in settings.items() if key not in own}
    method = make_method(spec.method, spec.budget, rest)
    resolved = replace(
        spec,
        method=method.label,
        budget=spec.budget if method.takes_budget else None,
        params=method.settings(),
        task_params=task.create({**spec.task_params, **own}).settings(),
        engine_args=spelled_arguments(spec.engine_args),
        calibration=spec.calibration if method.needs_calibration else "",
    )
    vars(resolved)["built_method"] = method  # a run builds its method once
    return resolved


def check_arguments(engine: str, given: Mapping[str, str]) -> None:
    """Refuse arguments for an engine that has nothing to pass them to, or is not known.

    They are part of what a run is: ignored, they would make two runs of the same.
    """
    cls = load_engine(engine)
    if given and not cls.takes_arguments:
        takers = [name for name in names("engine") if _takes_arguments(name)]
        raise UsageError(
            f"--engine-arg {next(iter(given))}: engine {engine!r} takes no arguments of its own; "
            f"those that do: {', '.join(takers)}"
        )


def check_limits(engine: str, context_limit: int, max_live_tokens: int) -> None:
    """Refuse sizes of a cache on an engine that has none of its own."""
    if Capability.COMPRESS in load_engine(engine).capabilities:
        return
    for option, value in (("context-limit", context_limit), ("max-live-tokens", max_live_tokens)):
        if value:
            raise UsageError(f"--{option} {value}: engine {engine!r} has no KV cache of its own")


def _takes_arguments(engine: str) -> bool:
    try:
        return bool(load_engine(engine).takes_arguments)
    except KVBenchError:  # a plug-in that does not load
        return False


def default_methods(engine: str, budgets: Sequence[Any]) -> tuple[str, ...]:
    """Return the method to run when none is named.

    AgentKV where a budget is given and the engine can compress, otherwise the whole cache.
    """
    capable = Capability.COMPRESS in load_engine(engine).capabilities
    return ("agentkv",) if capable and budgets else ("full",)


def grid(
    base: RunSpec,
    methods: Sequence[str],
    budgets: Sequence[Budget | None],
    tasks: Sequence[str],
    seeds: Sequence[int],
    settings: Mapping[str, str],
) -> list[RunSpec]:
    """Expand repeated options to runs, in the order given; equal runs appear once.

    A method without a budget (`full`) runs once, not once a budget.
    """
    runs: dict[str, RunSpec] = {}
    for task, seed, method, budget in product(tasks, seeds, methods, budgets):
        one = replace(base, method=method, budget=budget, task=task, seed=seed)
        resolved = resolve(one, settings)
        runs.setdefault(resolved.id, resolved)
    return list(runs.values())
