"""`kvbench serve`: an engine with a KV-cache method behind an OpenAI-compatible server."""

from __future__ import annotations

import click

from agentbench_kv.cli.options import (
    POSITIVE,
    address_options,
    device_option,
    dtype_option,
    engine_arg_option,
    engine_option,
    model_option,
    option,
    parse_budget,
    parse_settings,
    set_option,
    untested_option,
)


@click.command()
@engine_option
@model_option
@option("--method", "Method, or method@preset.", default="full")
@option("--budget TOKENS", "Tokens kept per (layer, KV head).")
@set_option("Parameter of the method; repeatable.")
@device_option
@dtype_option
@engine_arg_option
@untested_option
@address_options(port=8000)
@option(
    "--api-key",
    "What clients must send; needed to bind another host than this machine's own. "
    "Prefer KVBENCH_API_KEY: an option can be read in the list of processes.",
)
@option("--parser", "Tool-call syntax: hermes, llama3_json, none.", default="auto")
@option("--concurrency", "Requests answered at once.", POSITIVE, default=16)
@option("--max-sessions", "Sessions open at once.", POSITIVE, default=1024)
@option("--max-tokens", "For requests that do not say.", POSITIVE, default=1024)
def serve(
    engine: str,
    model: str,
    method: str,
    budget: str | None,
    pairs: tuple[str, ...],
    device: str,
    dtype: str,
    engine_args: tuple[str, ...],
    allow_untested: bool,
    host: str,
    port: int,
    api_key: str | None,
    parser: str,
    concurrency: int,
    max_sessions: int,
    max_tokens: int,
) -> None:
    """Serve a model with a KV-cache method to any OpenAI client.

    A session (header X-KVBench-Session) keeps its cache over requests; usage.kvbench says what
    the method did to it. DELETE /v1/sessions/ID ends it.

    \b
    kvbench serve --method agentkv --budget 512
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from agentbench_kv.engines.base import EngineOptions
    from agentbench_kv.gateway import open_gateway
    from agentbench_kv.gateway.http import ServerSettings, check_exposure, run_server
    from agentbench_kv.registry import make_method
    from agentbench_kv.run.runner import start_engine

    check_exposure(host, api_key)
    settings = ServerSettings(api_key=api_key, threads=concurrency)
    options = EngineOptions(
        model,
        make_method(method, parse_budget(budget), parse_settings(pairs)),
        device=device,
        dtype=dtype,
        concurrency=concurrency,
        engine_args=parse_settings(engine_args, "--engine-arg"),
        allow_untested=allow_untested,
    )
    started = start_engine(engine, options)
    try:
        gateway = open_gateway(
            started, parser=parser, max_sessions=max_sessions, default_max_tokens=max_tokens
        )
        click.echo(f"kvbench: {model} with {method} on http://{host}:{port}/v1", err=True)
        run_server(gateway, host, port, settings)
    finally:
        started.shutdown()
