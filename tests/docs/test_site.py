"""The docs site: built without a warning, no link broken, nothing loaded from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import click
import pytest
import yaml

from agentbench_kv import __version__
from agentbench_kv.cli import VERBS, kvbench
from agentbench_kv.registry import load_method, load_task, names
from agentbench_kv.results.frame import COLUMNS

ROOT = Path(__file__).parents[2]
KVBENCH = (sys.executable, "-c", "from agentbench_kv.cli import main; main()")
HERE = "site.invalid"
LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@dataclass
class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=set)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.places |= {known[name] for name in ("id", "name") if name in known}
        if tag == "a" and "href" in known:
            self.links.append(known["href"])
        if tag in LOADING and LOADING[tag] in known and known.get("rel") != "canonical":
            self.loads.append(known[LOADING[tag]])

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


def broken(pages: dict[str, Page], files: set[str]) -> list[tuple[str, str]]:
    """Return every link and load that leads nowhere, with its page; the web is not asked."""
    found = []
    for name, page in pages.items():
        for target in [*page.links, *page.loads]:
            parts = urlsplit(urljoin(f"http://{HERE}/{name}", target))  # joins no other schemes
            if parts.netloc != HERE:
                continue
            path = unquote(parts.path).lstrip("/") or "index.html"
            path += "index.html" if path.endswith("/") else ""
            place = unquote(parts.fragment)
            leads = path in files and (
                not place or path not in pages or place in pages[path].places
            )
            if not leads:
                found.append((name, target))
    return found


def foreign(pages: dict[str, Page]) -> list[str]:
    return [load for page in pages.values() for load in page.loads if urlsplit(load).netloc]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site, into DOCS_SITE where that is set: what CI leaves is what was tested."""
    pytest.importorskip("material", reason="no mkdocs-material: pip install -e '.[docs]'")
    where = os.environ.get("DOCS_SITE") or str(tmp_path_factory.mktemp("site") / "site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", where],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return Path(where)


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    files = site.rglob("*.html")
    return {str(each.relative_to(site)): read(each.read_text("utf-8")) for each in files}


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site, pages):
    files = {str(each.relative_to(site)) for each in site.rglob("*") if each.is_file()}
    assert len(pages) > 100
    # The page for what is not found is served at any address, so its links begin at the root.
    assert broken({name: page for name, page in pages.items() if name != "404.html"}, files) == []


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site, pages):
    assert foreign(pages) == []
    sheets = [each.read_text("utf-8") for each in site.rglob("*.css")]
    assert sheets
    assert not [sheet for sheet in sheets if "url(http" in sheet or "@import" in sheet]


@pytest.mark.slow
def test_the_reference_has_every_option_of_every_command(pages):
    for verb in VERBS:
        command = kvbench.get_command(click.Context(kvbench), verb)
        text = pages[f"reference/cli/{verb}.html"].text
        assert "Sentinel" not in text  # click's word for: no default
        for each in [command, *getattr(command, "commands", {}).values()]:
            for option in each.params:
                if isinstance(option, click.Option):
                    assert option.opts[0] in text, (each.name, option.opts)


@pytest.mark.slow
def test_the_reference_has_every_method_task_and_column(pages):
    methods, tasks = (pages[f"reference/{kind}.html"].text for kind in ("methods", "tasks"))
    for name in names("method"):
        cls = load_method(name)
        assert cls.summary in methods, name
        for parameter in cls.parameters().values():
            assert parameter.doc in methods, (name, parameter.name)
    for name in names("task"):
        for parameter in load_task(name).parameters().values():
            assert parameter.doc in tasks, (name, parameter.name)
    columns = pages["reference/columns.html"].text
    for column in COLUMNS:
        assert column.name in columns, column.name
        assert column.meaning.replace("`", "") in columns, column.name


@pytest.mark.slow
def test_the_schemas_accept_what_a_run_wrote_and_refuse_what_it_did_not(site, tmp_path):
    jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema: pip install -e '.[docs]'")
    play = "run --engine scripted --model gold --task micro/recall-1k --limit 1 --quiet --out runs"
    for command in (play, "baseline save gold runs"):
        subprocess.run([*KVBENCH, *command.split()], cwd=tmp_path, check=True, capture_output=True)
    (run,) = (tmp_path / "runs").iterdir()
    files = {"run": "run.json", "trial": "samples.jsonl", "turn": "turns.jsonl"}
    files |= {"summary": "summary.json", "baseline": "../../baselines/gold.json"}
    for kind, file in files.items():
        schema = json.loads((site / f"reference/schemas/{kind}.json").read_text())
        text = (run / file).read_text()
        for each in text.splitlines() if file.endswith("jsonl") else [text]:
            document = json.loads(each)
            jsonschema.validate(document, schema)
            needed = next(iter(document))  # the first field of each has no default
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**document, needed: []}, schema)


def test_a_broken_link_a_lost_anchor_and_a_foreign_script_are_seen():
    page = read(
        '<a href="b.html#here">x</a><a href="b.html#gone">x</a><a href="c.html">x</a>'
        '<a href="https://example.org/">x</a><script src="https://example.org/x.js"></script>'
    )
    pages = {"a.html": page, "b.html": read('<h1 id="here">y</h1>')}
    files = {"a.html", "b.html"}
    assert broken(pages, files) == [("a.html", "b.html#gone"), ("a.html", "c.html")]
    assert foreign(pages) == ["https://example.org/x.js"]


def test_the_readme_has_two_commands_one_picture_and_five_links():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("```bash\n") == 2
    assert text.count("![") == 1
    assert text.count("](") == 1 + 5


def test_the_citation_is_of_this_version_and_date():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == __version__
    assert f"## {__version__} ({cited['date-released']})" in (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (cited["license"], cited["keywords"]) == (project["license"], project["keywords"])
