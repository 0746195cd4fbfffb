"""What `kvbench compare --engines` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentbench_kv.results.engines import Consistency, Difference
    from agentbench_kv.results.runs import Run

_MOST_REPLAYED = 8  # sessions that are played again for their logits


def show_engines(sources: Sequence[str], out: Path, as_json: bool) -> int:
    """Print the cross-engine table of some runs; return the exit code."""
    from agentbench_kv.results.engines import consistency
    from agentbench_kv.results.sources import open_sides
    from agentbench_kv.results.terminal import print_json

    with open_sides(sources, out) as (sides, _):
        runs = [run for side in sides for run in side]
        found = consistency(runs)
    found = found.with_gaps(_gaps(runs, found))
    if as_json:
        print_json(found.document())
    else:
        _print(found)
    return 0 if found.equal else 1


def _gaps(runs: Sequence[Run], found: Consistency) -> dict[int, tuple[float | None, str]]:
    """Ask the embedded engine how close the decisions were at which another engine parted."""
    spec = next((run.spec for run in runs if run.setting.engine == "embedded"), None)
    if spec is None:
        return {}
    parted = [i for i, each in enumerate(found.differences) if each.turn is not None]
    return {i: _gap(spec, found.differences[i]) for i in parted[:_MOST_REPLAYED]}


def _gap(spec: dict[str, Any], difference: Difference) -> tuple[float | None, str]:
    from agentbench_kv.conformance.engines.gaps import decision_gap
    from agentbench_kv.errors import KVBenchError
    from agentbench_kv.spec import RunSpec

    known = {field.name for field in fields(RunSpec)}
    run = RunSpec(**{key: value for key, value in spec.items() if key in known})
    if difference.trial or difference.turn is None or difference.index is None:
        return None, "only first trials are played again"
    try:
        gap = decision_gap(
            run, difference.sample, difference.turn, difference.index, difference.tokens
        )
    except KVBenchError as error:
        return None, str(error)
    return gap, ""


def _print(found: Consistency) -> None:
    from agentbench_kv.results.terminal import console, new_table

    budget = "" if found.budget is None else f" at {found.budget}"
    console().print(f"{found.task}, {found.model}, {found.method}{budget}", markup=False)
    columns = ("engine", "run", "trials", "equal scores", "equal tokens", "score")
    rows = [
        (
            *(row.engine, row.run_id, row.trials, row.equal_scores),
            "not recorded" if row.equal_tokens is None else row.equal_tokens,
            None if row.score is None else f"{100 * row.score:.1f}%",
        )
        for row in found.rows
    ]
    console().print(new_table(*columns, rows=rows))
    if found.differences:
        columns = ("sample", "trial", "engine", "score", "first differing token", "logit gap")
        console().print(new_table(*columns, rows=map(_difference, found.differences)))


def _difference(each: Difference) -> tuple[object, ...]:
    mine, theirs = each.tokens
    place = f"turn {each.turn}, token {each.index}: {theirs} instead of {mine}"
    return (
        *(each.sample, each.trial, each.engine, f"{each.scores[0]:g} > {each.scores[1]:g}"),
        None if each.turn is None else place,
        each.note or (None if each.gap is None else f"{each.gap:.2e}"),
    )
