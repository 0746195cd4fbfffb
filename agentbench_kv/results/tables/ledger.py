"""What a memory costs: reading the past and answering behind it, with what reads all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentbench_kv.results.runs import Run, Setting, by_setting, variants
from agentbench_kv.results.tables.costs import budget_text
from agentbench_kv.results.tables.floors import OFF, floor_name, floor_of
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, setting_table

LEGEND = (
    "read: what a memory took to take in the past, mean of the trials that it was timed in, which "
    "no failed one is, or else of all: requests made for nothing else, tokens prefilled and "
    "generated, seconds; of past sessions that came from files, what it took to make these. Empty "
    "where the past is read in the session itself: its tokens are prefilled ones, and in an "
    "answer's cache",
    "appended: rows of finished turns that a memory took as they were, and the seconds that it did "
    "so beside the agent; nothing is read for them",
    "an answer: mean over answers; live MB: of its cache, at the bytes that a token takes at the "
    "run's peak; TTFT: with the memory's search",
)
HOSTED = (
    "mem0, graphiti: the open packages, with the run's own model and encoder; they are not the "
    "services that their makers host (graphiti: Zep)"
)
# Columns by the ledger's figures (`Summary.ledger`).
_READ = {
    "ingest_calls": Column("read: calls", Unit.RATIO),
    "ingest_tokens": Column("tokens", Unit.TOKENS),
    "ingest_s": Column("seconds", Unit.SECONDS),
}
_RARE = {  # shown where any run has them
    "ingest_failed": Column("parts lost", Unit.RATIO),
    "ingest_files": Column("from files", Unit.RATIO),
    "ingest_files_s": Column("their seconds", Unit.SECONDS),
    "append_tokens": Column("appended", Unit.TOKENS),
    "append_s": Column("beside, seconds", Unit.SECONDS),
}
_LIVE, _LIVE_MB = "answer_live_tokens", "answer_live_mb"
_ANSWER = {
    "answer_prefill_tokens": Column("an answer: prefilled", Unit.TOKENS),
    _LIVE_MB: Column("live MB", Unit.MEGABYTES),
    _LIVE: Column("live", Unit.TOKENS),
    "answer_ttft_ms": Column("TTFT ms", Unit.MILLISECONDS),
}


def ledger_tables(runs: Sequence[Run]) -> list[Table]:
    """Return what past sessions cost for every setting in which a memory has run.

    Runs without a memory (`full`, and its last N sessions or turns) stand beside, as far as they
    recorded anything.
    """
    return [
        _ledger(setting, [run for run in same if run.summary.ledger])
        for setting, same in by_setting(runs).items()
        if any(run.remembers and run.summary.ledger for run in same)
    ]


def _ledger(setting: Setting, runs: Sequence[Run]) -> Table:
    rare = {k: each for k, each in _RARE.items() if any(r.summary.ledger.get(k) for r in runs)}
    figures = _READ | rare | _ANSWER
    several = len({run.summary.seed for run in runs}) > 1
    rows = []
    for run, label in zip(runs, _labels(runs), strict=True):
        texts = (label, budget_text(run), *[str(run.summary.seed)] * several)
        # Only a memory reads apart from answering.
        known = run.summary.ledger | _live_megabytes(run)
        own = {k: known.get(k) for k in figures if run.remembers or k in _ANSWER}
        cells = (Cell(own.get(name)) for name in figures)
        rows.append(Row((*map(Cell, texts), Cell(run.summary.trials), *cells), run.reason))
    columns = (
        *map(Column, ("method", "budget", *["seed"] * several)),
        Column("trials", Unit.NUMBER),
        *figures.values(),
    )
    what = "what a memory costs"
    apart = ("ledger",)
    legend = [*LEGEND, *hosted(runs)]
    return setting_table(Kind.EFFICIENCY, what, setting, columns, rows, legend=legend, apart=apart)


def hosted(runs: Iterable[Run]) -> list[str]:
    """Return what is to be said under a table with a package whose makers host something else."""
    return [HOSTED] * any(run.summary.method in ("mem0", "graphiti") for run in runs)


def _live_megabytes(run: Run) -> dict[str, float]:
    size, tokens = run.summary.kv and run.summary.kv.token_bytes, run.summary.ledger.get(_LIVE)
    return {_LIVE_MB: tokens * size / 1e6} if size and tokens is not None else {}


def _labels(runs: Sequence[Run]) -> list[str]:
    """Name each run: floors as under a table of scores, if that tells them apart."""
    whole = [run for run in runs if floor_of(run) == OFF]
    names = {id(run): name for run, name in zip(whole, variants(whole), strict=True)}
    alike: dict[str, list[Run]] = {}
    for run in runs:
        if floor_of(run) != OFF:
            alike.setdefault(f"{run.method}, {floor_name(run)}", []).append(run)
    for name, same in alike.items():
        own = variants(same)
        several = len(set(own)) > 1
        names |= {id(run): each if several else name for run, each in zip(same, own, strict=True)}
    return [names[id(run)] for run in runs]
