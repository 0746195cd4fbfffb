"""A folder of pages from runs: everything inlined, and nothing runs that was not built in."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentbench_kv import __version__
from agentbench_kv.errors import UsageError
from agentbench_kv.results.fidelity import KL, divergence
from agentbench_kv.results.files import writing
from agentbench_kv.results.papers import quality
from agentbench_kv.results.runs import Problem, Run, RunGroup
from agentbench_kv.results.site import runpage
from agentbench_kv.results.site.boards import BoardView, Contest, family, views
from agentbench_kv.results.site.charts import (
    file_stem,
    in_nats,
    number,
    percent,
    spelled,
    visible,
)
from agentbench_kv.results.site.tokenline import token_line
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.submissions import labels, replications, submissions
from agentbench_kv.results.tables.ledger import ledger_tables
from agentbench_kv.results.tables.model import headings, lines
from agentbench_kv.results.tables.parts import part_tables
from agentbench_kv.results.terminal import megabytes

_MARK = '<meta name="generator" content="kvbench '
_FLOOR = "An agent that does nothing: what the task gives for free."


@dataclass(frozen=True)
class Listed:
    """A run as the list of all runs has it."""

    run: Run
    label: str  # what its method is called
    page: str  # relative to the site's root
    submission: str  # what is known of where it comes from, and where to read more; or empty
    link: str
    view: BoardView | None = None  # the board it is on
    contest: Contest | None = None  # where it competes, and its place there
    place: str = ""
    reason: str = ""  # why it is on no board
    nats: Interval | None = None  # of a run of fidelity, which competes by them and has no place


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
        of_tokens = KL in each.run.means
        place["token_line"] = token_line(each.run.path, each.run.records()) if of_tokens else None
        pages.write(each.page, "run.html", runpage.context(each.run, problems) | place)
    by_task: dict[str, list[BoardView]] = {name: [] for name in names}
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


def _listed(runs: Sequence[Run], seen: Sequence[BoardView]) -> list[Listed]:
    """Give every run its page, its name and its place."""
    places: dict[int, tuple[BoardView | None, Contest | None, str, str]] = {}
    reasons: dict[int, str] = {}
    for view in seen:
        ranked = [] if view.distance else view.budgets
        contests = {id(r.entry): c for c in ranked for r in c.ranks}
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
        reason = "" if view else reasons.get(id(run), run.reason or _FLOOR)
        name = visible("null agent" if run.setting.null else label, 160)
        page = f"runs/{file_stem(run.run_id, stems)}.html"
        submission = submitted[run.path.parent].get(run.run_id, ("", ""))
        found = divergence(RunGroup(label, (run,)))
        nats = None if found is None else found.means[KL]
        return Listed(run, name, page, *submission, view, contest, place, reason, nats)

    return [listed(run) for run in runs]


def _submitted(folder: Path) -> dict[str, tuple[str, str]]:
    """Return whose a submitted run is, how far checked, who replicated it, and its link; by id."""
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
    pages: Pages, task: str, address: str, own: Sequence[BoardView], listed: Sequence[Listed]
) -> None:
    models = dict.fromkeys(view.board.setting.model for view in own)
    settings = {each.run.setting for each in listed if not each.run.setting.null}
    runs = [each.run for each in listed]
    context = {
        "task": task,
        "views": own,
        "listed": listed,
        "several": len(settings) > 1,
        "of_fidelity": any(each.nats for each in listed),
        "asks": any(each.run.summary.asks for each in listed),
        "submitted": any(each.submission for each in listed),
        "published": [figure for model in models for figure in quality(task, model)],
        "quality": part_tables(runs),
        "ledgers": ledger_tables(runs),
    }
    pages.write(address, "task.html", context, ["table.js"])


class Pages:
    """Writes the pages of one site to a folder; every template sees what is `shared`."""

    def __init__(self, folder: Path, shared: dict[str, Any]) -> None:
        self.folder = folder
        self.written: set[Path] = set()
        self._shared = shared
        self._environment = _environment()

    def write(
        self, name: str, template: str, context: dict[str, Any], scripts: Sequence[str] = ()
    ) -> Path:
        """Render a template to `name`, a path relative to the site's root."""
        path = self.folder / name
        style, theme = _asset("site.css"), _asset("theme.js")
        code = [_asset(script) for script in scripts]
        html = self._environment.get_template(template).render(
            self._shared,
            root="../" * name.count("/"),
            page=name,
            generator=Markup(f'{_MARK}{__version__}">'),
            policy=_policy((theme, *code), style),
            style=style,
            theme=theme,
            scripts=code,
            **context,
        )
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(html, encoding="utf-8", newline="\n")
        self.written.add(path)
        return path

    def drop_stale(self) -> None:
        """Remove pages of an earlier build whose run or task is no longer in the report."""
        for path in (*self.folder.glob("runs/*.html"), *self.folder.glob("tasks/*.html")):
            with writing(path):
                if path not in self.written and _MARK.encode() in path.read_bytes()[:4000]:
                    path.unlink()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("agentbench_kv.results.site"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (visible, percent, in_nats, number, megabytes, spelled, family, headings, lines)
    environment.filters |= {each.__name__: each for each in filters}
    return environment


@cache
def _asset(name: str) -> Markup:
    """Return a file of the package as it goes between tags; never anything from a run."""
    text = files("agentbench_kv.results.site").joinpath("static", name).read_text("utf-8")
    return Markup(text)


@cache
def _policy(scripts: tuple[str, ...], style: str) -> str:
    """Return a Content-Security-Policy that allows the inlined parts and nothing else."""
    digests = [hashlib.sha256(text.encode()).digest() for text in (style, *scripts)]
    own, *code = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    allowed = f"script-src {' '.join(code)}; style-src {own}"
    return f"default-src 'none'; {allowed}; img-src data:; base-uri 'none'; form-action 'none'"
