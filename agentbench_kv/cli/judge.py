"""`kvbench judge` and `browser`: verdicts on the browsing tasks, and their browser as a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentbench_kv.cli.options import (
    PATH,
    POSITIVE,
    address_options,
    json_option,
    option,
    print_json,
)

if TYPE_CHECKING:
    from agentbench_kv.adapters.locomo.judging import JudgedAnswers


@click.command()
@click.argument("run", type=PATH)
@option(
    "--endpoint",
    "OpenAI-compatible base URL; its key comes from KVBENCH_JUDGE_KEY.",
    required=True,
    envvar="KVBENCH_JUDGE_ENDPOINT",
)
@option("--model", "Name of the model there.", required=True, envvar="KVBENCH_JUDGE_MODEL")
@option("--concurrency", "Requests at once.", POSITIVE, default=8)
@option(
    "--controls",
    "LoCoMo: questions of a conversation with wrong answers.",
    click.IntRange(0),
    default=20,
)
@json_option
@click.pass_context
def judge(
    ctx: click.Context,
    run: Path,
    endpoint: str,
    model: str,
    concurrency: int,
    controls: int,
    as_json: bool,
) -> None:
    """Judge the answers of RUN, a run directory of frames/…, browsecomp-plus/… or LoCoMo.

    Nothing is run again and no score changes: the verdicts go to a file in the run directory, one
    per judge. The same command asks only for what is missing. Exit code 1 if verdicts are missing.

    Of LoCoMo's answers it judges by two criteria, a generous and a strict one, and shows beside
    them which share of answers that are known to be wrong each of them accepts.
    """
    from agentbench_kv.adapters.browser.judge import Judge, judge_run
    from agentbench_kv.adapters.locomo.judging import TASKS, judge_answers
    from agentbench_kv.results.run_reader import RunReader

    chosen = Judge.parse(f"{endpoint}|{model}")
    if RunReader(run).info.spec.get("task") in TASKS:
        answers = judge_answers(run, chosen, controls=controls, concurrency=concurrency)
        ctx.exit(_shown(answers, model, as_json))
    found = judge_run(run, chosen, concurrency=concurrency)
    if as_json:
        print_json({**vars(found), "path": str(found.path)})
    else:
        share = "n/a" if found.mean is None else f"{100 * found.mean:.1f}%"
        click.echo(f"judge {model}: {share} of {found.trials} trials, {found.asked} asked now")
        click.echo(str(found.path))
    for error in found.errors:
        click.echo(f"kvbench: no verdict: {error}", err=True)
    ctx.exit(1 if found.judged < found.trials else 0)


def _shown(found: JudgedAnswers, model: str, as_json: bool) -> int:
    """Print what a judge accepts of LoCoMo's answers; return the exit code."""
    if as_json:
        rows = [each.document() for each in found.accepted]
        about = {"asked": found.asked, "missing": found.missing, "path": str(found.path)}
        print_json({"accepted": rows, **about})
    else:
        click.echo(f"judge {model}: accepted, % [95% interval over conversations]")
        for each in found.accepted:
            shown = f"n/a: {each.missing} of {each.answers} without a verdict"
            if known := each.interval:
                point, low, high = (100 * part for part in (known.point, known.low, known.high))
                shown = f"{point:.1f} [{low:.1f}, {high:.1f}] of {each.answers}"
            click.echo(f"  {each.criterion}, {each.what}: {shown}")
        click.echo("wrong answers, made by rule: vague and wrong, topic alone, another answer")
        click.echo(str(found.path))
    for error in found.errors:
        click.echo(f"kvbench: no verdict: {error}", err=True)
    return 1 if found.missing else 0


@click.group()
def browser() -> None:
    """Serve the local browser: search, open and find over an imported corpus."""


@browser.command()
@option(
    "--corpus",
    "Folder of an imported corpus, or its name. See kvbench data import-corpus.",
    required=True,
)
@option("--encoder", "Encoder (name or folder) the corpus was imported with: dense search.", PATH)
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
    from agentbench_kv.adapters.browser.server import BrowserServer
    from agentbench_kv.gateway.http import run_app
    from agentbench_kv.gateway.listening import check_exposure

    check_exposure(host, api_key)
    loaded = Corpus.load(corpus_folder(corpus), encoder)
    click.echo(f"kvbench: {loaded.info.label} on http://{host}:{port}", err=True)
    app = BrowserServer(loaded, view_tokens=view_tokens, api_key=api_key).app
    run_app(app, host, port, api_key)
