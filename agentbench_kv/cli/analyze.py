"""`kvbench analyze`: what captures and traces show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.budget import Budget
from agentbench_kv.cli import options as opt
from agentbench_kv.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from agentbench_kv.analysis.captures import Capture
    from agentbench_kv.analysis.traces import Trace
    from agentbench_kv.run.spec import RunSpec


_CAPTURE = "Capture file, .npz or .safetensors (docs/analysis.md)"
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_PLACE = re.compile(r"(\d{1,9}):(\d{1,9})")
many_captures = opt.many(
    "--capture captures", f"{_CAPTURE}; repeatable, results are pooled.", opt.PATH, required=True
)
layer_option = opt.many(
    "--layer layers", "Only this layer of the capture; repeatable. [default: all]", int
)
trace_option = opt.option("--trace", "Trace file of a session.", opt.PATH)
print_option = opt.option("--json as_json", "Print one JSON document.", is_flag=True)


def outputs(command: opt.F) -> opt.F:
    """Add `--plot` and `--json`."""
    plot = opt.option("--plot", "Also draw it: a .png or .svg file.", opt.PATH)
    return plot(print_option(command))


def _replayed_options(command: opt.F) -> opt.F:
    """Add what says which sessions of which run are played again, see `_replayed`."""
    runs = opt.option(
        "--runs", "Folder of runs.", opt.FOLDER, default=Path("runs"), envvar="KVBENCH_OUT"
    )
    limit = opt.local("--limit", "First N.", opt.POSITIVE, default=5)
    samples = opt.local("--sample samples", "Id or number; repeatable.", multiple=True)
    run = opt.local("--run run_name", "Id or folder of a finished run.", required=True)
    return run(samples(limit(runs(command))))


@click.group()
def analyze() -> None:
    """Look inside captures and traces: tables, JSON and pictures."""


@analyze.command()
@many_captures
@layer_option
@opt.option("--k", "Directions per span.", opt.POSITIVE, default=5)
@outputs
def angles(
    captures: tuple[Path, ...], layers: tuple[int, ...], k: int, plot: Path | None, as_json: bool
) -> None:
    """Principal angles between the query subspaces of phase spans, within and across phases."""
    from agentbench_kv.analysis.angles import phase_angles
    from agentbench_kv.analysis.plots import check_plot, plot_angles
    from agentbench_kv.analysis.tables import angles_tables

    check_plot(plot)
    found = phase_angles(_load(captures, layers), k)
    _show(found.document(), angles_tables(found), as_json, captures)
    if plot is not None:
        plot_angles(found, plot)


@analyze.command()
@many_captures
@layer_option
@opt.many("--budget budgets TOKENS", "Tokens kept per (layer, KV head); repeatable.", required=True)
@opt.option(
    "--recent", "Last queries as representatives; repeatable.", opt.POSITIVE, default=(8, 24)
)
@opt.option(
    "--representatives",
    "Queries of the phase-balanced strategies in all.",
    opt.POSITIVE,
    default=24,
)
@opt.option("--interval", "Generated tokens between two events.", opt.POSITIVE, default=128)
@outputs
def coverage(
    captures: tuple[Path, ...],
    layers: tuple[int, ...],
    budgets: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Future attention kept, per phase: recent against phase-balanced queries, and the oracle."""
    from agentbench_kv.analysis.coverage import utility_coverage
    from agentbench_kv.analysis.plots import check_plot, plot_coverage
    from agentbench_kv.analysis.tables import coverage_tables

    check_plot(plot)
    tokens = [read_tokens(text) for text in budgets]
    found = utility_coverage(_load(captures, layers), tokens, **settings)
    _show(found.document(), coverage_tables(found), as_json, captures)
    if plot is not None:
        plot_coverage(found, plot)


@analyze.command()
@opt.option("--capture", f"{_CAPTURE}.", opt.PATH, required=True)
@opt.many("--at places LAYER:HEAD", "Query head; repeatable. [default: head 0 of the middle layer]")
@opt.option("--per-phase", "Queries drawn of each phase.", opt.POSITIVE, default=100)
@opt.option("--seed", "Of the draw and the embedding.", opt.NATURAL, default=0)
@outputs
def tsne(
    capture: Path, places: tuple[str, ...], plot: Path | None, as_json: bool, **draw: int
) -> None:
    """Embed query vectors in the plane (t-SNE), coloured by phase."""
    from agentbench_kv.analysis.plots import check_plot, plot_tsne
    from agentbench_kv.analysis.tables import tsne_tables
    from agentbench_kv.analysis.tsne import embed_queries

    check_plot(plot)
    (loaded,) = _load([capture])
    heads = [read_place(text) for text in places] or [(loaded.layers // 2, 0)]
    found = embed_queries(loaded, heads, **draw)
    embeddings = [embedding.document() for embedding in found]
    document = {"analysis": "tsne", "seed": draw["seed"], "heads": embeddings}
    _show(document, tsne_tables(found), as_json, [capture])
    if plot is not None:
        plot_tsne(found, plot)


@analyze.command()
@trace_option
@opt.option("--capture", "Or: a capture to replay.", opt.PATH)
@opt.option("--method", "With --capture: method to replay.")
@opt.option("--budget TOKENS", "With --capture.")
@opt.set_option("Method parameter; repeatable. See kvbench ls methods.")
@opt.option("--out", "Also write the trace of the replay.", opt.PATH, envvar="KVBENCH_TRACE_OUT")
@outputs
def timeline(
    trace: Path | None,
    capture: Path | None,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    **replayed: Any,
) -> None:
    """Count the kept tokens of each phase at every event of a trace or a replayed capture."""
    from agentbench_kv.analysis.audit import trace_timeline
    from agentbench_kv.analysis.plots import check_plot, plot_timeline
    from agentbench_kv.analysis.tables import timeline_tables

    check_plot(plot)
    source = _trace(trace, capture, **replayed)
    if out is not None:
        source.save(out)
    found = trace_timeline(source)
    document = {**found.document(), "meta": source.meta}
    _show(document, timeline_tables(found), as_json, [path for path in (trace, capture) if path])
    if plot is not None:
        plot_timeline(found, plot)


@analyze.command()
@_replayed_options
@opt.option("--out", "Write the last trace.", opt.PATH, envvar="KVBENCH_TRACE_OUT")
@print_option
def evidence(
    run_name: str, samples: tuple[str, ...], limit: int, runs: Path, out: Path | None, as_json: bool
) -> None:
    """Play sessions of a run again: was what an answer needed still cached, by source and outcome.

    One row per source and kind of evidence, apart for what the agent knew and what it got wrong:
    the share of its tokens still held at the end, over layers and heads, and the rank of the
    evicted ones over the places there were (1 is the last token kept).
    """
    from agentbench_kv.run.observe import audit_session, by_outcome

    spec, names = _replayed(runs, run_name, samples, limit)
    audits = []
    for name in names:
        audited, trace = audit_session(spec, name)
        audits.append(audited)
    if out is not None:
        trace.save(out)
    sessions = [{**vars(each), "facts": [f.document() for f in each.facts]} for each in audits]
    table = _evidence_table(by_outcome(audits))
    _show({"analysis": "evidence", "sessions": sessions}, [table], as_json, [])


@analyze.command()
@_replayed_options
@opt.local("--window", "Last tokens. [default: as many as the rings hold queries]", opt.POSITIVE)
@print_option
def rings(
    run_name: str,
    samples: tuple[str, ...],
    limit: int,
    runs: Path,
    window: int | None,
    as_json: bool,
) -> None:
    """Play sessions of a run again: which of the method's queries lie in the recency window.

    For a method with a ring of queries per phase, at every event: the share of them that are among
    the last tokens anyway, and how far back each ring reaches.
    """
    from agentbench_kv.analysis.rings import ring_overlap, ring_plan
    from agentbench_kv.analysis.tables import rings_tables
    from agentbench_kv.methods.base import Phase
    from agentbench_kv.run.observe import ring_session

    spec, names = _replayed(runs, run_name, samples, limit)
    held = ring_plan(spec.built_method).size * len(Phase)
    found = ring_overlap(dict(ring_session(spec, name) for name in names), window or held)
    _show({**found.document(), "run": run_name}, rings_tables(found), as_json, [])


@analyze.command()
@trace_option
@opt.option(
    "--positions RANGES",
    "Logical positions of the tokens that held the answer, e.g. 120-135,200.",
    required=True,
)
@print_option
def audit(trace: Path | None, positions: str, as_json: bool) -> None:
    """Say at which event tokens were evicted, in how many heads, and with which score rank."""
    from agentbench_kv.analysis.audit import audit as run_audit
    from agentbench_kv.analysis.tables import audit_tables
    from agentbench_kv.analysis.traces import Trace

    if trace is None:
        raise UsageError("audit needs a trace: add --trace FILE")
    ranges = read_ranges(positions)
    loaded = Trace.load(trace)
    # Without an event that saw it, a position that never was would read "still held" everywhere.
    seen = [event.logical for event in loaded.events]
    length = max(seen, default=0) if loaded.phases is None else len(loaded.phases)
    last = max(asked.stop for asked in ranges) - 1
    if last >= length:
        raise UsageError(f"position {last}: the trace knows positions 0 to {length - 1}")
    found = run_audit(loaded.events, [position for asked in ranges for position in asked])
    tokens = [evidence.document() for evidence in found]
    _show({"analysis": "audit", "tokens": tokens}, audit_tables(found), as_json, [trace])


def _replayed(
    runs: Path, run_name: str, samples: tuple[str, ...], limit: int
) -> tuple[RunSpec, tuple[str, ...]]:
    """Return a run's spec and the names of the samples to play again."""
    from agentbench_kv.results.store import RunStore
    from agentbench_kv.run.calibration import recorded
    from agentbench_kv.run.spec import RunSpec

    info = RunStore(runs).find(run_name).info
    spec = recorded(RunSpec.of(info.spec))
    there_are = (info.expected_trials or limit * spec.trials) // spec.trials
    return spec, samples or tuple(str(number) for number in range(min(limit, there_are)))


def _evidence_table(groups: Mapping[tuple[str, str, bool], Mapping[str, float]]) -> Table:
    """Return one row per source, kind and outcome of evidence, see `run.replay.by_outcome`."""
    from agentbench_kv.results.terminal import new_table

    rows = [
        (
            *(source, kind, "knew it" if right else "got it wrong", f"{values['facts']:.0f}"),
            *(f"{values['held']:.0%}", f"{values['rank_over_places']:.2f}"),
        )
        for (source, kind, right), values in groups.items()
    ]
    columns = ("source", "kind", "agent", "facts", "still held", "rank / places")
    return new_table(*columns, rows=rows)


def _load(paths: Sequence[Path], layers: Sequence[int] = ()) -> list[Capture]:
    from agentbench_kv.analysis.captures import Capture

    return [Capture.load(path).only_layers(layers) for path in paths]


def _trace(
    trace: Path | None,
    capture: Path | None,
    method: str | None,
    budget: str | None,
    pairs: Sequence[str],
) -> Trace:
    """Load a trace, or make one by replaying a capture."""
    from agentbench_kv.analysis.replay import replay_trace
    from agentbench_kv.analysis.traces import Trace
    from agentbench_kv.registry import make_method

    if trace is not None and capture is None:
        return Trace.load(trace)
    if capture is None or trace is not None:
        raise UsageError("timeline: give either --trace FILE, or --capture FILE and --method NAME")
    if method is None:
        raise UsageError("timeline: say which method to replay, e.g. --method agentkv --budget 256")
    chosen = make_method(method, budget, opt.parse_settings(pairs))
    return replay_trace(_load([capture])[0], chosen)


def _show(
    document: dict[str, Any], tables: Sequence[Table], as_json: bool, files: Sequence[Path]
) -> None:
    from agentbench_kv.results.terminal import console

    if as_json:
        opt.print_json({**document, "files": [str(path) for path in files]})
        return
    for table in tables:
        console().print(table)


def read_tokens(text: str) -> int:
    """Read a budget in tokens, `3072` or `3k`."""
    tokens = Budget.parse(text).tokens
    if tokens is None:
        raise UsageError(f"budget {text!r}: expected a number of tokens, e.g. 3072 or 3k")
    return tokens


def read_place(text: str) -> tuple[int, int]:
    """Read `LAYER:HEAD`."""
    match = _PLACE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--at {text!r}: expected LAYER:HEAD, e.g. --at 24:32")
    return int(match[1]), int(match[2])


def read_ranges(text: str) -> list[range]:
    """Read positions and inclusive ranges, `120-135,200`."""
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UsageError(
                f"--positions {part.strip()[:40]!r}: expected positions and ranges, e.g. "
                "120-135,200"
            )
        found.append(range(first, last + 1))
    return found
