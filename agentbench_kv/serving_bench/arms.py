"""What is measured: an engine with a method, started here, or a server by URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Capability, EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import load_engine, make_method, split_settings
from agentbench_kv.run.engines import check_pair
from agentbench_kv.run.recordings import refuse_unplayable
from agentbench_kv.serving_bench.measurements import ServingArm


def engine_arms(
    engine: str,
    model: str,
    arms: Sequence[tuple[str, Budget | None]],
    settings: Mapping[str, str],
    *,
    dtype: str,
    device: str,
    dummy: bool = False,
    kv_dtypes: Sequence[str] = ("",),
    messages: bool = False,
) -> list[ServingArm]:
    """Check methods and budgets against an engine, before anything starts.

    Settings go to the methods with a budget; `dummy` asks for random weights; `messages` are what
    is sent, so that a method may drop some. Every arm comes at each precision of cached rows, but
    for the base that only differs in flags. A UsageError or PrerequisiteError for a pair that
    cannot run, or an engine that takes no token ids.
    """
    cls = load_engine(engine)
    if Capability.TEXT in cls.capabilities:
        raise UsageError(f"engine {engine!r} takes messages, and this sends token ids")
    if dummy and not issubclass(cls, ServingEngine):
        raise UsageError(f"engine {engine!r} loads real weights only; leave --load-format away")
    cls.check_model(model)
    cls.check_compute(dtype, device)
    made: dict[str, ServingArm] = {}
    for kv_dtype, (name, budget) in product(kv_dtypes, arms):
        if kv_dtype and name == "full-constrained":
            continue
        method = make_method(name, budget, _own(name, budget, settings))
        refuse_unplayable(method)
        if method.messages and not messages:
            raise UsageError(
                f"method {method.label!r} drops messages, and these sessions are token ids; "
                "name recorded messages: --trace FILE"
            )
        check_pair(engine, cls, method)
        if kv_dtype or "offload" in method.settings():
            options = EngineOptions(model, method, device, dtype, kv_dtype=kv_dtype)
            cls.check_kv_dtype(options)
            cls.check_options(options)
        known = budget.spelled if budget is not None and method.takes_budget else None
        label = method.label if known is None else f"{method.label} {known}"
        label += "".join(f" {key}={value}" for key, value in split_settings(name)[1].items())
        if kv_dtype:
            label += f" kv={kv_dtype}" + " simulated" * (engine == "embedded")
        made[label] = ServingArm(
            name=label,
            method=method.label,
            budget=known,
            settings=method.settings(),
            kv_dtype=kv_dtype,
        )
    if "offload" in settings and not any("offload" in arm.settings for arm in made.values()):
        raise UsageError("--set offload: only --method full@offload has it")
    return list(made.values())


def _own(name: str, budget: Budget | None, settings: Mapping[str, str]) -> dict[str, str]:
    """Return those settings that are for a method: with a budget, or an offload's size."""
    plain = make_method(name, budget)
    theirs = settings.keys() - {"offload"} if plain.compresses else plain.settings().keys()
    return {key: value for key, value in settings.items() if key in theirs}


def url_arms(urls: Sequence[str]) -> list[ServingArm]:
    """Read `NAME=URL` or `URL`; a server without a name is called `server`.

    A UsageError if two servers have one name, or something is no URL.
    """
    arms: dict[str, ServingArm] = {}
    for text in urls:
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "server", text
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {text!r}: expected NAME=URL or URL, e.g. full=http://…:8000")
        if name in arms:
            raise UsageError(f"--url names {name!r} twice")
        arms[name] = ServingArm(name=name, method=name, url=url.rstrip("/").removesuffix("/v1"))
    return list(arms.values())
