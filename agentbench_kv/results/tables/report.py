"""All tables of a set of runs, in the order people read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.results.runs import SCORE, Run
from agentbench_kv.results.tables.accuracy import accuracy_tables, pass_tables
from agentbench_kv.results.tables.costs import efficiency_tables, throughput_tables
from agentbench_kv.results.tables.curves import curve_tables
from agentbench_kv.results.tables.model import Kind, Table


def report_tables(
    runs: Sequence[Run], kinds: Sequence[Kind] = (), metrics: Sequence[str] = ()
) -> list[Table]:
    """Build the tables that have data: all kinds if none is named, of the score if no metric is.

    A UsageError if no run has a metric, or there is nothing to show.
    """
    wanted = list(dict.fromkeys(metrics)) or [SCORE]
    known = {SCORE} | {name for run in runs for name in run.summary.sub_scores}
    for metric in wanted:
        if metric not in known:
            raise unknown_name("metric", metric, known)
    builders: dict[Kind, Callable[[Sequence[Run]], list[Table]]] = {
        Kind.ACCURACY: partial(_accuracy, wanted),
        Kind.EFFICIENCY: efficiency_tables,
        Kind.THROUGHPUT: throughput_tables,
        Kind.CURVES: curve_tables,
    }
    chosen = [kind for kind in Kind if kind in (kinds or Kind)]
    tables = [table for kind in chosen for table in builders[kind](runs)]
    if not tables:
        asked = ", ".join(kind.value for kind in chosen)
        raise UsageError(f"nothing to show of {len(runs)} runs in {asked}")
    return tables


def _accuracy(metrics: Sequence[str], runs: Sequence[Run]) -> list[Table]:
    tables = [table for metric in metrics for table in accuracy_tables(runs, metric)]
    return tables + (pass_tables(runs) if SCORE in metrics else [])
