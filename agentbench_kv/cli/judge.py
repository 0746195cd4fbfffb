"""`kvbench judge`: an LLM's verdict on a finished run's answers, beside its score."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import PATH, POSITIVE, json_option, option


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
@json_option
@click.pass_context
def judge(
    ctx: click.Context, run: Path, endpoint: str, model: str, concurrency: int, as_json: bool
) -> None:
    """Judge the answers of RUN, a run directory of frames/… or browsecomp-plus/….

    Nothing is run again and no score changes: the verdicts go to a file in the run directory, one
    per judge. The same command asks only for what is missing. Exit code 1 if verdicts are missing.
    """
    from agentbench_kv.adapters.browser.judge import Judge
    from agentbench_kv.adapters.browser.rejudge import judge_run
    from agentbench_kv.cli.documents import print_json

    found = judge_run(run, Judge.parse(f"{endpoint}|{model}"), concurrency=concurrency)
    if as_json:
        print_json({**vars(found), "path": str(found.path)})
    else:
        share = "n/a" if found.mean is None else f"{100 * found.mean:.1f}%"
        click.echo(f"judge {model}: {share} of {found.trials} trials, {found.asked} asked now")
        click.echo(str(found.path))
    for error in found.errors:
        click.echo(f"kvbench: no verdict: {error}", err=True)
    ctx.exit(1 if found.judged < found.trials else 0)
