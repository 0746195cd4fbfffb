"""`kvbench browser`: the local browser for agents that kvbench does not run itself."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import PATH, address_options, option


@click.group()
def browser() -> None:
    """Serve the local browser: search, open and find over an imported corpus."""


@browser.command()
@option(
    "--corpus",
    "Folder of an imported corpus, or its name. See kvbench data import-corpus.",
    required=True,
)
@option("--encoder", "Folder of the encoder the corpus was imported with: dense search.", PATH)
@address_options(port=8010)
@option("--api-key", "What clients must send; needed to bind another host than this machine's own.")
@option("--view-tokens", "Most estimated tokens of a view.", click.IntRange(64), default=1024)
def serve(
    corpus: str, encoder: Path | None, host: str, port: int, api_key: str | None, view_tokens: int
) -> None:
    """Serve a corpus over HTTP; each session has its own pages and cursors.

    \b
    kvbench browser serve --corpus wikipedia-2024-08
    curl -d '{"query": "Jane Eyre"}' http://127.0.0.1:8010/sessions/a/search
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from agentbench_kv.adapters.browser.corpus import Corpus, corpus_folder
    from agentbench_kv.adapters.browser.server import BrowserServer, run_browser_server
    from agentbench_kv.gateway.server import check_exposure

    check_exposure(host, api_key)
    loaded = Corpus.load(corpus_folder(corpus), encoder)
    click.echo(f"kvbench: {loaded.info.label} on http://{host}:{port}", err=True)
    server = BrowserServer(loaded, view_tokens=view_tokens, api_key=api_key)
    run_browser_server(server, host, port)
