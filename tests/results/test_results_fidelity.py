"""Distances from the full cache: intervals, verdicts, tables; less is better."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from agentbench_kv.errors import UsageError
from agentbench_kv.results.compare import compare
from agentbench_kv.results.compare_text import TEXT_FORMATS
from agentbench_kv.results.curves import smallest_budget
from agentbench_kv.results.runs import Run, load_runs
from agentbench_kv.results.site import build_site
from agentbench_kv.results.site.boards import views
from agentbench_kv.results.stats import open_change, open_level
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.tables.fidelity import fidelity_tables
from agentbench_kv.results.tables.model import Kind, Mark
from agentbench_kv.results.tables.report import report_tables

Write = Callable[..., Run]
TOKENS = 100


@pytest.fixture
def write_arm(tmp_path: Path, make_trial: Any) -> Write:
    """Return a function that writes an arm of so much KL a token in each session."""

    def write(
        method: str,
        budget: int,
        divergences: Sequence[float | None],
        flips: float = 0.01,
        expected: int | None = None,
        kv_dtype: str = "",
        systems: int = 0,
        idle: int = 0,
    ) -> Run:
        spec = {"task": "fidelity/t/gold", "method": method, "budget": budget, "model": "m"}
        spec |= {"engine": "embedded", "seed": 0} | ({"kv_dtype": kv_dtype} if kv_dtype else {})
        name = f"{method}-{budget}{kv_dtype}"
        count = len(divergences) if expected is None else expected
        with RunStore(tmp_path).open(name, spec, {}, expected_trials=count) as run:
            for number, each in enumerate(divergences):
                kv = {"logical": 900, "peak_live": 700, "longest_prefill": 600, "events": 2}
                kv |= {"evicted": 500, "decode_tokens": TOKENS}
                kv |= {"events": 0, "evicted": 0} if number < idle else {}
                if each is None:
                    failed = {"status": "context_limit", "error": "too long"}
                    run.append_trial(make_trial(f"s{number}", kv=kv, **failed))
                    continue
                figures = {"kl": each, "kl_value": 2 * each, "dnll": each / 2, "flips": flips}
                metrics = {f"{key}_total": value * TOKENS for key, value in figures.items()}
                metrics |= {f"{key}_count": TOKENS for key in figures}
                metrics |= {"top1_right": 98, "top1_asked": TOKENS}
                metrics |= {"system_sha": f"system{number % systems}"} if systems else {}
                trial = make_trial(f"s{number}", kv=kv, metrics=metrics, score=0.98,
                                   status="scored", prompt_sha=f"sha{number}")  # fmt: skip
                run.append_trial(trial)
        return load_runs([tmp_path / name])[0][0]

    return write


def noisy(level: float, sessions: int = 40, seed: int = 0) -> list[float]:
    return list(level * np.random.default_rng(seed).uniform(0.5, 1.5, sessions))


@pytest.mark.parametrize(
    ("systems", "said"),
    [(0, ""), (1, "with 1 system message "), (7, "7 system messages"), (40, "")],
)
def test_sessions_behind_the_same_system_message_are_told(
    write_arm: Write, systems: int, said: str
) -> None:
    table = fidelity_tables([write_arm("agentkv", 512, noisy(0.02), systems=systems)])[0]
    told = [note for note in table.notes if "system message" in note]
    assert len(told) == bool(said)
    assert all(said in note and note.startswith("40 sessions") for note in told)


def test_more_divergence_is_a_regression_and_less_is_ok(write_arm: Write) -> None:
    near, far = write_arm("agentkv", 512, noisy(0.02)), write_arm("random", 512, noisy(0.5, seed=1))
    for base, cand, verdict in ((near, far, "regression"), (far, near, "ok")):
        found = compare([base], [cand], metric="kl")
        (row,) = found.rows
        assert (found.verdict, row.unit, row.n) == (verdict, "nats", 40)
        assert row.point == pytest.approx(row.cand_level - row.base_level)
        assert (row.point > 0) == (verdict == "regression")
        assert "nats" in TEXT_FORMATS["markdown"](found)
        assert json.loads(TEXT_FORMATS["json"](found))["rows"][0]["unit"] == "nats"
    told = TEXT_FORMATS["github"](compare([far], [near], metric="kl_value"))
    assert "better" in told


def test_more_flips_are_worse(write_arm: Write) -> None:
    few = write_arm("agentkv", 512, noisy(0.02), flips=0.01)
    many = write_arm("random", 512, noisy(0.02), flips=0.3)
    assert compare([few], [many], metric="flips").verdict == "regression"
    found = compare([many], [few], metric="flips")
    assert (found.verdict, found.rows[0].unit) == ("ok", "points")


def test_sessions_that_failed_are_never_ok(write_arm: Write) -> None:
    base = write_arm("full", 512, noisy(0.02))
    # The sessions it would have lost most on have no divergence at all.
    cand = write_arm("agentkv", 512, [*noisy(0.02)[:30], *[None] * 10])
    found = compare([base], [cand], metric="kl")
    assert found.verdict == "inconclusive"
    assert "sessions have no kl here" in TEXT_FORMATS["markdown"](found)


def test_one_session_decides_nothing(write_arm: Write) -> None:
    found = compare([write_arm("a", 512, [0.0])], [write_arm("b", 512, [0.0])], metric="kl")
    assert found.verdict == "inconclusive"
    assert json.loads(TEXT_FORMATS["json"](found))["rows"][0]["low"] is None


def test_a_figure_that_one_side_lacks_is_said(write_arm: Write) -> None:
    base, cand = write_arm("a", 512, noisy(0.1)), write_arm("b", 512, [None] * 3)
    with pytest.raises(UsageError, match="one side has no kl"):
        compare([base], [cand], metric="kl")
    with pytest.raises(UsageError, match=r"known: .*\bkl\b"):
        compare([base], [base], metric="kl_moon")


def cells(runs: Sequence[Run], number: int) -> dict[tuple[str, str], list[Any]]:
    table = fidelity_tables(runs)[number]
    return {(str(r.cells[0].value), str(r.cells[1].value)): list(r.cells) for r in table.rows}


def test_the_lowest_is_marked_with_all_that_are_not_told_from_it(write_arm: Write) -> None:
    runs = [
        write_arm("agentkv", 512, noisy(0.020)),
        write_arm("snapkv", 512, noisy(0.021, seed=2)),
        write_arm("random", 512, noisy(0.5, seed=3)),
        write_arm("agentkv", 1024, noisy(0.001)),
        write_arm("random", 1024, noisy(0.1, seed=4)),
    ]
    found = cells(runs, 0)
    assert found["512", "agentkv"][6].mark is found["512", "snapkv"][6].mark is Mark.TIED
    assert found["512", "random"][6].mark is None
    assert found["1024", "agentkv"][6].mark is Mark.BEST
    assert found["512", "random"][6].value == pytest.approx(0.5, rel=0.1)


def test_few_sessions_mark_nobody_and_unfinished_runs_stand_below(write_arm: Write) -> None:
    runs = [
        write_arm("agentkv", 512, noisy(0.01, 5)),
        write_arm("random", 512, noisy(1.0, 5)),
        write_arm("h2o", 512, noisy(0.0001, 3), expected=5),
    ]
    table = fidelity_tables(runs)[0]
    assert not any(cell.mark for row in table.rows for cell in row.cells)
    assert [row.cells[1].value for row in table.unranked] == ["h2o"]
    assert "nobody leads on fewer than 20" in " ".join(table.notes)


def test_arms_are_compared_over_the_sessions_that_all_have_read(write_arm: Write) -> None:
    """An arm without its worst sessions had the lowest mean, over the others."""
    known = noisy(0.02)
    worst = sorted(range(40), key=lambda at: known[at])[-10:]
    runs = [write_arm("agentkv", 512, known), write_arm("snapkv", 512, noisy(0.02, seed=1))]
    cut = [None if at in worst else each for at, each in enumerate(known)]
    runs += [write_arm("h2o", 512, cut)]
    (figures, *_) = fidelity_tables(runs)
    (row,) = (row for row in figures.rows if row.cells[1].value == "h2o")
    assert row.below == "other samples: it has 30 of the 40 that others were asked"
    assert "40 sessions" in figures.title


def test_sessions_that_nobody_could_read_are_not_counted(write_arm: Write) -> None:
    """Of 25 sessions 22 were longer than the context, and a method was best on three."""
    short = [0.02, 0.03, 0.01] + [None] * 22
    runs = [write_arm("agentkv", 512, short), write_arm("snapkv", 512, [0.5] * 3 + [None] * 22)]
    unread = write_arm("h2o", 512, [None] * 25)
    tables = fidelity_tables([*runs, unread])
    assert "3 sessions" in tables[0].title
    notes = " ".join(tables[0].notes)
    assert "3 sessions; nobody leads on fewer than 20" in notes
    assert "h2o at 512: no session was read" in notes
    assert all(cell.mark is None for row in tables[0].rows for cell in row.cells)


def test_who_hardly_ever_evicts_has_no_place_at_a_budget(write_arm: Write) -> None:
    """A long interval made the first event come at the end of the longest session."""
    near = write_arm("snapkv", 512, noisy(0.02))
    far = write_arm("agentkv", 512, noisy(0.5, seed=1))
    lazy = write_arm("h2o", 512, noisy(0.001, seed=2), idle=39)
    (figures, *_) = fidelity_tables([near, far, lazy])
    marked = [row.cells[1].value for row in figures.rows for cell in row.cells if cell.mark]
    assert marked == ["snapkv"]
    said = "no place at its budget, as it had events in few trials where others had some: "
    assert said + "h2o at 512 (2%)" in figures.notes


def test_other_precisions_compete_apart(write_arm: Write) -> None:
    """At equal tokens the wider rows are nearer, which is no merit: they take more bytes."""
    runs = [
        write_arm("agentkv", 512, noisy(0.02)),
        write_arm("random", 512, noisy(0.1, seed=1)),
        write_arm("agentkv", 512, noisy(0.03, seed=2), kv_dtype="int4"),
        write_arm("random", 512, noisy(0.2, seed=3), kv_dtype="int4"),
    ]
    found = cells(runs, 0)
    assert found["512", "agentkv"][6].mark is Mark.BEST
    assert found["512", "agentkv kv=int4 simulated"][6].mark is Mark.BEST
    (view,) = views(runs)
    assert [name for name, _ in view.answers] == ["512", "512 kv=int4"]


def test_few_sessions_have_no_certain_budget(write_arm: Write) -> None:
    for sessions, said in ((2, None), (10, "724"), (25, "724 [")):
        values = {256: [0.01] * sessions, 2048: [0.0] * sessions}
        runs = [
            write_arm(f"m{sessions}", budget, [value * (1 + n / 99) for n, value in enumerate(own)])
            for budget, own in values.items()
        ]
        tables = fidelity_tables(runs)
        (table,) = [each for each in tables if each.title.startswith("smallest")] or [None]
        if said is None:
            assert table is None
            continue
        assert table is not None
        cell = table.rows[0].cells[2]
        assert ("[" in str(cell.text)) == ("[" in said)
        assert (cell.low is None) == (sessions < 20)


def totals(values: Sequence[float]) -> Mapping[str, tuple[float, float]]:
    return {f"s{i}": (value * TOKENS, float(TOKENS)) for i, value in enumerate(values)}


def test_the_smallest_budget_is_where_the_line_falls_to_the_limit() -> None:
    # 0.04 at 512, 0.0 at 2048: straight over log2, half-way is 0.02, at 1024.
    points = {512: totals([0.04] * 30), 2048: totals([0.0] * 30)}
    found = smallest_budget(points, 0.02)
    assert found is not None
    assert found.point == pytest.approx(1024)
    assert (found.low, found.high) == (pytest.approx(1024), pytest.approx(1024))
    beyond = smallest_budget({512: totals([1.0] * 30), 1024: totals([0.5] * 30)}, 0.01)
    assert str(beyond) == "> 1024"
    within = smallest_budget({512: totals([0.001] * 30), 1024: totals([0.5] * 30)}, 0.4)
    assert str(within) == "<= 512"  # a curve that rises by noise is levelled first
    assert smallest_budget({512: {}, 1024: totals([0.1])}, 0.01) is None


def test_the_smallest_budget_s_interval_is_a_bootstrap_of_sessions() -> None:
    rng = np.random.default_rng(5)
    small, large = rng.exponential(0.06, 25), rng.exponential(0.01, 25)
    found = smallest_budget({256: totals(small), 1024: totals(large)}, 0.03)
    assert found is not None
    drawn = []
    for _ in range(4000):
        chosen = rng.integers(0, 25, 25)
        high, low = small[chosen].mean(), large[chosen].mean()
        share = (high - 0.03) / (high - low)
        drawn.append(256 if high <= 0.03 else np.inf if low > 0.03 else 256 * 4**share)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert found.low == pytest.approx(low, rel=0.05)
    assert found.high == pytest.approx(high, rel=0.05)


def test_a_level_is_the_ratio_with_the_t_interval_of_its_jackknifed_logarithm() -> None:
    rng = np.random.default_rng(6)
    counts = rng.integers(50, 400, 30).astype(float)
    sums = counts * rng.exponential(0.1, 30)
    found = open_level({f"s{i}": (t, c) for i, (t, c) in enumerate(zip(sums, counts, strict=True))})
    assert found.point == pytest.approx(sums.sum() / counts.sum())
    left = np.array([(sums.sum() - t) / (counts.sum() - c)
                     for t, c in zip(sums, counts, strict=True)])  # fmt: skip
    error = np.sqrt(29 / 30 * ((left - left.mean()) ** 2).sum())
    reach = scipy_stats.t.ppf(0.975, 29) * error / found.point
    assert np.log(found.high / found.point) == pytest.approx(reach, rel=0.1)
    assert np.log(found.point / found.low) == pytest.approx(reach, rel=0.1)


def test_a_level_that_may_be_negative_or_is_zero() -> None:
    found = open_level(totals([-0.1, 0.2, 0.05]))
    assert found.high - found.point == pytest.approx(found.point - found.low)
    none = open_level(totals([0.0, 0.0]))
    assert (none.low, none.point, none.high) == (0, 0, 0)
    alone = open_level(totals([0.2]))
    assert (alone.low, alone.high) == (0, np.inf)


def test_equal_sums_compare_as_a_paired_t_test() -> None:
    rng = np.random.default_rng(7)
    base = rng.exponential(0.1, 40)
    cand = base + rng.normal(0.02, 0.05, 40)
    found = open_change(totals(cand), totals(base))
    assert found is not None
    interval = scipy_stats.ttest_rel(cand, base).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.p_value == pytest.approx(scipy_stats.ttest_rel(cand, base).pvalue, abs=0.02)


def test_grouped_sessions_count_as_groups() -> None:
    rng = np.random.default_rng(8)
    shared = np.repeat(rng.exponential(0.1, 10), 6)
    groups = {f"s{i}": f"g{i // 6}" for i in range(60)}
    alone, together = open_level(totals(shared)), open_level(totals(shared), groups)
    assert together.groups == 10
    assert together.high - together.low > 1.5 * (alone.high - alone.low)


def _totals_of(values: Any, counts: Any) -> dict[str, tuple[float, float]]:
    pairs = zip(values * counts, counts, strict=True)
    return {f"s{i}": (float(total), float(count)) for i, (total, count) in enumerate(pairs)}


@pytest.mark.parametrize("sessions", [10, 30])
def test_level_and_change_cover(sessions: int) -> None:
    """Skewed divergences, sessions of different length: 95% intervals hold the truth."""
    rng, runs = np.random.default_rng(9), 1500
    held = np.zeros(2)
    for _ in range(runs):
        counts = rng.integers(100, 500, sessions).astype(float)
        base = rng.gamma(2.0, 0.05, sessions)
        cand = base * rng.gamma(4.0, 0.25, sessions) + rng.gamma(1.0, 0.02, sessions)
        sides = [_totals_of(values, counts) for values in (base, cand)]
        level, change = open_level(sides[1]), open_change(sides[1], sides[0])
        assert change is not None
        held += [level.low <= 0.12 <= level.high, change.low <= 0.02 <= change.high]
    assert (held / runs > 0.90).all(), held / runs


def test_the_site_shows_the_same_figures(write_arm: Write, tmp_path: Path) -> None:
    runs = [
        write_arm("agentkv", 512, noisy(0.02)),
        write_arm("random", 512, noisy(0.5, seed=3)),
        write_arm("agentkv", 1024, noisy(0.0005)),
        write_arm("random", 1024, noisy(0.1, seed=4)),
    ]
    folder = build_site(runs, [], tmp_path / "site").parent
    (page,) = (folder / "tasks").glob("*.html")
    shown = page.read_text()
    for row in fidelity_tables(runs)[0].rows:
        assert f"{row.cells[6].value:.4f}" in shown
    # The chart: less is lower, on an axis of powers of ten.
    (view,) = views(runs)
    chart = view.distance_chart
    assert chart is not None
    assert [text for _, text in chart.y_ticks] == ["0.0001", "0.001", "0.01", "0.1", "1"]
    heights = {each.name: [dot.y for dot in each.dots] for each in chart.series}
    assert heights["agentkv"][0] > heights["random"][0]  # pixels count down
    assert heights["agentkv"][1] > heights["agentkv"][0]
    assert [name for name, _ in view.parts] == ["top1"]


def test_sessions_are_judged_by_their_divergence(write_arm: Write, tmp_path: Path) -> None:
    """As samples that succeed or fail, 98 of 100 tokens of 20 sessions tell nobody from nobody."""
    near, tied = (
        write_arm("agentkv", 512, noisy(0.02)),
        write_arm("snapkv", 512, noisy(0.021, seed=2)),
    )
    far, alone = write_arm("random", 512, noisy(0.5, seed=3)), write_arm("agentkv", 64, noisy(0.9))
    runs = [near, tied, far, alone]
    for one, other, verdict in ((near, far, "regression"), (far, near, "ok")):
        found = compare([one], [other])
        assert (found.metric, found.verdict) == ("kl", verdict)
    tables = report_tables(runs)
    assert {table.kind for table in tables} >= {Kind.FIDELITY}
    assert not {Kind.ACCURACY, Kind.CURVES} & {table.kind for table in tables}
    assert Kind.ACCURACY in {table.kind for table in report_tables(runs, metrics=["top1"])}
    (view,) = views(runs)
    (_, few), (_, many) = view.answers
    assert few.startswith("Only <b>agentkv</b> has run: KL 0.9")
    assert many.startswith("<b>agentkv</b> and <b>snapkv</b> are nearest, tied. The lowest: KL 0.0")
    folder = build_site(runs, [], tmp_path / "site").parent
    pages = {path.parent.name: path.read_text() for path in folder.rglob("*.html")}
    for name in ("site", "tasks"):
        assert "nearest" in pages[name]
        assert "Nobody leads" not in pages[name]
        assert "Score against" not in pages[name]
    assert "KL, nats" in pages["runs"]
    assert "judged by its distance" in pages["runs"]
    # Two that nobody can tell apart: nobody is nearest.
    (view,) = views([near, tied])
    ((_, words),) = view.answers
    assert words.startswith("<b>Nobody is nearest</b>: these sessions cannot tell the 2 methods")
