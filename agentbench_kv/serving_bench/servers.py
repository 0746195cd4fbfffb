"""The server of an arm: started behind the gateway, or reached by its URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentbench_kv.engines.base import Engine, EngineOptions
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.serving.model_facts import read_model
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway import open_gateway
from agentbench_kv.gateway.http import BackgroundServer, ServerSettings
from agentbench_kv.registry import make_method
from agentbench_kv.run.calibration import calibrated, calibration_used
from agentbench_kv.run.engines import start_engine
from agentbench_kv.run.provenance import method_code
from agentbench_kv.run.recordings import Recording
from agentbench_kv.serving_bench import jobs
from agentbench_kv.serving_bench.endpoints import authorization
from agentbench_kv.serving_bench.measurements import ServingArm, ServingPlan
from agentbench_kv.serving_bench.prompts import read_vocabulary

_QUEUE = 4096
_ANSWER_S = 20.0
# Arguments by which an engine's cache is sized, whatever else is asked for.
_SIZES = {"cells", "kv-cache-memory-bytes", "max-total-tokens", "num-gpu-blocks-override"}
_MOST_RUNNING = 1024  # sessions in which something is read or generated; more may be open


@dataclass(frozen=True)
class RunningServer:
    """A server that can be asked."""

    target: jobs.Target
    vocabulary: jobs.Vocabulary | None = None  # of the engine's model; None of a server by URL
    context: int | None = None  # last position + 1 a session may reach, as far as it is known
    about: dict[str, Any] = field(default_factory=dict)  # what the engine says of itself
    engine: Engine | None = None  # None of a server by URL
    closing: str = ""  # how the method reads closing markers
    # What it is sent of a trace of messages, where its method drops some.
    shortened: tuple[Recording, ...] | None = None


def pool_tokens(plan: ServingPlan, arm: ServingArm, *, per_query_head: bool) -> int | None:
    """Return how many cached tokens an arm's pool has room for; None: the engine decides.

    A UsageError where something else sizes the cache, rows do not all take the same, or the pool
    has no room for one.
    """
    if plan.pool_mb is None:
        return None
    if own := _SIZES & plan.engine_args.keys():
        raise UsageError(f"--pool-mb: --engine-arg {min(own)} sizes the cache, too; leave one out")
    if arm.kv_dtype.startswith("kivi"):
        raise UsageError(f"--pool-mb: rows of {arm.name} take less as they age; leave it out")
    facts = read_model(model_path(plan.model))
    heads = facts.q_heads if per_query_head else facts.kv_heads
    size = facts.pool_bytes(arm.kv_dtype or plan.dtype or "float32") * heads // facts.kv_heads
    tokens = int(plan.pool_mb * 1e6) // size
    if not tokens:
        raise UsageError(f"--pool-mb {plan.pool_mb:g} has no room for a token, which takes {size}")
    return tokens


@contextmanager
def serve_arm(plan: ServingPlan, arm: ServingArm, at_once: int) -> Iterator[RunningServer]:
    """Start an arm's engine for `at_once` sessions, or reach its server; else a KVBenchError."""
    if arm.url:
        yield _reached(arm.url, plan.wire)
        return
    device = plan.device or "auto"
    plain = make_method(arm.method or "full", arm.budget, arm.settings)
    method = calibrated(plain, plan.model, device)
    running = min(at_once, _MOST_RUNNING)
    room = pool_tokens(plan, arm, per_query_head=method.per_query_head)
    with ExitStack() as stack:
        options = EngineOptions(
            plan.model,
            method,
            max_live_tokens=room,
            device=device,
            dtype=plan.dtype or "float32",
            kv_dtype=arm.kv_dtype,
            concurrency=running,
            load_format="dummy" if plan.weights == "dummy" else "auto",
            engine_args=plan.engine_args,
            allow_untested=plan.allow_untested,
        )
        engine = start_engine(plan.engine, options)
        stack.callback(engine.shutdown)
        info = engine.info
        vocabulary = read_vocabulary(info.model_path)
        # A session that just ended may still be closing when the next one begins.
        sessions = 2 * at_once + 1
        syntax = plan.tool_syntax
        gateway = open_gateway(engine, method, tool_syntax=syntax, max_sessions=sessions)
        settings = ServerSettings(queue=_QUEUE)
        server = BackgroundServer(gateway, concurrency=running, settings=settings)
        stack.enter_context(server)
        about: dict[str, Any] = {
            "model_sha": info.model_sha,
            "device": info.device,
            "dtype": info.dtype,
        }
        about |= calibration_used(method) | method_code(plain)
        about |= {"max_live_tokens": room} if room is not None else {}
        target = jobs.Target(server.url.removesuffix("/v1"), "gateway", info.model, arm.drops)
        about |= info.details
        own = (engine, method.closing_markers)
        yield RunningServer(target, vocabulary, info.context_limit, about, *own)


def _reached(base: str, wire: str) -> RunningServer:
    try:
        response = httpx.get(f"{base}/v1/models", headers=authorization(), timeout=_ANSWER_S)
        response.raise_for_status()
        model = response.json()["data"][0]
        target = jobs.Target(base, wire, str(model["id"]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise PrerequisiteError(
            f"no model server answers at {base}/v1/models ({error}); start one, e.g. kvbench serve"
        ) from error
    limit = model.get("max_model_len")
    return RunningServer(target, context=limit if isinstance(limit, int) else None)
