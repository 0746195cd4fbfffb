"""What a memory costs, LoCoMo's parts of the score, and the paper's figures beside both."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.cli.report import report
from agentbench_kv.cli.show import show
from agentbench_kv.results.papers import headlines, quality
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.site.build import build_site
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import ledger_means
from agentbench_kv.results.tables.ledger import HOSTED
from agentbench_kv.results.tables.model import Cell, Kind, Row, Table
from agentbench_kv.results.tables.report import report_tables

TASK, MODEL = "probe/locomo", "Qwen/Qwen2.5-7B-Instruct"
TALKS = ("conv-26", "conv-30", "conv-41")
READ = {"ingest_calls": 20, "ingest_tokens": 18_000, "ingest_s": 300.0}
Trials = dict[str, dict[str, Any]]


def metrics(right: float, recall: float | None, **more: Any) -> dict[str, Any]:
    """Return what LoCoMo records of ten questions, and of three answers."""
    found = {"f1_right": right, "bleu1_right": right / 2, "f1_authors_right": right}
    found |= {} if recall is None else {"evidence_recall_right": recall}
    found |= {name.replace("_right", "_asked"): 10 for name in found}
    for name, each in (("prefill_tokens", 90), ("live_tokens", 2150), ("ttft_ms", 400.0)):
        found |= {f"answer_{name}_total": 3 * each, f"answer_{name}_count": 3}
    return found | more


@pytest.fixture
def write(tmp_path: Path, make_trial: Callable[..., TrialRecord]) -> Callable[..., Path]:
    """Return a function that writes one finished run of three conversations."""

    def run(name: str, each: dict[str, Any], kv: dict[str, Any] | None = None, **more: Any) -> Path:
        provenance = more.pop("provenance", {})
        failed: dict[str, Any] = more.pop("failed", {})
        spec = {"task": TASK, "model": MODEL, "engine": "embedded", "seed": 0, "method": "full"}
        with RunStore(tmp_path).open(name, spec | more, provenance, expected_trials=3) as writer:
            for talk in TALKS:
                outcome = {"score": each["f1_right"] / 10} if "f1_right" in each else {"score": 0.5}
                own = {"metrics": each, "cluster": talk, **outcome}
                if failed and talk == TALKS[-1]:
                    own = {"metrics": failed, "cluster": talk, "status": "timeout"}
                account = {"peak_live": 900, "logical": 900} | (kv or {})
                writer.append_trial(make_trial(talk, kv=account, **own))
        return tmp_path

    return run


@pytest.fixture
def runs(write: Callable[..., Path]) -> Path:
    """Full, its last 50 turns, a memory, and a memory one of whose trials failed."""
    last = {"context": "turns", "last": 50}
    write("full", metrics(4, None))
    write("last", metrics(2, None), task_params=last, provenance={"changed_settings": last})
    restored = {"restored": 500}
    remembers = {"remembers": True}
    counted = restored | {"peak_bytes": 900 * 4096}
    write("memart", metrics(3, 2, **READ), counted, method="memart", provenance=remembers)
    lost = {**metrics(0, 0), "ingest_calls": 5, "ingest_tokens": 3_000, "ingest_s": None}
    own = metrics(1, 5, **READ, ingest_failed=3)
    # Of a time before provenance said who remembers.
    return write("mem0", own, restored, method="mem0", failed=lost)


def tables(folder: Path, *kinds: Kind, metric: tuple[str, ...] = ()) -> list[Table]:
    return report_tables(load_runs([folder])[0], kinds, metric)


def one(found: list[Table], words: str) -> Table:
    (table,) = [each for each in found if each.title.startswith(words)]
    return table


def row(table: Table, name: str) -> dict[str, Cell]:
    (found,) = [each for each in table.rows if each.cells[0].value == name]
    titles = [column.title for column in table.columns]
    return dict(zip(titles, found.cells, strict=True))


def published(table: Table) -> list[Row]:
    return [each for each in table.rows if each.published]


def test_a_memory_s_ledger_stands_in_the_report_with_what_reads_everything(runs: Path) -> None:
    table = one(tables(runs, Kind.EFFICIENCY), "what a memory costs")
    found = row(table, "memart")
    wanted = {"trials": 3, "read: calls": 20, "tokens": 18_000, "seconds": 300, "parts lost": 0}
    wanted |= {"an answer: prefilled": 90, "live": 2150, "TTFT ms": 400}
    assert {name: found[name].value for name in wanted} == wanted
    assert found["live MB"].value == pytest.approx(2150 * 4096 / 1e6)
    assert row(table, "full")["live MB"].value is None  # whose bytes nobody counted
    names = [each.cells[0].value for each in table.rows]
    assert names == ["full", "full, last 50 turns", "mem0", "memart"]
    for name in ("full", "full, last 50 turns"):  # they read nothing apart from their own session
        found = row(table, name)
        assert found["tokens"].value is None
        assert found["an answer: prefilled"].value == 90


def test_floors_that_differ_in_more_are_told_apart(runs: Path, write: Callable[..., Path]) -> None:
    other = {"context": "turns", "last": 50, "ingest": "question"}
    write("other", metrics(2, None), task_params=other, provenance={"changed_settings": other})
    names = {each.cells[0].value for each in one(tables(runs), "what a memory costs").rows}
    assert "full (context=turns, ingest=question, last=50)" in names
    assert "full (context=turns, last=50)" in names


def test_what_reading_took_is_of_the_trials_with_seconds(runs: Path) -> None:
    found = row(one(tables(runs), "what a memory costs"), "mem0")
    assert found["tokens"].value == 18_000
    assert found["seconds"].value == 300
    assert found["parts lost"].value == 3


def test_what_came_from_files_is_of_the_same_trials(
    make_trial: Callable[..., TrialRecord],
) -> None:
    """None came from any in the third; the fourth failed, and has no seconds."""
    own = [
        {**READ, "ingest_files": 10, "ingest_files_s": 4.0, "append_tokens": 8, "append_s": 1.5},
        {**READ, "ingest_files": 20, "ingest_files_s": 2.0},
        {**READ},
        {**READ, "ingest_calls": 99, "ingest_s": None, "ingest_files": 5, "ingest_files_s": None},
    ]
    trials = [make_trial(metrics=each) for each in own]
    found = ledger_means(trials)
    assert found["ingest_calls"] == READ["ingest_calls"]
    assert (found["ingest_files"], found["ingest_files_s"]) == (10, 2)
    assert found["append_tokens"] == pytest.approx(8 / 3)
    assert found["append_s"] == pytest.approx(0.5)
    # Where nothing was timed, all of it is of all.
    untimed = ledger_means(trials[3:])
    assert (untimed["ingest_calls"], untimed["ingest_files"]) == (99, 5)
    assert not {"ingest_s", "ingest_files_s"} & untimed.keys()


def test_past_sessions_from_files_have_columns_of_their_own(write: Callable[..., Path]) -> None:
    own = metrics(3, 2, **READ, ingest_files=19, ingest_files_s=4.5)
    about = {"method": "memart", "kv": {"restored": 9}}
    folder = write("memart", own, **about)
    found = row(one(tables(folder), "what a memory costs"), "memart")
    assert (found["from files"].value, found["their seconds"].value) == (19, 4.5)
    assert "parts lost" not in found


def test_without_a_memory_nobody_is_shown_a_ledger(write: Callable[..., Path]) -> None:
    """`locomo/qa` records its reading, too, whatever its method is."""
    folder = write("full", metrics(3, None, **READ))
    assert not [each for each in tables(folder) if "memory costs" in each.title]


def test_f1_bleu_and_evidence_recall_are_shown_without_being_asked_for(runs: Path) -> None:
    table = one(tables(runs, Kind.ACCURACY), "parts of the score")
    titles = [column.title for column in table.columns]
    assert titles == ["method", "budget", "F1", "BLEU-1", "evidence recall"]
    found = row(table, "memart")
    assert [found[name].value for name in titles[2:]] == pytest.approx([0.3, 0.15, 0.2])
    assert found["F1"].low is not None
    assert found["F1"].low < 0.3
    assert row(table, "full")["evidence recall"].value is None
    assert row(table, "full, last 50 turns")["F1"].value == pytest.approx(0.2)
    # Of a trial that failed nothing is right.
    assert row(table, "mem0")["F1"].value == pytest.approx(2 / 30)


def test_rows_of_packages_say_what_they_are_not(runs: Path) -> None:
    for words in ("what a memory costs", "parts of the score"):
        assert HOSTED in one(tables(runs), words).legend
    for folder in runs.glob("mem0*"):
        shutil.rmtree(folder)
    for words in ("what a memory costs", "parts of the score"):
        assert HOSTED not in one(tables(runs), words).legend


def test_what_says_nothing_alone_has_its_other_half_beside_it(
    runs: Path, write: Callable[..., Path]
) -> None:
    plain = one(tables(runs), "parts of the score")
    undisputed = {"f1_undisputed_right": 3, "f1_undisputed_asked": 8}
    declined = {"adversarial_right": 4, "adversarial_null_right": 5, "attempted_right": 9}
    asked = {name.replace("_right", "_asked"): 5 for name in declined} | {"attempted_asked": 10}
    own = metrics(2, 1, **READ, **undisputed, **declined, **asked)
    write("asked", own, {"restored": 500}, method="graphiti", provenance={"remembers": True})
    table = one(tables(runs), "parts of the score")
    titles = {column.title for column in table.columns}
    assert titles - {column.title for column in plain.columns} == {
        *("F1, undisputed", "adversarial", "a null agent's", "attempted")
    }
    found = row(table, "graphiti")
    assert [found[name].value for name in ("F1", "F1, undisputed")] == [0.2, 0.375]
    wanted = {"adversarial": 0.8, "a null agent's": 1.0, "attempted": 0.9}
    assert {name: found[name].value for name in wanted} == wanted


def test_who_chooses_a_metric_has_no_other_parts(runs: Path) -> None:
    titles = [each.title for each in tables(runs, Kind.ACCURACY, metric=("bleu1",))]
    assert titles
    assert all("sub-score bleu1" in title for title in titles)


def test_runs_off_the_board_stand_below_the_line(runs: Path, write: Callable[..., Path]) -> None:
    write("never", metrics(4, 0, **READ), method="memart@qwen")
    for table in (one(tables(runs), words) for words in ("parts of the score", "what a memory")):
        (below,) = table.unranked
        assert below.cells[0].value == "memart@qwen"
        assert "brought nothing back" in str(below.below)


def test_other_tasks_have_no_such_tables(site_runs: Path) -> None:
    titles = [each.title for each in tables(site_runs)]
    assert not [each for each in titles if "parts of" in each or "memory costs" in each]


def test_the_paper_s_figures_stand_beside_unranked(runs: Path) -> None:
    found = tables(runs)
    parts = one(found, "parts of the score")
    beside = {each.cells[0].value: each.cells for each in published(parts)}
    # Of the methods that were measured here: the hosted Zep is not graphiti, nor anything else.
    assert set(beside) == {f"{name}, memart table2" for name in ("full", "mem0", "memart")}
    shown = [cell.value for cell in beside["memart, memart table2"][2:]]
    assert shown == [pytest.approx(0.4167), pytest.approx(0.3354), None]
    score = one(found, "score, %")
    assert {each.cells[0].value for each in published(score)} == set(beside)
    assert all(cell.mark is None for each in published(score) for cell in each.cells)
    chosen = one(tables(runs, metric=("bleu1",)), "sub-score bleu1, ")
    assert row(chosen, "full, memart table2")["no budget"].value == pytest.approx(0.3579)
    assert not published(one(tables(runs, metric=("f1_authors",)), "sub-score f1_authors, "))


@pytest.mark.parametrize(
    "unlike",
    [
        {"task_params": {"context": "turns", "last": 50}},
        {"provenance": {"task": {"published_data": False}}},
        {"model": "Qwen2.5-0.5B-Instruct"},
        {"task": "micro/memory"},
    ],
)
def test_they_stand_beside_nothing_that_was_asked_something_else(
    write: Callable[..., Path], unlike: dict[str, Any]
) -> None:
    folder = write("full", metrics(4, None), **unlike)
    assert not any(published(table) for table in tables(folder))


def test_f1_stands_beside_no_score_that_is_something_else(write: Callable[..., Path]) -> None:
    folder = write("full", {"adversarial_right": 5, "adversarial_asked": 10})
    assert not any(published(table) for table in tables(folder))


def test_a_model_is_the_same_however_it_is_spelled() -> None:
    measures = {"f1", "bleu1", "bertscore_f1", "embedding_similarity", "average"}
    for task in ("probe/locomo", "locomo/qa"):
        for name in ("Qwen2.5-7B-Instruct", "qwen-2.5-7b-instruct", "Llama-3.1-8B-Instruct"):
            assert {each.metric for each in quality(task, name)} == measures
            assert {each.metric for each in headlines(task, name)} == {"f1"}
            assert {each.metric for each in headlines(task, name, "similarity")} == {
                "embedding_similarity"
            }
    assert not quality("locomo/qa", "Qwen2.5-72B-Instruct")


@pytest.mark.parametrize("style", ["terminal", "markdown", "csv", "json", "latex"])
def test_every_format_has_both_tables(runs: Path, style: str) -> None:
    result = CliRunner().invoke(report, [str(runs), "--format", style], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    titles = ("what a memory costs", "parts of the score")
    for words in ("ledger-", "parts-") if style == "csv" else titles:
        assert words in result.stdout
    assert "memart table2" in result.stdout


def test_the_site_has_both_tables_and_every_measure(runs: Path, tmp_path: Path) -> None:
    folder = build_site(*load_runs([runs]), tmp_path / "site").parent
    page = (folder / "tasks" / "probe_locomo.html").read_text()
    for words in ("What a memory costs", "18,000", "parts of the score", "embedding_similarity"):
        assert words in page
    assert page.count('<tr class="published">') == 4 * 5
    assert "What a memory costs" not in (folder / "index.html").read_text()
    assert "What a memory costs" not in (folder / "runs" / "full.html").read_text()
    page = (folder / "runs" / "memart.html").read_text()
    for words in ("What a memory costs", "18,000", "an answer: prefilled"):
        assert words in page


def shown(folder: Path, *arguments: str) -> str:
    asked = [*arguments, "--out", str(folder)]
    result = CliRunner().invoke(show, asked, env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_s_own_ledger_is_shown(runs: Path) -> None:
    text = shown(runs, "memart")
    assert "what a memory costs: probe/locomo, Qwen2.5-7B-Instruct, embedded" in text
    assert "18,000" in text
    assert "read: what a memory took to take in the past" in text
    assert "what a memory costs" not in shown(runs, "full")


def test_a_sample_s_ledger_is_that_of_its_trials(runs: Path) -> None:
    said = {name: shown(runs, "mem0", "--sample", name) for name in (TALKS[0], TALKS[-1])}
    assert "18,000" in said[TALKS[0]]
    assert "18,000" not in said[TALKS[-1]]
    assert "3,000" in said[TALKS[-1]]
