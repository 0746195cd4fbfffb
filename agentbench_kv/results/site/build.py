"""`build_site`: a folder of pages from runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.results.arms import Arm, Problem, set_apart
from agentbench_kv.results.site import runpage
from agentbench_kv.results.site.pages import CHARTS, Pages
from agentbench_kv.results.site.ranking import standings
from agentbench_kv.results.site.rows import Row, chart_cell, rows
from agentbench_kv.results.site.text import file_stem, visible
from agentbench_kv.results.submissions import submissions

__all__ = ["build_site"]


def build_site(arms: Sequence[Arm], problems: Sequence[Problem], folder: Path) -> Path:
    """Write a static site: leaderboard, a page per task with charts, a page per run.

    Pages are self-contained: they open from disk, load nothing, and run only the scripts they were
    built with. Pages that an earlier build left for runs that are gone are removed.

    Parameters
    ----------
    arms : sequence of Arm
        The runs, as `load_arms` returns them.
    problems : sequence of Problem
        What could not be loaded; listed on the first page.
    folder : Path
        Made if it does not exist.

    Returns
    -------
    Path
        The first page, `index.html`.

    Raises
    ------
    UsageError
        If there are no runs or `folder` is a file.
    PrerequisiteError
        If a page cannot be written.
    """
    if not arms:
        raise UsageError("no runs to report")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder for the site")
    placed = standings(arms)
    stems: set[str] = set()
    addresses = {id(arm): f"runs/{file_stem(arm.run_id, stems)}.html" for arm in arms}
    # A label asks the method's registry for its defaults: once a run is enough.
    apart = {which: f" [{text}]" * bool(text) for which, text in set_apart(arms).items()}
    labels = {id(arm): visible(f"{arm.label}{apart[id(arm)]}", 160) for arm in arms}
    table = rows(placed, addresses, labels)
    tasks = _task_pages(table)
    built = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    pages = Pages(folder, {"tasks": tasks, "built": built})
    _write_runs(pages, table, tasks, problems)
    for task, address in tasks.items():
        _write_task(pages, task, address, [row for row in table if row.cell.task == task])
    index = _write_index(pages, arms, table, problems)
    pages.drop_stale()
    return index


def _task_pages(table: Sequence[Row]) -> dict[str, str]:
    stems: set[str] = set()
    names = sorted({row.cell.task for row in table})
    return {name: f"tasks/{file_stem(name.replace('/', '_'), stems)}.html" for name in names}


def _write_runs(
    pages: Pages, table: Sequence[Row], tasks: Mapping[str, str], problems: Sequence[Problem]
) -> None:
    measured = [(row, row.standing) for row in table if row.standing is not None]
    folders = {standing.arm.path.parent for _, standing in measured}
    submitted = {folder: submissions(folder) for folder in folders}
    for row, standing in measured:
        arm = standing.arm
        context = runpage.context(standing, problems) | {
            "label": row.method,
            "task_page": tasks[row.cell.task],
            "submission": submitted[arm.path.parent].get(arm.run_id),
        }
        pages.write(row.page, "run.html", context)


def _write_index(
    pages: Pages, arms: Sequence[Arm], table: Sequence[Row], problems: Sequence[Problem]
) -> Path:
    context = {
        "rows": table,
        "choices": _choices(table),
        "problems": problems,
        "runs": len(arms),
        "trials": sum(arm.summary.trials for arm in arms),
        "methods": len({arm.method for arm in arms}),
    }
    return pages.write("index.html", "index.html", context, ["table.js"])


def _write_task(pages: Pages, task: str, address: str, table: Sequence[Row]) -> None:
    shown = sorted((row for row in table if row.standing is not None), key=_place)
    cells = []
    for (model, engine), group in groupby(shown, _place):
        cells.append({"model": model, "engine": engine} | chart_cell(group, task, model))
    context = {"task": task, "rows": table, "choices": _choices(table), "cells": cells}
    pages.write(address, "task.html", context, [*CHARTS, "table.js"])


def _place(row: Row) -> tuple[str, str]:
    return row.cell.model, row.cell.engine


def _choices(table: Sequence[Row]) -> dict[str, list[Any]]:
    """Return what each filter offers; one with a single choice is left out."""
    columns = {
        "task": [row.cell.task for row in table],
        "model": [row.cell.model for row in table],
        "engine": [row.cell.engine for row in table],
        "method": [row.method for row in table],
    }
    offered: dict[str, list[Any]] = {name: sorted(set(all_)) for name, all_ in columns.items()}
    tiers = {row.standing.tier: row.tier for row in table if row.standing and row.tier}
    offered["tier"] = [tiers[index] for index in sorted(tiers, key=lambda index: index or 0)]
    return {name: values for name, values in offered.items() if len(values) > 1}
