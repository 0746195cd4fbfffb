"""`kvbench serve`: an engine with a KV-cache method behind an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import click

from agentbench_kv.cli import options as opt


@click.command()
@opt.engine_option
@opt.model_option
@opt.option("--method", "Method, or method@preset.", default="full")
@opt.option("--budget TOKENS", "Tokens kept per (layer, KV head).")
@opt.set_option("Parameter of the method; repeatable.")
@opt.device_option
@opt.dtype_option
@opt.kv_dtype_option
@opt.context_limit_option
@opt.max_live_option
@opt.engine_arg_option
@opt.untested_option
@opt.address_options(port=8000)
@opt.option(
    "--api-key",
    "What clients must send; needed to bind another host than this machine's own. "
    "Prefer KVBENCH_API_KEY: an option can be read in the list of processes.",
)
@opt.many(
    "--allow-host allow_hosts NAME",
    "Another name that clients call this machine by, or web pages that may ask come from; "
    "* for any. Repeatable.",
)
@opt.option(
    "--tool-syntax --parser tool_syntax",
    "How the model writes calls, as for kvbench run.",
    default="auto",
)
@opt.option("--concurrency", "Requests answered at once.", opt.POSITIVE, default=16)
@opt.option("--max-sessions", "Sessions open at once.", opt.POSITIVE, default=1024)
@opt.option(
    "--sessions",
    "Who says which requests belong together: their header alone, or auto: without one, the "
    "messages, for as many conversations as --concurrency.",
    click.Choice(["header", "auto"]),
    default="header",
)
@opt.option(
    "--session-idle SECONDS",
    "A session without a request for so long is closed; 0 for never.",
    click.FloatRange(0),
    default=1800.0,
)
@opt.option(
    "--drain SECONDS",
    "What answers in flight get to end after SIGTERM or Ctrl-C.",
    click.FloatRange(0, 3600),
    default=5.0,
)
@opt.option("--max-tokens", "For requests that do not say.", opt.POSITIVE, default=1024)
@opt.option(
    "--encoder NAME",
    "What answers /v1/embeddings: wordllama, or the folder of a local encoder.",
)
def serve(
    engine: str, model: str, method: str, host: str, port: int, api_key: str | None, **asked: Any
) -> None:
    """Serve a model with a KV-cache method to any OpenAI client.

    A session (header X-KVBench-Session) keeps its cache over requests; usage.kvbench says what
    the method did to it. DELETE /v1/sessions/ID ends it.

    \b
    kvbench serve --method agentkv --budget 512
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from agentbench_kv.engines.base import EngineOptions
    from agentbench_kv.gateway import open_gateway
    from agentbench_kv.gateway.http import ServerSettings, run_server
    from agentbench_kv.gateway.listening import (
        Patience,
        check_exposure,
        end_on_sigterm,
        ends_soon,
    )
    from agentbench_kv.registry import make_method
    from agentbench_kv.run.engines import start_engine
    from agentbench_kv.run.foresight import refuse_foresight
    from agentbench_kv.run.memories import refuse_memory
    from agentbench_kv.run.runner import warn_without_phases
    from agentbench_kv.run.spec import check_limits

    check_exposure(host, api_key)
    end_on_sigterm()
    settings = ServerSettings(
        api_key=api_key,
        threads=asked["concurrency"],
        allow_hosts=asked["allow_hosts"],
        patience=Patience(drain_s=asked["drain"]),
        embedder=_embedder(asked["encoder"]) if asked["encoder"] else None,
    )
    asked["engine_args"] = opt.parse_settings(asked["engine_args"], "--engine-arg")
    budget, pairs = opt.parse_budget(asked["budget"]), opt.parse_settings(asked["pairs"])
    same = ("device", "dtype", "concurrency", "engine_args", "allow_untested")
    options = {name: asked[name] for name in same}
    options["kv_dtype"] = asked["kv_dtype"].replace("auto", "")
    context, live = asked["context_limit"] or 0, asked["max_live_tokens"]
    check_limits(engine, context, live or 0)
    options |= {"context_limit": context, "max_live_tokens": live}
    made = make_method(method, budget, pairs)
    refuse_foresight(made)
    refuse_memory(made)
    started = start_engine(engine, EngineOptions(model, made, **options))
    try:
        limits = {"max_sessions": asked["max_sessions"], "default_max_tokens": asked["max_tokens"]}
        limits["idle_s"] = asked["session_idle"] or None
        limits["conversations"] = asked["concurrency"] if asked["sessions"] == "auto" else 0
        gateway = open_gateway(started, made, tool_syntax=asked["tool_syntax"], **limits)
        gateway.ends_run = False
        warn_without_phases(made, gateway)
        click.echo(f"kvbench: {model} with {method} on http://{host}:{port}/v1", err=True)
        run_server(gateway, host, port, settings)
    finally:
        with ends_soon("the engine"):
            started.shutdown()


def _embedder(name: str) -> Any:
    from agentbench_kv.encoders.loading import load_encoder
    from agentbench_kv.gateway.http import Embedder

    return Embedder(name, load_encoder(name).encode)
