"""`build_site`: a folder of pages from runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from agentbench_kv.errors import UsageError
from agentbench_kv.results.runs import Problem, Run
from agentbench_kv.results.site import runpage
from agentbench_kv.results.site.contests import Contest
from agentbench_kv.results.site.pages import Pages
from agentbench_kv.results.site.text import file_stem, visible
from agentbench_kv.results.site.views import View, published, views
from agentbench_kv.results.submissions import labels, replications, submissions

_FLOOR = "An agent that does nothing: what the task gives for free."


@dataclass(frozen=True)
class Listed:
    """A run as the list of all runs has it."""

    run: Run
    label: str  # what its method is called
    page: str  # relative to the site's root
    submission: str  # what is known of where it comes from, and where to read more; or empty
    link: str
    view: View | None = None  # the board it is on
    contest: Contest | None = None  # where it competes, and its place there
    place: str = ""
    reason: str = ""  # why it is on no board


def build_site(runs: Sequence[Run], problems: Sequence[Problem], folder: Path) -> Path:
    """Write a static site: what each task answers, a page per task, a page per run.

    Pages are self-contained: they open from disk, load nothing, and run only the scripts they were
    built with. Pages that an earlier build left for runs that are gone are removed. Returned is the
    first page. A UsageError if there are no runs or `folder` is a file.
    """
    if not runs:
        raise UsageError("no runs to report")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder for the site")
    seen = views(runs)
    listed = _listed(runs, seen)
    stems: set[str] = set()
    names = sorted({run.setting.task for run in runs})
    tasks = {name: f"tasks/{file_stem(name.replace('/', '_'), stems)}.html" for name in names}
    addresses = {id(each.run): each.page for each in listed}
    built = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    shared = {"tasks": tasks, "built": built, "address": lambda run: addresses[id(run)]}
    pages = Pages(folder, shared)
    for each in listed:
        place = {"listed": each, "task_page": tasks[each.run.setting.task]}
        pages.write(each.page, "run.html", runpage.context(each.run, problems) | place)
    by_task: dict[str, list[View]] = {name: [] for name in names}
    for view in seen:
        by_task[view.board.setting.task].append(view)
    for name, address in tasks.items():
        own = [each for each in listed if each.run.setting.task == name]
        _write_task(pages, name, address, by_task[name], own)
    context = {
        "by_task": by_task,
        "problems": problems,
        "runs": len(runs),
        "trials": sum(run.summary.trials for run in runs),
    }
    index = pages.write("index.html", "index.html", context)
    pages.drop_stale()
    return index


def _listed(runs: Sequence[Run], seen: Sequence[View]) -> list[Listed]:
    """Give every run its page, its name and its place."""
    places: dict[int, tuple[View | None, Contest | None, str, str]] = {}
    reasons: dict[int, str] = {}
    for view in seen:
        contests = {id(r.entry): c for c in view.budgets for r in c.ranks}
        reasons |= {id(run): reason for run, reason in view.board.out}
        for entry in view.board.entries:
            contest = contests.get(id(entry))
            place = contest.place(entry) if contest else ""
            for run in entry.group.runs:
                places.setdefault(id(run), (view, contest, place, entry.group.label))
    submitted = {folder: _submitted(folder) for folder in {run.path.parent for run in runs}}
    stems: set[str] = set()

    def listed(run: Run) -> Listed:
        view, contest, place, label = places.get(id(run), (None, None, "", run.label))
        reason = reasons.get(id(run), run.reason or _FLOOR)
        return Listed(
            run,
            visible("null agent" if run.setting.null else label, 160),
            f"runs/{file_stem(run.run_id, stems)}.html",
            *submitted[run.path.parent].get(run.run_id, ("", "")),
            view,
            contest,
            place,
            "" if view else reason,
        )

    return [listed(run) for run in runs]


def _submitted(folder: Path) -> dict[str, tuple[str, str]]:
    """Return what is known of each submitted run of a folder, and its link, by run id.

    That is whose it is, how far the keeper checked it, and what others got who ran it again.
    """
    checked, again = labels(folder), replications(folder)
    found = {}
    for name, manifest in submissions(folder).items():
        parts = [checked.get(name, "not checked"), f"submitted by {manifest.who}"]
        parts += [
            f"replicated by {other.who}: score {100 * other.score:.1f}, tokens equal in "
            f"{other.equal} of {other.trials} trials ({other.label})"
            for other in again.get(name, ())
        ]
        found[name] = ("; ".join(parts), manifest.link)
    return found


def _write_task(
    pages: Pages, task: str, address: str, own: Sequence[View], listed: Sequence[Listed]
) -> None:
    models = dict.fromkeys(view.board.setting.model for view in own)
    settings = {each.run.setting for each in listed if not each.run.setting.null}
    context = {
        "task": task,
        "views": own,
        "listed": listed,
        "several": len(settings) > 1,
        "submitted": any(each.submission for each in listed),
        "published": [figure for model in models for figure in published(task, model)],
    }
    pages.write(address, "task.html", context, ["table.js"])
