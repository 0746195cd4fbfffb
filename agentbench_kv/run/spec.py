"""What to run: a resolved specification, and the grid a command line stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import load_engine, load_task, make_method
from agentbench_kv.results.store import prefix_parts, run_id


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at a budget, on an engine, model and task, with trials and a seed.

    Everything that can change a figure is here and in the run id; nothing else is.

    Attributes
    ----------
    method : str
        `name` or `name@preset`.
    budget : int, str or None
        Tokens per (layer, KV head), or a share of the logical length such as `25%`; None for
        methods without one.
    params, task_params : dict
        Every parameter of the method, and of the task, with its value.
    limit : int or None
        First samples only.
    trials : int
        Attempts per sample.
    seed : int
        Seed of samples and sampling.
    concurrency : int
        Sessions driven at once.
    max_tokens : int
        Most tokens per assistant message.
    timeout_s : float
        Most seconds per trial.
    engine_args : dict
        Options passed on to a serving engine's own command line.
    allow_untested : bool
        Whether another version of a serving engine than the tested one was let in.
    """

    engine: str
    model: str
    method: str
    budget: int | str | None
    task: str
    params: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    trials: int = 1
    seed: int = 0
    concurrency: int = 16
    temperature: float = 0.0
    max_tokens: int = 1024
    timeout_s: float = 3600.0
    dtype: str = "float32"
    device: str = "auto"
    task_params: dict[str, Any] = field(default_factory=dict)
    engine_args: dict[str, str] = field(default_factory=dict)
    allow_untested: bool = False

    @property
    def id(self) -> str:
        """The run's directory name."""
        plain = self.document()
        return run_id(prefix_parts(plain), plain)

    def document(self) -> dict[str, Any]:
        """Return the spec as a run records it; what few runs have, only of those."""
        plain = asdict(self)
        for rare in ("task_params", "engine_args", "allow_untested"):
            if not plain[rare]:
                del plain[rare]
        return plain

    def make_method(self) -> Method:
        """Build the method with this run's budget and parameters."""
        return make_method(self.method, self.budget, self.params)

    def trial_seed(self, sample: str, trial: int) -> int:
        """Return the seed of one trial: the same for every method, engine and budget."""
        text = f"{self.seed}/{self.task}/{sample}/{trial}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def resolve(spec: RunSpec, settings: Mapping[str, str]) -> RunSpec:
    """Check every name and value of a spec and fill in what they resolve to.

    Raises
    ------
    UsageError
        For anything that cannot run; nothing has been started then.
    """
    check_arguments(spec.engine, spec.engine_args)
    task = load_task(spec.task)
    for name, low in (("trials", 1), ("concurrency", 1), ("max_tokens", 1)):
        if getattr(spec, name) < low:
            raise UsageError(f"{name} {getattr(spec, name)}: expected at least {low}")
    if not 0 <= spec.temperature <= 100:
        raise UsageError(f"temperature {spec.temperature}: expected 0 to 100")
    if not 0 < spec.timeout_s < inf:
        raise UsageError(f"timeout {spec.timeout_s}: expected seconds above 0")
    if spec.limit is not None and spec.limit < 1:
        raise UsageError(f"limit {spec.limit}: expected at least 1 sample")
    own = {key: value for key, value in settings.items() if key in task.parameters()}
    rest = {key: value for key, value in settings.items() if key not in own}
    method = make_method(spec.method, spec.budget, rest)
    return replace(
        spec,
        method=method.label,
        budget=spec.budget if method.compresses else None,
        params=method.settings(),
        task_params=task.create({**spec.task_params, **own}).settings(),
    )


def check_arguments(engine: str, given: Mapping[str, str]) -> None:
    """Refuse arguments for an engine that has nothing to pass them to, or is not known.

    They are part of what a run is: ignored, they would make two runs of the same.
    """
    cls = load_engine(engine)
    if given and not cls.takes_arguments:
        raise UsageError(
            f"--engine-arg {next(iter(given))}: engine {engine!r} has no command line of its own; "
            "those of vllm and sglang take such options"
        )


def default_methods(engine: str) -> tuple[str, ...]:
    """Return the method to run when none is named: AgentKV where the engine can compress."""
    capable = Capability.COMPRESS in load_engine(engine).capabilities
    return ("agentkv",) if capable else ("full",)


def grid(
    base: RunSpec,
    methods: Sequence[str],
    budgets: Sequence[int | str | None],
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
