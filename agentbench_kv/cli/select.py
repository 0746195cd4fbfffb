"""`kvbench select`: what a method would keep of a capture."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import PATH, flag, option, parse_settings, set_option, shown
from agentbench_kv.errors import UsageError


@click.command()
@shown("--method", "Method, or method@preset. See kvbench ls methods.", required=True)
@shown("--budget TOKENS", "Tokens kept per (layer, KV head), e.g. 64, 3k or 25%.")
@shown("--capture", "Capture file, .npz or .safetensors (docs/analysis.md).", PATH, required=True)
@shown(
    "--out",
    "File to write, .npz or .safetensors: kept, score and meta.",
    PATH,
    required=True,
    envvar="KVBENCH_SELECT_OUT",
)
@set_option("Method parameter; repeatable. See kvbench ls methods.")
@option(
    "--now POSITION",
    "Event before this position; later tokens are the future. [default: the capture's]",
    int,
)
@flag("--json as_json", "Print meta as JSON.")
def select(
    method: str,
    budget: str | None,
    capture: Path,
    out: Path,
    pairs: tuple[str, ...],
    now: int | None,
    as_json: bool,
) -> None:
    """Score the tokens of a capture with METHOD and write which ones it keeps.

    Exactly the code the engines run, on a file.
    """
    from agentbench_kv.analysis.archives import check_suffix
    from agentbench_kv.analysis.captures import Capture
    from agentbench_kv.analysis.selection import select_capture
    from agentbench_kv.cli.documents import print_json
    from agentbench_kv.registry import make_method

    check_suffix(out)
    if out.resolve() == capture.resolve():
        raise UsageError(f"--out {out} is the capture itself; give another file")
    chosen = make_method(method, budget, parse_settings(pairs))
    session = Capture.load(capture)
    outcome = select_capture(session if now is None else session.at(now), chosen)
    outcome.save(out)
    if as_json:
        print_json({**outcome.meta, "out": str(out)})
        return
    click.echo(
        f"{chosen.label} keeps {outcome.meta['budget']} of {outcome.meta['candidates']} tokens in "
        f"each of {session.layers} x {outcome.kept.shape[-2]} (layer, head)s: {out}"
    )
