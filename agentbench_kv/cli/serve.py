"""`kvbench serve`: an engine with a KV-cache method behind an OpenAI-compatible server."""

from __future__ import annotations

import click

from agentbench_kv.cli.options import address_options, parse_budget, parse_settings
from agentbench_kv.cli.spec_options import ENGINE_OPTIONS

__all__ = ["serve"]


@click.command()
@click.option("--engine", default="embedded", envvar="KVBENCH_ENGINE", show_default=True)
@click.option(
    "--model",
    default="micro",
    envvar="KVBENCH_MODEL",
    show_default=True,
    help="The shipped micro model, or a Hugging Face model folder.",
)
@click.option(
    "--method",
    default="full",
    envvar="KVBENCH_METHOD",
    show_default=True,
    help="Method, or method@preset.",
)
@click.option(
    "--budget",
    metavar="TOKENS",
    envvar="KVBENCH_BUDGET",
    help="Tokens kept per (layer, KV head).",
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    envvar="KVBENCH_SET",
    help="Parameter of the method; repeatable.",
)
@click.option("--device", default="auto", envvar="KVBENCH_DEVICE", show_default=True)
@click.option("--dtype", default="float32", envvar="KVBENCH_DTYPE", show_default=True)
@ENGINE_OPTIONS[0]
@ENGINE_OPTIONS[1]
@address_options(port=8000)
@click.option(
    "--api-key",
    envvar="KVBENCH_API_KEY",
    help="What clients must send; needed to bind another host than this machine's own. "
    "Prefer KVBENCH_API_KEY: an option can be read in the list of processes.",
)
@click.option(
    "--parser",
    default="auto",
    envvar="KVBENCH_PARSER",
    show_default=True,
    help="Tool-call syntax: hermes, llama3_json, none.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=16,
    envvar="KVBENCH_CONCURRENCY",
    show_default=True,
    help="Requests answered at once.",
)
@click.option(
    "--max-sessions",
    type=click.IntRange(1),
    default=1024,
    envvar="KVBENCH_MAX_SESSIONS",
    show_default=True,
    help="Sessions open at once.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=1024,
    envvar="KVBENCH_MAX_TOKENS",
    show_default=True,
    help="For requests that do not say.",
)
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
    from agentbench_kv.gateway import open_gateway
    from agentbench_kv.gateway.server import ServerSettings, check_exposure, run_server
    from agentbench_kv.runner import build_engine

    check_exposure(host, api_key)
    settings = ServerSettings(api_key=api_key, threads=concurrency)
    built = build_engine(
        engine,
        model,
        method,
        parse_budget(budget) if budget else None,
        parse_settings(pairs),
        device=device,
        dtype=dtype,
        concurrency=concurrency,
        engine_args=parse_settings(engine_args, "--engine-arg"),
        allow_untested=allow_untested,
    )
    try:
        gateway = open_gateway(
            built, parser=parser, max_sessions=max_sessions, default_max_tokens=max_tokens
        )
        click.echo(f"kvbench: {model} with {method} on http://{host}:{port}/v1", err=True)
        run_server(gateway, host, port, settings)
    finally:
        built.shutdown()
