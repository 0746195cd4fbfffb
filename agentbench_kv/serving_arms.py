"""What is measured under load: engines started here behind the gateway, or servers by URL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentbench_kv.engines.base import Capability
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway import open_gateway
from agentbench_kv.gateway.server import BackgroundServer, ServerSettings
from agentbench_kv.loadgen.connections import authorization
from agentbench_kv.loadgen.jobs import Target, Vocabulary
from agentbench_kv.loadgen.prompts import read_vocabulary
from agentbench_kv.registry import load_engine, make_method
from agentbench_kv.results.serving.records import ServingArm, ServingPlan
from agentbench_kv.runner import build_engine, check_pair

__all__ = ["Standing", "engine_arms", "stand", "url_arms"]

_QUEUE = 4096
_ANSWER_S = 20.0


@dataclass(frozen=True)
class Standing:
    """A server that can be asked.

    Attributes
    ----------
    vocabulary : Vocabulary or None
        Of the engine's model; None of a server by URL.
    context : int or None
        Last position + 1 a session may reach, as far as it is known.
    about : dict
        What the engine says of itself.
    """

    target: Target
    vocabulary: Vocabulary | None = None
    context: int | None = None
    about: dict[str, Any] = field(default_factory=dict)


def engine_arms(
    engine: str,
    model: str,
    arms: Sequence[tuple[str, int | str | None]],
    settings: Mapping[str, str],
    *,
    dtype: str,
    device: str,
    dummy: bool = False,
) -> list[ServingArm]:
    """Check methods and budgets against an engine, before anything starts.

    Parameters
    ----------
    arms : sequence of (str, int or str or None)
        Method and budget. Settings go to the methods with a budget.
    dummy : bool
        Whether the weights are to be random ones.

    Raises
    ------
    UsageError, PrerequisiteError
        For a pair that cannot run, or an engine that takes no token ids.
    """
    cls = load_engine(engine)
    if Capability.TEXT in cls.capabilities:
        raise UsageError(f"engine {engine!r} takes messages, and this sends token ids")
    if dummy and not issubclass(cls, ServingEngine):
        raise UsageError(f"engine {engine!r} loads real weights only; leave --load-format away")
    cls.check_model(model)
    cls.check_compute(dtype, device)
    made: dict[str, ServingArm] = {}
    for name, budget in arms:
        plain = make_method(name, budget)
        method = make_method(name, budget, settings if plain.compresses else {})
        check_pair(engine, cls, method)
        known = budget if method.compresses else None
        label = method.label if known is None else f"{method.label} {known}"
        made[label] = ServingArm(
            name=label, method=method.label, budget=known, settings=method.settings()
        )
    return list(made.values())


def url_arms(urls: Sequence[str]) -> list[ServingArm]:
    """Read `NAME=URL` or `URL`; a server without a name is called `server`.

    Raises
    ------
    UsageError
        If two servers have one name, or something is no URL.
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


@contextmanager
def stand(plan: ServingPlan, arm: ServingArm, at_once: int) -> Iterator[Standing]:
    """Start an arm's engine, or reach its server.

    Parameters
    ----------
    at_once : int
        Most sessions open at the same time.

    Raises
    ------
    KVBenchError
        If it does not start, or does not answer.
    """
    if arm.url:
        yield _reached(arm.url, plan.wire)
        return
    with ExitStack() as stack:
        engine = build_engine(
            plan.engine,
            plan.model,
            arm.method or "full",
            arm.budget,
            arm.settings,
            device=plan.device or "auto",
            dtype=plan.dtype or "float32",
            concurrency=at_once,
            load_format="dummy" if plan.weights == "dummy" else "auto",
            engine_args=plan.engine_args,
            allow_untested=plan.allow_untested,
        )
        stack.callback(engine.shutdown)
        info = engine.info
        vocabulary = read_vocabulary(info.model_path)
        # A session that just ended may still be closing when the next one begins.
        gateway = open_gateway(engine, max_sessions=2 * at_once + 1)
        settings = ServerSettings(queue=_QUEUE)
        server = BackgroundServer(gateway, concurrency=at_once, settings=settings)
        stack.enter_context(server)
        about = {"model_sha": info.model_sha, "device": info.device, "dtype": info.dtype}
        about |= info.details
        target = Target(server.url.removesuffix("/v1"), "gateway", info.model)
        yield Standing(target, vocabulary, info.context_limit, about)


def _reached(base: str, wire: str) -> Standing:
    """Ask a server for its model."""
    try:
        response = httpx.get(f"{base}/v1/models", headers=authorization(), timeout=_ANSWER_S)
        response.raise_for_status()
        model = response.json()["data"][0]
        target = Target(base, wire, str(model["id"]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise PrerequisiteError(
            f"no model server answers at {base}/v1/models ({error}); start one, e.g. kvbench serve"
        ) from error
    limit = model.get("max_model_len")
    return Standing(target, context=limit if isinstance(limit, int) else None)
