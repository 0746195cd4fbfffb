"""The pages as files: links, escaping, the policy, figures; the browser's own tests are apart."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.papers import figures
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.site import build_site
from agentbench_kv.results.site.charts import file_stem, visible
from agentbench_kv.results.site.runpage import overview, read_turns, session, timeline
from agentbench_kv.results.store import RunStore


class Page(HTMLParser):
    """What a browser would see: links, ids, text, and what is between script and style tags."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.links, self.ids, self.code, self.policy = [], [], set(), [], ""
        self.text = ""
        self._inside = None
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a":
            self.links.append(found["href"])
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        json = found.get("type") == "application/json"
        self._inside = tag if tag in {"script", "style"} and not json else None

    def handle_endtag(self, tag):  # noqa: ARG002
        self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.code.append((self._inside, data))
        else:
            self.text += data


@pytest.fixture(scope="module")
def site(site_runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return build_site(*load_runs([site_runs]), folder).parent


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def test_one_page_per_view(site, pages):
    names = {str(path.relative_to(site)) for path in pages}
    assert {"index.html", "tasks/micro_recall-1k.html", "runs/agentkv-200.html"} <= names
    assert len(names) == 1 + 2 + 7


def test_every_link_leads_to_a_page_and_a_place_of_the_site(pages):
    seen = 0
    for path, page in pages.items():
        for link in page.links:
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target in {each.resolve() for each in pages}, link
            assert not anchor or anchor in pages[target].ids, link
            seen += 1
    assert seen > 50


def test_the_policy_allows_the_inlined_code_and_nothing_else(pages):
    for page in pages.values():
        directives = dict(part.split(" ", 1) for part in page.policy.split("; "))
        assert directives["default-src"] == "'none'"
        assert "unsafe" not in page.policy
        for kind, code in page.code:
            digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in directives[f"{kind}-src"]
        assert not [attrs for _, attrs in page.tags if "style" in attrs]
        assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
        for tag, attrs in page.tags:
            assert "src" not in attrs, tag


def test_hostile_text_stays_text(pages):
    for path, page in pages.items():
        assert not [tag for tag, _ in page.tags if tag in {"img", "iframe", "object"}]
        assert not [link for link in page.links if not link.startswith(("../", "#"))
                    and not re.fullmatch(r"[\w./#@+-]+", link)]  # fmt: skip
        assert "\u202e" not in path.read_text("utf-8")
    shown = next(page.text for path, page in pages.items() if path.stem == "hostile")
    assert "<script>document.title = 'owned'</script>" in shown
    assert "\\u202egnp.exe\\u200f {{ 7 * 7 }}" in shown
    assert "more characters)" in shown


def test_a_long_line_does_not_make_a_long_page(pages):
    assert max(path.stat().st_size for path in pages if path.parent.name == "runs") < 100_000


def test_the_list_of_runs_shows_what_the_records_say(site_runs, site):
    runs, _ = load_runs([site_runs])
    listed = Page(site / "tasks" / "micro_recall-1k.html").text
    for run in runs:
        if run.setting.task == "micro/recall-1k":
            score = run.summary.score
            ends = f"{100 * score.point:.1f}% [{100 * score.low:.1f}, {100 * score.high:.1f}]"
            assert ends in listed
    assert "On no board. incomplete: 32 of 37 trials finished" in listed


def test_an_edited_summary_changes_no_page(site_runs, site, tmp_path):
    shutil.copytree(site_runs, tmp_path / "runs")
    for run in (tmp_path / "runs").iterdir():
        (run / "summary.json").write_text('{"score": {"point": 1.0, "low": 1.0, "high": 1.0}}')
    again = build_site(*load_runs([tmp_path / "runs"]), tmp_path / "site").parent
    for name in ("index.html", "tasks/micro_recall-1k.html", "runs/agentkv-200.html"):
        one, other = (Page(folder / name).text for folder in (site, again))
        assert one.partition("Built")[0] == other.partition("Built")[0]


def test_pass_k_of_repeated_trials_is_on_the_runs_page_and_its_tasks(tmp_path, spec, make_trial):
    kv = {"peak_live": 400, "logical": 1000, "events": 1, "longest_prefill": 90}
    with RunStore(tmp_path / "runs").open("again", spec, expected_trials=4) as run:
        for sample, scores in {"s0": (1.0, 1.0), "s1": (1.0, 0.0)}.items():
            for trial, score in enumerate(scores):
                run.append_trial(make_trial(sample, trial, score=score, kv=kv))
    folder = build_site(*load_runs([tmp_path / "runs"]), tmp_path / "site").parent
    pages = [path.read_text() for path in folder.rglob("*.html")]
    assert sum('id="pass-2"' in page for page in pages) == 1
    assert sum("<summary>pass^2</summary>" in page for page in pages) == 1


def test_published_figures_stand_beside_ours_marked_and_unranked(published_runs, tmp_path):
    folder = build_site(*load_runs([published_runs]), tmp_path).parent
    page = Page(folder / "tasks" / "bfcl_multi_turn_base.html")
    expected = [
        figure
        for figure in figures("accuracy_vs_budget")
        if figure.place == ("bfcl", "multi_turn_base", "Qwen3-8B")
    ]
    marked = [
        attrs for tag, attrs in page.tags if tag == "tr" and attrs.get("class") == "published"
    ]
    assert len(marked) == len(expected) > 5
    for figure in expected:
        assert f"{figure.value:.1f}%" in page.text
    assert "published" not in Page(folder / "index.html").text


def test_whose_run_it_is_stands_in_the_list_and_on_its_page(site_runs, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(site_runs, runs)
    (runs / "submissions").mkdir()
    manifest = {
        "schema": 1,
        "who": "Ann <b>Author",
        "method": "agentkv",
        "link": "https://example.org/paper",
        "runs": [{"run_id": "agentkv-200", "sha256": {}}],
    }
    (runs / "submissions" / "one.json").write_text(json.dumps(manifest))
    standing = {"run_id": "agentkv-200", "submission": "one", "records": "0" * 64, "notes": []}
    (runs / "submissions" / "checked").mkdir()
    (runs / "submissions" / "checked" / "one.json").write_text(
        json.dumps(standing | {"label": "self-reported"})
    )
    # Whoever only lists a run does not own it.
    (runs / "submissions" / "two.json").write_text(json.dumps(manifest | {"who": "Mallory"}))
    folder = build_site(*load_runs([runs]), tmp_path / "site").parent
    listed = Page(folder / "tasks" / "micro_recall-1k.html").text
    assert listed.count("Ann <b>Author") == 1
    assert "Mallory" not in listed
    page = Page(folder / "runs" / "agentkv-200.html")
    assert "Ann <b>Author" in page.text
    assert "https://example.org/paper" in page.links
    assert "Ann" not in Page(folder / "runs" / "agentkv-400.html").text


def test_problems_are_listed(site_runs, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(site_runs / "full-None", runs / "a")
    (runs / "b").mkdir()
    (runs / "b" / "run.json").write_text("<b>not json")
    index = build_site(*load_runs([runs]), tmp_path / "site")
    assert "is not a kvbench run record" in Page(index).text


def test_rebuilding_removes_pages_of_runs_that_are_gone(site_runs, tmp_path):
    runs, problems = load_runs([site_runs])
    build_site(runs, problems, tmp_path)
    foreign = tmp_path / "runs" / "mine.html"
    foreign.write_bytes(b'<meta name="generator" content="other">\xff')
    build_site(runs[:2], problems, tmp_path)
    assert len(list(tmp_path.glob("runs/*.html"))) == 2 + 1
    assert foreign.exists()


def test_equal_run_ids_get_pages_of_their_own(site_runs, tmp_path):
    for place in ("a", "b"):
        shutil.copytree(site_runs / "full-None", tmp_path / place)
    build_site(*load_runs([tmp_path / "a", tmp_path / "b"]), tmp_path / "site")
    assert len(list((tmp_path / "site").glob("runs/*.html"))) == 2


def test_bad_targets_are_one_line(site_runs, tmp_path):
    runs, problems = load_runs([site_runs])
    with pytest.raises(UsageError, match="no runs"):
        build_site([], problems, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        build_site(runs, problems, tmp_path / "file")
    with pytest.raises(PrerequisiteError):
        build_site(runs[:1], problems, tmp_path / "file" / "below")


def test_invisible_characters_are_spelt():
    assert visible("a\u202eb\x1b[31m\x00\u200f\ufeff") == "a\\u202eb\\x1b[31m\\x00\\u200f\\ufeff"
    assert visible("two\nlines\tand שלום") == "two\nlines\tand שלום"
    assert visible("x" * 30, limit=10) == "x" * 10 + " … (20 more characters)"


def test_file_names_are_safe_and_distinct():
    taken = set()
    names = ["a", "A", "a/b", "a_b", "../..", "..", "", "x" * 900, "con\u202e"]
    stems = [file_stem(name, taken) for name in names]
    assert len({stem.lower() for stem in stems}) == len(names)
    assert all(re.fullmatch(r"[\w@+.-]{1,160}", stem) and stem[0] != "." for stem in stems)


def test_turns_of_the_last_attempt_count_and_damage_is_skipped(tmp_path):
    path = tmp_path / "turns.jsonl"
    line = '{{"sample_id":"{}","trial":0,"turn":{},"live_after":{},"events":{},"evicted":{}}}'
    turns = [("a", 0, 5, 0, 0), ("a", 0, 10, 0, 0), ("a", 1, 20, 1, 7), ("b", 0, 30, 0, 0)]
    path.write_text("\n".join(["garbage", *(line.format(*turn) for turn in turns), '{"samp']))
    trials = read_turns(path)
    assert [[turn.live_after for turn in trial] for trial in trials] == [[10, 20], [30]]
    figures = overview(trials)
    assert [(f.trials, f.low, f.median, f.high) for f in figures] == [
        (2, 10, 20, 30),
        (1, 20, 20, 20),
    ]
    assert (figures[1].events, figures[1].evicted) == (1, 7)
    assert read_turns(tmp_path / "none") == []
    assert [len(trial) for trial in read_turns(path, most=5)] == [2]


def test_a_session_is_drawn_up_and_then_down_by_what_was_evicted(tmp_path):
    path = tmp_path / "turns.jsonl"
    line = '{{"sample_id":"a","trial":0,"turn":{},"live_after":{},"events":{},"evicted":{}}}'
    path.write_text("\n".join(line.format(*turn) for turn in [(0, 50, 0, 0), (1, 40, 1, 60)]))
    (trial,) = read_turns(path)
    drawn = session(trial, 40)
    points = [tuple(map(float, point.split(","))) for point in drawn.line.split()]
    assert points[1][0] == points[2][0]
    top, budget = points[1][1], points[2][1]
    assert budget == drawn.budget
    assert (budget - top) / (points[2][1] - points[0][1]) == pytest.approx(60 / 10, rel=0.01)
    assert [mark[2] for mark in drawn.marks] == ["turn 1: 1 events, 60 tokens evicted"]
    assert len(timeline(overview([trial]), None).band.split()) == 4


def test_the_axis_of_a_run_is_in_bytes_where_they_are_known(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text('{"sample_id":"a","trial":0,"turn":0,"live_after":50,"events":0,"evicted":0}')
    (trial,) = read_turns(path)
    plain, sized = (timeline(overview([trial]), 40, size) for size in (None, 12_000.0))
    assert [text for _, text in plain.y_ticks] == ["0", "20", "40", "60"]
    assert [text for _, text in sized.y_ticks] == ["0 MB", "0.2 MB", "0.4 MB", "0.6 MB"]
    # 50 tokens of 60, and 0.6 MB of 0.6.
    places = [float(chart.line.split(",")[1]) for chart in (plain, sized)]
    assert sized.y_ticks[-1][0] == places[1] < places[0]
    assert session(trial, None, 12_000.0).y_ticks == sized.y_ticks
