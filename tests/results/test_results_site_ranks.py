"""Who leads, as the pages say it: the attacks of tests of ranks, read off the HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.site import build_site
from agentbench_kv.results.site.boards import by_tier, tier_name, views
from agentbench_kv.results.store import RunStore

Make = Callable[..., None]
NAMES = [f"s{i}" for i in range(60)]


class Tables(HTMLParser):
    """Text of every table by class or id, as rows of cells; and of the list of answers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[list[str]]]] = []
        self.answers: list[str] = []
        self._into: list[str] | None = None
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "table":
            self.tables.append((found.get("id") or found.get("class") or "", []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in {"td", "th"}:
            self._into = self.tables[-1][1][-1]
            self._into.append("")
        elif tag == "li":
            self._into = self.answers
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in {"td", "th", "li"}:
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into:
            self._into[-1] += data

    def rows(self, name: str, number: int = 0) -> dict[str, list[str]]:
        """Return the cells of a table's rows, by the first cell."""
        table = [rows for kind, rows in self.tables if kind == name][number]
        return {row[0].strip(): [" ".join(cell.split()) for cell in row[1:]] for row in table}


class Site:
    """The pages of one task."""

    def __init__(self, runs: Path, folder: Path) -> None:
        found, problems = load_runs([runs])
        assert not problems
        build_site(found, problems, folder)
        self.index = Tables(folder / "index.html")
        (page,) = folder.glob("tasks/*.html")
        self.task = Tables(page)

    @property
    def matrix(self) -> dict[str, list[str]]:
        """Cells of the first page's matrix, intervals left out."""
        rows = self.index.rows("matrix")
        return {
            name: [cell.rpartition(" ")[0] or cell for cell in cells]
            for name, cells in rows.items()
            if name != "Method"
        }

    @property
    def answers(self) -> list[str]:
        return [" ".join(each.split()) for each in self.index.answers]

    @property
    def out(self) -> list[str]:
        """Reasons in the list of runs."""
        listed = self.task.rows("runs")
        return [name for name in listed if name.startswith("On no board.")]


@pytest.fixture
def make(tmp_path: Path, spec: dict[str, Any], make_trial: Callable[..., TrialRecord]) -> Make:
    """Write a run of a method: `right` are the samples it gets right, of `samples`."""

    def write(
        name: str,
        right: Iterable[str],
        samples: Sequence[str] = NAMES,
        peak: int | None = None,
        prompt: str = "",
        tokens: int = 0,
        **changes: Any,
    ) -> None:
        known, own = set(right), spec | {"seed": 0, "method": name} | changes
        live = peak or (1000 if own["budget"] is None else own["budget"] + 100)
        kv = {"peak_live": live, "logical": 1000, "events": int(live < 1000), "longest_prefill": 90}
        kv["decode_tokens"] = tokens // len(samples)
        place = f"{name}-{own['budget']}-{own['seed']}-{len(samples)}-{prompt}"
        while (tmp_path / "runs" / place).exists():
            place += "-again"
        store = RunStore(tmp_path / "runs")
        with store.open(place, own, expected_trials=len(samples)) as run, run.playing():
            for sample in samples:
                trial = make_trial(
                    sample,
                    score=float(sample in known),
                    seed=own["seed"],
                    kv=kv,
                    prompt_sha=f"{prompt}{sample}",
                )
                run.append_trial(trial)

    return write


@pytest.fixture
def site(tmp_path: Path) -> Callable[[], Site]:
    return lambda: Site(tmp_path / "runs", tmp_path / "site")


def test_the_first_page_says_who_leads_and_how_far_from_full(make: Make, site: Any) -> None:
    make("full", NAMES[:58], budget=None)
    for budget, scores in {256: (40, 10, 9), 512: (55, 54, 20), 768: (56, 57, 56)}.items():
        for method, right in zip(("snapkv", "rkv", "h2o"), scores, strict=True):
            make(method, NAMES[:right], budget=budget)
    shown = site()
    first, second, third = shown.answers
    words = "256 snapkv leads: 66.7% [54.1, 77.3], 30.0 points below full ["
    assert first.startswith(words)
    low, high = map(float, first.removeprefix(words).removesuffix("].").split(", "))
    assert 15 < low < 30 < high < 45
    assert second.startswith("512 snapkv and rkv lead, tied. The highest: 91.7%")
    assert "not told apart from full (-5.0 points [" in second
    assert third.startswith("768 Nobody leads: these samples cannot tell the 3 methods apart")
    assert shown.matrix == {
        "full": ["96.7"],
        "snapkv": ["best 66.7", "tied 91.7", "93.3"],
        "rkv": ["16.7", "tied 90.0", "95.0"],
        "h2o": ["15.0", "33.3", "93.3"],
    }


def test_other_samples_are_on_no_board_and_take_no_mark(make: Make, site: Any) -> None:
    make("full", NAMES, budget=None)
    make("rkv", NAMES[:50])
    make("snapkv", NAMES[:20])
    make("agentkv", [], samples=[f"other{i}" for i in range(60)], seed=1)
    shown = site()
    assert shown.matrix == {"full": ["100.0"], "rkv": ["best 83.3"], "snapkv": ["33.3"]}
    assert shown.out == ["On no board. other samples: it has 0 of the 60 that others were asked"]


def test_one_lucky_sample_and_a_picked_subset_are_on_no_board(make: Make, site: Any) -> None:
    make("rkv", NAMES[:50])
    make("snapkv", NAMES[:20])
    make("h2o", NAMES[:1], samples=NAMES[:1])
    make("agentkv", NAMES[:40], samples=NAMES[:40])
    shown = site()
    assert shown.matrix == {"rkv": ["best 83.3"], "snapkv": ["33.3"]}
    assert [reason.partition("has ")[2] for reason in shown.out] == [
        "40 of the 60 that others were asked",
        "1 of the 60 that others were asked",
    ]


def test_a_declared_subset_is_compared_apart_from_the_whole(make: Make, site: Any) -> None:
    few = NAMES[:25]
    for method, right in (("rkv", 50), ("snapkv", 10)):
        make(method, NAMES[:right])
    make("h2o", few, samples=few, limit=25)
    shown = site()
    assert shown.matrix == {"rkv": ["best 83.3"], "snapkv": ["16.7"]}
    apart = shown.task.rows("matrix")
    assert {name: cells[0].split()[0] for name, cells in apart.items() if name != "Method"} == {
        "h2o": "tied",
        "rkv": "tied",
        "snapkv": "40.0",
    }


def test_a_replicated_run_is_one_cell_and_changes_nothing(make: Make, site: Any) -> None:
    make("rkv", NAMES[:40])
    make("snapkv", NAMES[:20])
    before = site().matrix
    make("snapkv", NAMES[:20])
    make("snapkv", NAMES[:20], concurrency=2)
    after = site()
    assert after.matrix == before == {"rkv": ["best 66.7"], "snapkv": ["33.3"]}
    runs = [row for kind, rows in after.task.tables if kind == "runs" for row in rows]
    assert sum(row[0].strip() == "snapkv" for row in runs) == 3


@pytest.mark.parametrize(
    ("right", "samples", "words"),
    [
        (0, 60, "Nobody leads: all 2 methods score 0%."),
        (19, 19, "19 samples; nobody leads on fewer than 20."),
    ],
)
def test_nothing_is_best_at_zero_or_on_few_samples(
    make: Make, site: Any, right: int, samples: int, words: str
) -> None:
    make("rkv", NAMES[:right], samples=NAMES[:samples])
    make("snapkv", [], samples=NAMES[:samples])
    shown = site()
    assert words in shown.answers[0]
    assert not [c for cells in shown.matrix.values() for c in cells if "best" in c or "tied" in c]
    assert shown.task.rows("runs")["rkv"][6] == "– of 2"  # noqa: RUF001


def test_a_method_alone_at_its_budget_is_not_best(make: Make, site: Any) -> None:
    make("full", NAMES, budget=None)
    make("rkv", NAMES[:59])
    shown = site()
    assert shown.answers[0].startswith("256 Only rkv has run: 98.3%")
    assert shown.matrix["rkv"] == ["98.3"]
    assert shown.task.rows("tiers")["rkv 256"][1] == "–"  # noqa: RUF001


def test_a_method_is_not_best_of_its_own_variants(make: Make, site: Any) -> None:
    make("rkv", NAMES[:50])
    make("rkv", NAMES[:5], interval=64)
    shown = site()
    assert shown.answers[0].startswith("256 Only rkv has run in 2 settings; the highest: 83.3%")
    assert "best" not in str(shown.matrix)
    assert "1" not in [cells[1] for cells in shown.task.rows("tiers").values() if cells[1:]]


def test_a_method_is_in_a_tier_once_with_its_largest_budget(make: Make, site: Any) -> None:
    """Also where a smaller one scores better: it was chosen before looking."""
    make("rkv", NAMES[:20], budget=500, peak=590)
    make("rkv", NAMES[:55], budget=512, peak=590)
    make("snapkv", NAMES[:40], budget=512, peak=600)
    tiers = site().task.rows("tiers")
    assert [tiers[name][1] for name in ("rkv 512", "snapkv 512", "rkv 500")] == [
        "1", "2", "not ranked",
    ]  # fmt: skip
    make("rkv", NAMES[:10], budget=520, peak=620)
    tiers = site().task.rows("tiers")
    assert (tiers["snapkv 512"][1], tiers["rkv 520"][1]) == ("1", "2")
    assert tiers["rkv 512"][1] == "not ranked"


def test_a_tier_is_of_achieved_not_nominal_kv(make: Make, tmp_path: Path) -> None:
    make("rkv", NAMES[:20], budget=512, peak=250)
    make("snapkv", NAMES[:20], budget=512, peak=251)
    (view,) = views(load_runs([tmp_path / "runs"])[0])
    assert [tier.name for tier in by_tier(view.board)] == [tier_name(1), tier_name(2)]
    assert tier_name(1) == "10–25%"  # noqa: RUF001


def test_a_run_over_its_budget_and_drifted_prompts_are_listed_with_the_reason(
    make: Make, site: Any
) -> None:
    make("rkv", NAMES[:20])
    make("snapkv", NAMES, peak=1000, budget=10)
    make("h2o", NAMES[:20])
    make("agentkv", NAMES, prompt="changed")
    shown = site()
    assert set(shown.matrix) == {"rkv", "h2o"}
    drift, over = shown.out
    assert drift.startswith("On no board. drift: prompts differ")
    assert "exceeded the budget" in over


def test_other_conditions_are_another_board(make: Make, site: Any) -> None:
    for heat in (0.0, 1.0):
        make("rkv", NAMES[:50], temperature=heat)
        make("snapkv", NAMES[: 10 if heat else 50], temperature=heat)
    shown = site()
    assert len(shown.answers) == 2
    rkv = [row[1] for _, rows in shown.index.tables for row in rows if row[0].strip() == "rkv"]
    assert sorted("best" in cell for cell in rkv) == [False, True]


def test_the_floor_and_the_noise_stand_under_the_matrix(
    make: Make, site: Any, tmp_path: Path
) -> None:
    make("rkv", NAMES[:50])
    make("full", NAMES[:58], budget=None)
    make("full", NAMES[:57], budget=None, concurrency=3)
    make("full", NAMES[:3], budget=None, engine="scripted", model="null")
    shown = site()
    page = (tmp_path / "site" / "index.html").read_text()
    assert "full against full" in page
    assert "1 of 60 samples changed" in page
    assert "Floor, an agent that does nothing: 5.0% [" in page
    assert "full" in shown.matrix
    assert "null agent" not in shown.matrix


def test_a_floor_on_other_samples_is_no_floor(make: Make, site: Any, tmp_path: Path) -> None:
    make("rkv", NAMES[:50])
    make("full", [], samples=NAMES[:59], budget=None, engine="scripted", model="null")
    site()
    assert "Floor" not in (tmp_path / "site" / "index.html").read_text()


def test_a_floor_of_other_settings_is_no_floor(make: Make, site: Any, tmp_path: Path) -> None:
    """Doing nothing has 90 % where trick questions are kept: full's 50 % has no floor of 0."""
    nothing = {"budget": None, "engine": "scripted", "model": "null", "dtype": "float32"}
    settings = [{"adversarial": each} for each in ("keep", "drop")]
    for kept, right in zip(settings, (54, 0), strict=True):
        make("full", NAMES[:30], budget=None, task_params=kept, dtype="bfloat16")
        make("full", NAMES[:right], task_params=kept, **nothing)
    seen = {view.board.conditions: view.floor for view in views(load_runs([tmp_path / "runs"])[0])}
    floors = {name: floor and floor.point for name, floor in seen.items()}
    assert floors == {f"task_params={each}": o for each, o in zip(settings, (0.9, 0), strict=True)}
    site()
    page = (tmp_path / "site" / "index.html").read_text()
    assert "Floor, an agent that does nothing: 90.0% [" in page


def test_speed_is_shown_from_nine_runs_with_its_interval(
    make: Make, site: Any, tmp_path: Path
) -> None:
    for number in range(9):
        make("rkv", NAMES[:50], tokens=6000 + 60 * number)
        made = site()
        assert "Throughput" not in (tmp_path / "site" / "index.html").read_text()
        assert ("Output tokens/s, median" in str(made.task.tables)) == (number == 8)
