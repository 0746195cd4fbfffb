"""All tables of a set of runs, in the order people read them."""

from __future__ import annotations

from collections.abc import Sequence

from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.results.arms import Arm, Problem
from agentbench_kv.results.tables.accuracy import accuracy_tables
from agentbench_kv.results.tables.curves import curve_tables
from agentbench_kv.results.tables.measured import SCORE, Measured, measure
from agentbench_kv.results.tables.model import Kind, Table
from agentbench_kv.results.tables.passes import pass_tables
from agentbench_kv.results.tables.perrun import efficiency_tables, throughput_tables

__all__ = ["report_tables"]


def report_tables(
    arms: Sequence[Arm], kinds: Sequence[Kind] = (), metrics: Sequence[str] = ()
) -> tuple[list[Table], list[Problem]]:
    """Build the tables of some runs.

    Parameters
    ----------
    arms : sequence of Arm
    kinds : sequence of Kind
        Which families; all if empty.
    metrics : sequence of str
        `score` and sub-scores for the accuracy tables; the score if empty.

    Returns
    -------
    tables : list of Table
        Those that have data.
    problems : list of Problem
        Summaries that contradict their records.

    Raises
    ------
    UsageError
        If no run has a metric, or there is nothing to show.
    """
    wanted = list(dict.fromkeys(metrics)) or [SCORE]
    _check(arms, wanted)
    measured, problems = measure(arms, wanted)
    chosen = [kind for kind in Kind if kind in (kinds or Kind)]
    tables = [table for kind in chosen for table in _build(kind, measured, wanted)]
    if not tables:
        asked = ", ".join(kind.value for kind in chosen)
        raise UsageError(f"nothing to show of {len(arms)} runs in {asked}")
    return tables, problems


def _build(kind: Kind, measured: Sequence[Measured], metrics: Sequence[str]) -> list[Table]:
    if kind is Kind.ACCURACY:
        tables = [table for metric in metrics for table in accuracy_tables(measured, metric)]
        return tables + (pass_tables(measured) if SCORE in metrics else [])
    builders = {
        Kind.EFFICIENCY: efficiency_tables,
        Kind.THROUGHPUT: throughput_tables,
        Kind.CURVES: curve_tables,
    }
    return builders[kind](measured)


def _check(arms: Sequence[Arm], metrics: Sequence[str]) -> None:
    known = {SCORE} | {name for arm in arms for name in arm.summary.sub_scores}
    for metric in metrics:
        if metric not in known:
            raise unknown_name("metric", metric, known)
