"""`kvbench bench roofline`: how fast a model can be on a machine, and how near a run came."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli import options as opt

if TYPE_CHECKING:
    from agentbench_kv.serving_bench.achieved import Achieved
    from agentbench_kv.serving_bench.hardware import Hardware
    from agentbench_kv.serving_bench.roofline import Decoder, Limit, StepWork

WEIGHTS = ("float32", "float16", "bfloat16", "float8")
CACHES = (*WEIGHTS, "int8", "int4")
_HEADER = (
    "what", "sessions", "KV MB a session", "live", "GB to move", "GFLOP", "memory, ms",
    "compute, ms", "bound by", "limit, tok/s", "achieved, tok/s", "of the limit",
)  # fmt: skip


@click.command()
@opt.local("--hardware NAME|FILE", "a100, h100, h200, FILE.json, or measured: this machine.")
@opt.local("--model", "Model folder or micro; only its config.json is read.", default="micro")
@opt.local("--dtype", "Of the weights.", click.Choice(WEIGHTS), show_default=False)
@opt.local("--kv-dtype", "Of the cache.  [default: that of the weights]", click.Choice(CACHES))
@opt.local("--sessions", "In a batch.", opt.POSITIVE, default=(1, 8, 32), show_default=False)
@opt.local("--live", "Live tokens of each.", opt.POSITIVE, default=(1024, 8192), show_default=False)
@opt.local("--seen", "Tokens ever seen, for windows.  [default: the live ones]", opt.POSITIVE)
@opt.local("--prompt", "Tokens prefilled at once.", opt.POSITIVE, default=(8192,))
@opt.local(
    "--run runs RUN", "A run, or a folder of bench serving: its counts, its share of the limit.",
    multiple=True,
)  # fmt: skip
@opt.out_option("Folder of runs, for one named by id.")
@opt.json_option
def roofline(hardware: str | None, model: str, as_json: bool, **options: Any) -> None:
    """Compare bytes and operations of a step with a machine's limits.

    Without --run everything is a prediction: a limit that nobody can beat. With it, live tokens and
    bytes of K and V are the run's own counts, and its time per token is set against the limit.
    """
    from agentbench_kv.engines.embedded.model import model_path
    from agentbench_kv.errors import UsageError
    from agentbench_kv.serving_bench import achieved
    from agentbench_kv.serving_bench.hardware import document as machine_document
    from agentbench_kv.serving_bench.hardware import find_hardware
    from agentbench_kv.serving_bench.roofline import document, read_decoder

    if hardware is None:
        raise UsageError("--hardware is missing: a100, h100, h200, FILE.json or measured")
    decoder = read_decoder(model_path(model))
    found = [
        each for run in options["runs"] for each in achieved.read_achieved(run, options["out"])
    ]
    asked = options["dtype"], options["kv_dtype"]
    kinds = [each.kinds(*asked) for each in found]
    dtypes = dict.fromkeys([kind["dtype"] for kind in kinds] or [asked[0] or "bfloat16"])
    machines = {dtype: find_hardware(hardware, dtype) for dtype in dtypes}
    machine, dtype = next(iter(machines.values())), next(iter(dtypes))
    if found:
        pairs = zip(found, kinds, strict=True)
        rows = [_achieved_row(run, decoder, machines[own["dtype"]], own) for run, own in pairs]
    else:
        rows = _predicted(decoder, machine, dtype, options)
    if as_json:
        about = {"hardware": machine_document(machine), "model": document(decoder)}
        opt.print_json({**about, "dtype": ", ".join(dtypes), "prediction": not found, "rows": rows})
        return
    for name, each in machines.items():
        click.echo(f"{each.name}: {each.said(name)}")
    click.echo(_what_it_is(machine, found))
    click.echo(f"| {' | '.join(_HEADER)} |\n|---|{'--:|' * (len(_HEADER) - 1)}")
    for row in rows:
        click.echo(_line(row))
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        click.echo(f"note: {note}")


def _what_it_is(machine: Hardware, found: list[Achieved]) -> str:
    if found:
        return "limits from the run's counts; achieved is what the run measured"
    limits = "measured limits" if machine.measured else "published limits"
    return f"predictions from {limits}: no model was run"


def _predicted(
    decoder: Decoder, machine: Hardware, dtype: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    from agentbench_kv.serving_bench.roofline import decode_step, prefill, session_bytes

    kinds: dict[str, Any] = {"dtype": dtype, "kv_dtype": options["kv_dtype"] or dtype}
    rows = []
    for tokens in options["prompt"]:
        work = prefill(decoder, tokens, **kinds)
        limit = work.limit(machine, dtype)
        held = session_bytes(decoder, tokens, tokens, kinds["kv_dtype"])
        rows.append(_row("prefill", 1, (held, tokens), work, limit, tokens))
    for live in options["live"]:
        for sessions in options["sessions"]:
            seen = max(options["seen"] or live, live)
            work = decode_step(decoder, sessions, live, seen, **kinds)
            limit = work.limit(machine, dtype)
            held = session_bytes(decoder, live, seen, kinds["kv_dtype"])
            rows.append(_row("decode", sessions, (held, live), work, limit, sessions))
    return rows


def _achieved_row(
    run: Achieved, decoder: Decoder, machine: Hardware, kinds: dict[str, str]
) -> dict[str, Any]:
    from agentbench_kv.serving_bench.roofline import IMPOSSIBLE

    work = run.work(decoder, **kinds)
    limit = work.limit(machine, kinds["dtype"])
    held = run.held(decoder, kinds["kv_dtype"]), run.rows
    row = _row(f"decode: {run.name}", run.sessions, held, work, limit, run.sessions)
    speed = run.sessions / run.step_s
    notes = [run.assumed] if run.assumed else []
    where = run.hardware.get("gpu") or run.hardware.get("cpu")
    if where:
        notes.append(f"the run's own record says it ran on {where}")
    if Path(run.model).name != decoder.name:
        notes.append(f"the run is of {Path(run.model).name}, the limit of {decoder.name}")
    notes += run.other_kinds(kinds)
    threads = run.hardware.get("torch_threads")
    if machine.threads and threads not in (None, machine.threads):
        notes.append(
            f"limits measured with {machine.threads} threads; {run.name} had {threads}: measure "
            f"them with OMP_NUM_THREADS={threads}"
        )
    if run.left_out:
        notes.append(f"left out: {run.left_out} measurements that something disturbed")
    share = run.share(limit)
    if share > 1:
        notes.append(IMPOSSIBLE)
    return row | {
        **kinds,
        "achieved_tokens_per_s": speed,
        "share_of_limit": share,
        "notes": notes,
    }


def _row(
    what: str,
    sessions: float,
    held: tuple[float, float],
    work: StepWork,
    limit: Limit,
    tokens: float,
) -> dict[str, Any]:
    """Return a row; `held` are a session's bytes of K and V, and its tokens."""
    return {
        "what": what,
        "sessions": sessions,
        "kv_bytes": held[0],
        "live": held[1],
        "bytes": work.bytes,
        "flops": work.flops,
        "memory_s": limit.memory_s,
        "compute_s": limit.compute_s,
        "bound_by": limit.bound,
        "limit_tokens_per_s": tokens / limit.seconds,
        "achieved_tokens_per_s": None,
        "share_of_limit": None,
        "notes": [],
    }


def _line(row: dict[str, Any]) -> str:
    speed, share = row["achieved_tokens_per_s"], row["share_of_limit"]
    cells = (
        row["what"], f"{row['sessions']:.3g}", f"{row['kv_bytes'] / 1e6:,.1f}",
        f"{row['live']:,.0f}", f"{row['bytes'] / 1e9:,.3f}",
        f"{row['flops'] / 1e9:,.2f}", f"{row['memory_s'] * 1e3:,.3f}",
        f"{row['compute_s'] * 1e3:,.3f}", row["bound_by"], f"{row['limit_tokens_per_s']:,.0f}",
        "" if speed is None else f"{speed:,.1f}", "" if share is None else f"{share:.1%}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"
