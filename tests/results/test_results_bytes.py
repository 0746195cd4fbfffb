"""Memory is bytes: where runs stand, compete and compare, and what is said where none are known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.errors import UsageError
from agentbench_kv.results.compare import compare
from agentbench_kv.results.compare_text import TEXT_FORMATS
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runs import Run, load_runs
from agentbench_kv.results.site import build_site
from agentbench_kv.results.site.boards import BoardView, views
from agentbench_kv.results.store import RunStore

ROW = 4096  # bytes of a token's keys and values, over all layers and heads
INT8 = ROW * 68 // 256  # the same at int8 with heads of 64: 68 bytes instead of 256
TASK = "tasks/micro_recall-1k.html"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, spec: dict[str, Any], make_trial: Callable[..., TrialRecord]) -> Write:
    """Write a run of 24 sessions; `lacking` are those whose record has no bytes."""

    def made(
        method: str,
        budget: int | None = 256,
        live: int = 400,
        row: int = ROW,
        right: int = 20,
        lacking: tuple[int, ...] = (),
        read: int = 10**6,
        folder: str = "runs",
        **changes: Any,
    ) -> Path:
        own = spec | {"method": method, "budget": budget} | changes
        root = tmp_path / folder
        name = f"run-{len(list(root.glob('*')))}"
        with RunStore(root).open(name, own, expected_trials=24) as run:
            for number in range(24):
                held = live + number % 3
                kv = {
                    "peak_live": held,
                    "logical": 1000,
                    "events": int(budget is not None),
                    "evicted": 1000 - held if budget is not None else 0,
                    "longest_prefill": 300,
                    "decode_tokens": 50,
                    "bytes_read": read,
                    "peak_bytes": 0 if number in lacking else held * row,
                }
                sample, score = f"s{number}", float(number < right)
                run.append_trial(make_trial(sample, score=score, kv=kv, prompt_sha=f"{number:x}"))
        return root / name

    return made


def _runs(path: Path) -> list[Run]:
    runs, problems = load_runs([path])
    assert not problems
    return runs


def _view(tmp_path: Path) -> BoardView:
    (view,) = views(_runs(tmp_path / "runs"))
    return view


def _places(view: BoardView) -> dict[str, tuple[float, str]]:
    """Return where every dot of the chart is across, and what it says."""
    chart = view.memory_chart
    assert chart is not None
    return {d.text.partition(":")[0]: (d.x, d.text) for s in chart.series for d in s.dots}


def test_two_precisions_with_the_same_tokens_are_at_different_places(
    write: Write, tmp_path: Path
) -> None:
    write("full", None, 1000)
    write("agentkv")
    write("agentkv", row=INT8, kv_dtype="int8")
    view = _view(tmp_path)
    found = _places(view)
    plain, low = found["agentkv at 256"], found["agentkv kv=int8 simulated at 256"]
    assert low[0] < plain[0]
    # Twice the bytes are as far apart anywhere: 256 / 68 of them are this many doublings.
    assert plain[1].endswith("; 1.64 MB a session, 401 tokens per layer and KV head")
    assert low[1].endswith("; 0.436 MB a session, 401 tokens per layer and KV head")
    assert [tier.name for tier in view.tiers] == ["10–25%", "25–50%"]  # noqa: RUF001
    shares = {e.group.name: view.held(e).share for e in view.board.entries}
    assert shares["agentkv kv=int8 simulated at 256"] == pytest.approx(0.401 * INT8 / ROW)
    assert shares["agentkv at 256"] == pytest.approx(0.401)


def test_two_models_with_the_same_tokens_are_at_different_places(
    write: Write, tmp_path: Path
) -> None:
    write("rkv")
    write("rkv", row=4 * ROW, model="models/large")
    small, large = (_places(view)["rkv at 256"] for view in views(_runs(tmp_path / "runs")))
    assert abs(small[0] - large[0]) > 20
    assert {re.findall(r"; (.*) MB", each[1])[0] for each in (small, large)} == {"1.64", "6.57"}


def test_a_quantised_cache_is_never_what_others_are_measured_by(
    write: Write, tmp_path: Path
) -> None:
    write("full@prefix", None, 1000, INT8, right=21, kv_dtype="int8")
    write("rkv", live=262, right=5)
    assert _view(tmp_path).board.full is None
    write("full@prefix", None, 1000, right=22)
    full = _view(tmp_path).board.full
    assert full is not None
    assert full.group.label == "full@prefix"


def test_a_full_cache_at_lower_precision_competes_by_memory(write: Write, tmp_path: Path) -> None:
    write("full", None, 1000, right=22)
    write("full", None, 1000, INT8, right=21, kv_dtype="int8")
    write("rkv", live=262, right=5)
    view = _view(tmp_path)
    assert "full kv=int8 simulated" in _places(view)
    (tier,) = view.tiers
    assert tier.name == "25–50%"  # noqa: RUF001
    assert [each.entry.group.label for each in tier.ranks] == ["full kv=int8 simulated", "rkv"]
    assert tier.mark(tier.best) == "best"
    (level,) = view.memory_chart.levels
    assert [dot.x for dot in level.dots][-1] == 100.0
    assert level.dots[0].text.endswith("; 4.1 MB a session, 1,001 tokens per layer and KV head")


def test_rows_of_every_query_head_weigh_what_they_are(write: Write, tmp_path: Path) -> None:
    """A method that keeps rows per query head holds several times the bytes at equal tokens."""
    write("full", None, 1000)
    write("snapkv", live=200)
    write("h2o", live=200, row=4 * ROW)
    view = _view(tmp_path)
    assert [tier.name for tier in view.tiers] == ["10–25%", "75–95%"]  # noqa: RUF001


def test_what_a_run_played_besides_moves_no_tier(write: Write, tmp_path: Path) -> None:
    """240 sessions that are on no board hold 5 %; the 24 that are hold what snapkv does."""
    write("full", None, 1000)
    write("snapkv", 700, live=990)
    wide = write("agentkv", 700, live=990)
    lines = (wide / "samples.jsonl").read_text().splitlines()
    for number, line in enumerate(lines * 10):
        record = json.loads(line)
        record["sample_id"] = f"easy{number}"
        record["kv"] |= {"peak_live": 50, "peak_bytes": 50 * ROW}
        with (wide / "samples.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    info = json.loads((wide / "run.json").read_text())
    (wide / "run.json").write_text(json.dumps(info | {"expected_trials": 264}))
    view = _view(tmp_path)
    held = {e.group.label: view.held(e) for e in view.board.entries}
    assert held["agentkv"] == held["snapkv"]
    (tier,) = view.tiers
    assert tier.name == "over 95%"
    assert {each.entry.group.label for each in tier.ranks} == {"agentkv", "snapkv"}


def test_records_without_bytes_are_named_and_drawn_nowhere(write: Write, tmp_path: Path) -> None:
    write("full", None, 1000)
    write("rkv")
    write("snapkv", lacking=(7,))
    write("h2o", row=INT8, kv_dtype="int8", lacking=tuple(range(24)))
    view = _view(tmp_path)
    assert set(_places(view)) == {"rkv at 256"}
    assert view.unsized == ["h2o kv=int8 simulated at 256", "snapkv at 256"]
    # By its tokens where rows can only be as large as everybody's; else in no tier.
    (tier,) = view.tiers
    assert {each.entry.group.label for each in tier.ranks} == {"rkv", "snapkv"}
    site = build_site(_runs(tmp_path / "runs"), [], tmp_path / "site").parent
    page, index = ((site / name).read_text("utf-8") for name in (TASK, "index.html"))
    told = "Bytes are not recorded and not drawn: h2o kv=int8 simulated at 256, snapkv at 256."
    assert told in page
    assert "<small>of tokens</small>" in page
    assert "Score against memory" not in index
    assert "Score against budget" in index


def test_the_first_page_draws_bytes_where_every_run_has_them(write: Write, tmp_path: Path) -> None:
    write("full", None, 1000)
    write("rkv")
    site = build_site(_runs(tmp_path / "runs"), [], tmp_path / "site").parent
    index = (site / "index.html").read_text("utf-8")
    assert "Score against memory" in index
    assert "peak live MB of a session, doubling" in index
    assert "Score against budget" not in index
    assert "Score against budget" in (site / TASK).read_text("utf-8")
    page = (site / "runs" / "run-1.html").read_text("utf-8")
    assert "Peak live, MB" in page
    assert ">1.64<" in page


def test_old_runs_alone_have_no_axis_of_bytes(write: Write, tmp_path: Path) -> None:
    write("full", None, 1000, lacking=tuple(range(24)))
    write("rkv", lacking=tuple(range(24)))
    view = _view(tmp_path)
    assert view.memory_chart is None
    assert [tier.name for tier in view.tiers] == ["25–50%"]  # noqa: RUF001
    assert build_site(_runs(tmp_path / "runs"), [], tmp_path / "site").is_file()


def test_a_session_without_bytes_leaves_the_run_without(write: Write, tmp_path: Path) -> None:
    """A median that takes unknown for 0 would be of nothing: here it would be half of them."""
    write("rkv", lacking=tuple(range(13)))
    (run,) = _runs(tmp_path / "runs")
    assert run.summary.kv is not None
    assert run.summary.kv.median_peak_bytes == run.summary.kv.max_peak_bytes == 0
    assert run.unsized("peak_bytes") == 13
    assert run.unsized("peak_live") == 0


def test_compare_has_bytes(write: Write) -> None:
    write("full", None, 1000, folder="base")
    base = write("full", None, 1000, folder="base").parent
    cand = write("agentkv", row=INT8, kv_dtype="int8", folder="cand").parent
    found = compare(_runs(base)[:1], _runs(cand), metric="peak_bytes")
    (row,) = found.rows
    assert row.base_level == pytest.approx(1001 * ROW)
    assert row.cand_level == pytest.approx(401 * INT8)
    assert row.point == pytest.approx(401 * INT8 / (1001 * ROW) - 1)
    assert row.unit == "percent"
    assert row.verdict == "ok"
    text = TEXT_FORMATS["markdown"](found)
    assert "4.100 MB | 0.436 MB" in text.replace("&#46;", ".")
    back = compare(_runs(cand), _runs(base)[:1], metric="peak_bytes")
    assert back.rows[0].verdict == "regression"


def test_compare_says_how_equal_tokens_differ_in_bytes(write: Write) -> None:
    base = write("agentkv", folder="base").parent
    cand = write("agentkv", row=2 * ROW, folder="cand").parent
    tokens, size = (
        compare(_runs(base), _runs(cand), metric=name).rows[0].point
        for name in ("peak_live", "peak_bytes")
    )
    assert tokens == 0
    assert size == pytest.approx(1.0)


@pytest.mark.parametrize("side", ["base", "cand"])
def test_compare_refuses_a_side_without_bytes(write: Write, side: str) -> None:
    paths = {}
    for name in ("base", "cand"):
        lacking = (3, 4) if name == side else ()
        paths[name] = write("agentkv", lacking=lacking, folder=name).parent
    with pytest.raises(UsageError, match=r"run-0 has no peak_bytes in 2 of its 24 sessions"):
        compare(*map(_runs, paths.values()), metric="peak_bytes")
    assert compare(*map(_runs, paths.values()), metric="peak_live").rows


def test_compare_refuses_reads_that_were_never_counted(write: Write) -> None:
    base = write("agentkv", folder="base").parent
    cand = write("agentkv", read=0, folder="cand").parent
    with pytest.raises(UsageError, match="has no bytes_read in 24 of its 24 sessions"):
        compare(_runs(base), _runs(cand), metric="bytes_read")
    assert compare(_runs(base), _runs(base), metric="bytes_read").rows[0].point == 0


def test_a_group_of_two_dtypes_is_no_group(write: Write, tmp_path: Path) -> None:
    """Both sides mixed alike: the mean of their bytes is of no run that anybody could start."""
    for folder in ("base", "cand"):
        for seed, dtype in enumerate(("float32", "bfloat16")):
            row = ROW // (1 + seed)
            write("agentkv", row=row, seed=seed, dtype=dtype, folder=folder)
    base, cand = (_runs(tmp_path / folder) for folder in ("base", "cand"))
    with pytest.raises(UsageError, match="dtype within BASE bfloat16 -> float32"):
        compare(base, cand, metric="peak_bytes")


def test_listings_have_bytes_before_tokens(write: Write) -> None:
    path = write("agentkv")
    for command in (["ls", "runs", "--out", str(path.parent)], ["show", str(path)]):
        shown = CliRunner().invoke(kvbench, command)
        assert shown.exit_code == 0, shown.output
        heading = next(line for line in shown.output.splitlines() if "peak live" in line)
        assert heading.index("peak live MB") < heading.index("logical")
        assert "1.64" in shown.output
    shown = CliRunner().invoke(kvbench, ["ls", "runs", "--out", str(path.parent), "--json"])
    assert json.loads(shown.stdout)[0]["peak_bytes"] == 401 * ROW


def test_bytes_that_do_not_follow_from_tokens_are_noticed(write: Write) -> None:
    honest, forged = (write("agentkv", folder=name) for name in ("honest", "forged"))
    path = forged / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:12]:
        row["kv"]["peak_bytes"] //= 10
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "peak_bytes do not follow from peak_live: 410 to 4,096 bytes a token"
    (run,) = _runs(forged)
    assert any(told in note for note in run.summary.notes)
    assert not any("peak_bytes" in note for note in _runs(honest)[0].summary.notes)
    found = compare(_runs(honest), _runs(forged), metric="peak_bytes")
    assert any(told in note for note in found.notes)
    assert any("takes 4,096 bytes in BASE, 2,253 in CAND" in note for note in found.notes)


def test_a_token_that_takes_less_throughout_is_told_beside_the_verdict(write: Write) -> None:
    """A forger who divides all of them is consistent: only the other side gives it away."""
    base, cand = write("agentkv", folder="base"), write("agentkv", row=ROW // 8, folder="cand")
    assert not _runs(cand)[0].summary.notes
    notes = compare(_runs(base), _runs(cand), metric="peak_bytes").notes
    assert any("takes 4,096 bytes in BASE, 512 in CAND" in note for note in notes)
    same = compare(_runs(base), _runs(base), metric="peak_bytes").notes
    assert not any("live token takes" in note for note in same)
