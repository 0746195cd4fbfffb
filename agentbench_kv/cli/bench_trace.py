"""`kvbench bench trace`: write a trace of generated sessions, or of another file's."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli import options as opt


@click.command()
@click.argument("path", type=opt.FILE, metavar="FILE")
@opt.local(
    "--from source",
    "Another trace, in any form that bench serving reads.  [default: sessions like those of "
    "coding agents, generated from published statistics]",
    opt.FILE,
)
@opt.local("--model", "Whose tokens messages become.", default="micro")
@opt.local("--sessions", "[default: 64 generated; all of another trace]", opt.POSITIVE)
@opt.local("--seed", "Of generated sessions.", opt.NATURAL, default=0)
@opt.local(
    "--token-scale",
    "As many times the tokens, at least one each; for models that hold less.",
    opt.ABOVE_ZERO,
    default=1.0,
    show_default=False,
)
@opt.json_option
def trace(
    path: Path,
    source: Path | None,
    model: str,
    sessions: int | None,
    seed: int,
    token_scale: float,
    as_json: bool,
) -> None:
    """Write sessions to FILE for kvbench bench serving --trace, and describe them.

    \b
    kvbench bench trace agents.jsonl --sessions 100 --token-scale 0.1
    kvbench bench trace own.jsonl --from mooncake_trace.jsonl --sessions 500
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from agentbench_kv.serving_bench.agent_trace import agent_sessions
    from agentbench_kv.serving_bench.recorded import recorded_messages, trace_figures
    from agentbench_kv.serving_bench.trace import RESIZED, read_trace, scaled, write_trace

    notes: tuple[str, ...] = ()
    if source is None:
        made = agent_sessions(sessions or 64, seed)
    else:
        read = read_trace(source, recorded_messages(model)).first(sessions)
        made, notes = list(read.sessions), read.notes
    if token_scale != 1:
        recorded = any(call.ids for session in made for call in session.calls)
        notes = (RESIZED,) if recorded else notes
        made = [scaled(session, token_scale) for session in made]
    write_trace(path, made)
    found = trace_figures(read_trace(path))
    if as_json:
        opt.print_json({**found.model_dump(), "path": str(path)})
        return
    longest = max(session.length for session in made)
    for line in (found.sentence, f"longest session: {longest:,} tokens", *notes):
        click.echo(line)
