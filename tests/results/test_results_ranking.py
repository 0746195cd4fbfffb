"""Ranks: nobody gets one on samples of their own choosing, by luck, or by repeating a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentbench_kv.results.gate import describe, repeats
from agentbench_kv.results.ranking import LEAST_SAMPLES, Board, boards, rank
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runs import Run, grouped, load_runs
from agentbench_kv.results.site.boards import views
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.tables.accuracy import accuracy_tables
from agentbench_kv.results.tables.report import curve_tables

Make = Callable[..., Path]
NAMES = [f"s{i}" for i in range(60)]


@pytest.fixture
def make(tmp_path: Path, spec: dict[str, Any], make_trial: Callable[..., TrialRecord]) -> Make:
    """Write a run: `right` are the samples it gets right, of `samples`."""

    def write(
        name: str,
        right: Iterable[str],
        samples: Sequence[str] = NAMES,
        group: int | None = None,
        trials: int = 1,
        prompt: str = "",
        provenance: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        known = set(right)
        own = spec | {"seed": 0} | changes
        peak = 1000 if own["budget"] is None else own["budget"] + 100
        kv = {"peak_live": peak, "logical": 1000, "events": int(peak < 1000), "longest_prefill": 90}
        expected = len(samples) * trials
        store = RunStore(tmp_path)
        with store.open(name, own, expected_trials=expected, provenance=provenance) as run:
            for i, sample in enumerate(samples):
                for trial in range(trials):
                    run.append_trial(
                        make_trial(
                            sample,
                            trial,
                            score=float(sample in known),
                            seed=own["seed"],
                            kv=kv,
                            prompt_sha=f"{prompt}{sample}",
                            cluster=None if group is None else f"g{i // group}",
                        )
                    )
        return tmp_path

    return write


def loaded(folder: Path) -> list[Run]:
    runs, problems = load_runs([folder])
    assert not problems
    return runs


def ranks(board: Board) -> dict[str, int | None]:
    """Rank the compressed entries of a board, one contest a budget."""
    budgets: dict[Any, list[Any]] = {}
    for entry in board.entries:
        if entry.group.compressed:
            budgets.setdefault(entry.group.budget, []).append(entry)
    found = rank(list(budgets.values()), small=board.too_small is not None)
    return {each.entry.group.name: each.rank for contest in found for each in contest}


def test_the_better_leads_and_what_cannot_be_told_apart_shares_its_rank(make: Make) -> None:
    make("a", NAMES[:50], method="snapkv")
    make("b", NAMES[:48], method="rkv")
    folder = make("c", NAMES[:5], method="h2o")
    (board,) = boards(loaded(folder))
    assert ranks(board) == {"snapkv at 256": 1, "rkv at 256": 1, "h2o at 256": 3}


def test_disjoint_seeds_are_no_tie(make: Make) -> None:
    make("full", NAMES, method="full", budget=None)
    make("good", NAMES[:57], method="rkv")
    other = [f"other{i}" for i in range(60)]
    folder = make("bad", [], samples=other, method="agentkv", seed=1)
    (board,) = boards(loaded(folder))
    assert ranks(board) == {"rkv at 256": 1}
    ((run, reason),) = board.out
    assert run.run_id == "bad"
    assert "0 of the 60" in reason


def test_a_second_family_of_seeds_is_a_board_of_its_own(make: Make) -> None:
    other = [f"other{i}" for i in range(40)]
    for seed, samples in ((0, NAMES), (1, other)):
        make(f"a{seed}", samples[:30], samples=samples, method="rkv", seed=seed)
        folder = make(f"b{seed}", samples[:2], samples=samples, method="h2o", seed=seed)
    make("more", other, samples=other, method="snapkv", seed=1)
    first, second = boards(loaded(folder))
    assert (len(first.samples), len(second.samples)) == (100, 40)
    assert ranks(first) == {"rkv at 256": 1, "h2o at 256": 2}
    assert ranks(second) == {"snapkv at 256": 1, "rkv at 256": 2, "h2o at 256": 3}


def test_one_lucky_sample_leads_nowhere(make: Make) -> None:
    make("a", NAMES[:50], method="rkv")
    make("b", NAMES[:48], method="snapkv")
    folder = make("lucky", NAMES[:1], samples=NAMES[:1], method="h2o")
    (board,) = boards(loaded(folder))
    assert "h2o at 256" not in ranks(board)
    assert len(board.samples) == 60
    assert [run.run_id for run, _ in board.out] == ["lucky"]


def test_alone_on_few_samples_nobody_leads(make: Make) -> None:
    few = NAMES[: LEAST_SAMPLES - 1]
    make("a", few, samples=few, method="rkv")
    folder = make("b", [], samples=few, method="h2o")
    (board,) = boards(loaded(folder))
    assert board.too_small is not None
    assert set(ranks(board).values()) == {None}


def test_few_groups_rank_nobody_however_many_samples(make: Make) -> None:
    make("a", NAMES, method="rkv", group=20)
    folder = make("b", [], method="h2o", group=20)
    (board,) = boards(loaded(folder))
    assert "3 groups" in (board.too_small or "")


@pytest.mark.parametrize("honest", [1, 3])
@pytest.mark.parametrize("dropped", [1, 10, 40])
def test_a_subset_chosen_after_the_fact_takes_no_rank(
    make: Make, dropped: int, honest: int
) -> None:
    """However few failures are dropped, and however many honest runs there are."""
    for method in ("rkv", "snapkv", "h2o")[:honest]:
        make(method, NAMES[:50], method=method)
    chosen = NAMES[: 60 - dropped]
    folder = make("picked", chosen, samples=chosen, method="agentkv")
    (board,) = boards(loaded(folder))
    assert len(board.samples) == 60
    assert "agentkv at 256" not in ranks(board)


def test_two_pickers_get_a_board_below_and_change_no_rank_above(make: Make) -> None:
    for method, right in (("rkv", 50), ("snapkv", 20)):
        make(method, NAMES[:right], method=method)
    chosen = NAMES[:30]
    make("picked", chosen, samples=chosen, method="agentkv")
    folder = make("picked2", chosen, samples=chosen, method="h2o")
    whole, part = boards(loaded(folder))
    assert ranks(whole) == {"rkv at 256": 1, "snapkv at 256": 2}
    assert len(part.samples) == 30
    assert set(ranks(part)) == {"rkv at 256", "snapkv at 256", "agentkv at 256", "h2o at 256"}


def test_a_limit_that_was_declared_is_compared_on_a_board_below(make: Make) -> None:
    make("full", NAMES, method="full", budget=None)
    make("a", NAMES[:50], method="rkv")
    few = NAMES[:25]
    folder = make("b", few, samples=few, method="h2o", limit=25)
    whole, part = boards(loaded(folder))
    assert ranks(whole) == {"rkv at 256": 1}
    assert ranks(part) == {"rkv at 256": 1, "h2o at 256": 1}
    assert (len(part.samples), part.full is not None) == (25, True)


def test_a_plug_in_without_a_budget_is_no_full(make: Make) -> None:
    make("memory", NAMES[:10], method="memory", budget=None)
    folder = make("a", NAMES[:50], method="rkv")
    (board,) = boards(loaded(folder))
    assert board.full is None
    make("full", NAMES, method="full-constrained", budget=None)
    (board,) = boards(loaded(folder))
    assert board.full is not None
    assert board.full.group.method == "full-constrained"


def test_a_repeated_run_is_one_run(make: Make) -> None:
    make("a", NAMES[:30], method="rkv", trials=3)
    folder = make("again", NAMES[:30], method="rkv", trials=3, concurrency=1)
    (group,) = grouped(loaded(folder))
    assert len(group.runs) == 2
    assert group.repeated == 180
    assert {len(scores) for scores in group.trials.values()} == {3}
    found = group.scores("pass^3")
    assert found is not None
    assert found.mean == 0.5


def test_the_earliest_of_repeated_runs_counts(make: Make) -> None:
    """A second try cannot replace an unlucky first one."""
    make("z-first", NAMES[:10], method="rkv")
    folder = make("a-second", NAMES[:50], method="rkv", concurrency=1)
    (group,) = grouped(loaded(folder))
    scores = group.scores()
    assert scores is not None
    assert scores.mean == pytest.approx(10 / 60)


def test_other_seeds_of_the_same_samples_are_more_trials(make: Make) -> None:
    make("a", NAMES[:30], method="rkv", seed=0)
    folder = make("b", NAMES[:45], method="rkv", seed=1)
    (group,) = grouped(loaded(folder))
    assert {len(scores) for scores in group.trials.values()} == {2}


def test_other_conditions_are_another_board(make: Make) -> None:
    make("a", NAMES[:50], method="rkv", temperature=0.0)
    make("b", NAMES[:20], method="h2o", temperature=0.0)
    folder = make("hot", NAMES, method="rkv", temperature=1.0)
    cold, hot = boards(loaded(folder))
    assert (cold.conditions, hot.conditions) == ("temperature=0.0", "temperature=1.0")
    assert ranks(cold) == {"rkv at 256": 1, "h2o at 256": 2}


def test_a_rival_whose_calls_are_not_read_is_on_another_board(make: Make) -> None:
    """`--tool-syntax none` leaves the prompts alone and makes any method score nothing."""
    make("full", NAMES[:1], method="full", budget=None, tool_syntax="none")
    folder = make("mine", NAMES[:20], method="rkv")
    placed = {board.conditions: board for board in boards(loaded(folder))}
    assert placed.keys() == {"tool_syntax=None", "tool_syntax=none"}
    assert placed["tool_syntax=None"].full is None


def placed(runs: Iterable[Run]) -> dict[str, set[str]]:
    """Name the runs on each board by what sets it apart."""
    return {
        board.conditions: {run.run_id for each in board.entries for run in each.group.runs}
        for board in boards(runs)
    }


def test_other_weights_under_the_same_name_are_another_board(make: Make) -> None:
    real, tuned = ({"model_sha": letter * 64} for letter in "ab")
    make("full", NAMES[:30], method="full", budget=None, model="/exp1/final", provenance=real)
    make("snapkv", NAMES[:30], method="snapkv", model="/exp1/final", provenance=real)
    folder = make("agentkv", NAMES, model="/exp2/final", provenance=tuned)
    assert placed(loaded(folder)) == {
        f"model_sha={'a' * 16}...": {"full", "snapkv"},
        f"model_sha={'b' * 16}...": {"agentkv"},
    }
    tables = accuracy_tables(loaded(folder))
    assert not [each for each in tables if "difference" in each.title and "b" * 16 in each.title]
    assert all("[model_sha=" in table.title for table in tables)


def test_repeats_on_other_weights_and_releases_are_no_repeats(make: Make) -> None:
    first = {"model_sha": "a" * 64, "kvbench": "0.1.0", "packages": {"torch": "2.8.0"}}
    other = {"model_sha": "b" * 64, "kvbench": "0.9.0", "packages": {"torch": "9.0.0"}}
    make("a", NAMES[:30], seed=0, provenance=first)
    folder = make("b", NAMES[:45], seed=1, provenance=other)
    runs = loaded(folder)
    assert [len(entry.group.runs) for board in boards(runs) for entry in board.entries] == [1, 1]
    known = ", ".join(f"{name}={{}}" for name in ("kvbench", "model_sha", "packages.torch"))
    assert {tuple(sorted(each.split(", "))) for each in placed(runs)} == {
        tuple(known.format("0.1", f"{'a' * 16}...", "2.8").split(", ")),
        tuple(known.format("0.9", f"{'b' * 16}...", "9.0").split(", ")),
    }


def test_what_an_engine_was_told_is_a_condition(make: Make) -> None:
    told = {"quantization": "fp8"}
    make("full", NAMES[:20], method="full", budget=None, engine_args=told)
    folder = make("mine", NAMES[:30])
    assert placed(loaded(folder)) == {
        "engine_args.quantization=None": {"mine"},
        "engine_args.quantization=fp8": {"full"},
    }


def test_what_compare_only_notes_splits_no_board(make: Make) -> None:
    first = {"kvbench": "0.1.0", "hardware": {"gpu": "A"}, "packages": {"scipy": "1.1"}}
    other = {"kvbench": "0.1.3", "hardware": {"gpu": "B"}, "packages": {"scipy": "2.0"}}
    make("full", NAMES, method="full", budget=None, provenance=first)
    folder = make("mine", NAMES[:30], provenance=other)
    assert placed(loaded(folder)) == {"": {"full", "mine"}}


def test_what_an_older_version_did_not_record_splits_no_board(make: Make) -> None:
    """Where weights differ, runs that say nothing go with most of those that do."""
    known = {"model_sha": "a" * 64, "context_limit": 4096, "task": {"data_sha256": "d"}}
    make("old", NAMES, method="full", budget=None)
    make("new", NAMES[:30], method="rkv", provenance=known)
    folder = make("part", NAMES[:30], method="h2o", provenance={"task": {"data_sha256": "d"}})
    assert placed(loaded(folder)) == {"": {"old", "new", "part"}}
    make("newer", NAMES[:30], method="snapkv", provenance=known)
    make("a-tuned", NAMES[:30], method="agentkv", provenance=known | {"model_sha": "b" * 64})
    assert [*placed(loaded(folder)).values()] == [{"old", "new", "newer", "part"}, {"a-tuned"}]


def test_values_that_begin_alike_are_told_apart(make: Make) -> None:
    for letter in "ab":
        known = {"engine_details": {"version": f"0.11.0+built.here.{letter}"}}
        folder = make(letter, NAMES, provenance=known)
    assert {*placed(loaded(folder))} == {
        f"engine_details.version=0.11.0+built.here.{letter}" for letter in "ab"
    }


def test_drifted_prompts_are_off_the_board(make: Make) -> None:
    make("full", NAMES, method="full", budget=None)
    make("a", NAMES[:30], method="rkv")
    folder = make("b", NAMES[:59], method="h2o", prompt="easier ")
    (board,) = boards(loaded(folder))
    assert ranks(board) == {"rkv at 256": 1}
    ((run, reason),) = board.out
    assert (run.run_id, reason.split(":")[0]) == ("b", "drift")


@pytest.mark.parametrize("budgets", [(256,), (100, 256, 400)])
def test_prompts_that_no_uncompressed_run_played_are_voted_on_by_all(
    make: Make, budgets: Sequence[int]
) -> None:
    """By method, the earliest where they are as many: at many budgets nobody has many votes."""
    make("full", NAMES[:20], samples=NAMES[:20], method="full", budget=None, limit=20)
    make("honest", NAMES[:30], method="rkv")
    for budget in budgets:
        folder = make(f"a{budget}", NAMES, method="agentkv", budget=budget)
        path = folder / f"a{budget}" / "samples.jsonl"
        lines = path.read_text().splitlines()
        easier = [line.replace('"prompt_sha":"', '"prompt_sha":"easier ') for line in lines[20:]]
        path.write_text("\n".join([*lines[:20], *easier]) + "\n")
    (board, *_) = boards(loaded(folder))
    assert {run.run_id for run, _ in board.out} == {f"a{budget}" for budget in budgets}
    assert {reason for _, reason in board.out} == {
        "drift: prompts differ from the other runs' in 40 of 60 trials, first in sample s20 trial 0"
    }


@pytest.mark.parametrize("forged", [["full"], ["no-budget"], ["no-budget", "another"]])
def test_runs_without_a_budget_throw_nobody_off(make: Make, forged: Sequence[str]) -> None:
    """Begun before all others, by its own word, a run of `full` had the only right prompts."""
    for number, method in enumerate(forged):
        make(f"f{number}", NAMES, method=method, budget=None, prompt="other ", seed=1)
    if len(forged) > 1:  # and more than `full` has behind it
        make("f2", NAMES, method="snapkv", prompt="other ")
        make("f3", NAMES, method="tova", prompt="other ")
    make("full", NAMES[:50], method="full", budget=None)
    make("a", NAMES[:30], method="rkv")
    folder = make("b", NAMES[:40], method="h2o")
    (board,) = boards(loaded(folder))
    assert all(run.run_id.startswith("f") and run.run_id != "full" for run, _ in board.out)
    assert {entry.group.method for entry in board.entries} == {"full", "rkv", "h2o"}


def test_two_runs_of_the_whole_cache_throw_nobody_off(make: Make) -> None:
    """`full` at another concurrency, and `full-constrained`, both of somebody's own making."""
    make("f1", NAMES, method="full", budget=None, prompt="other ", concurrency=2)
    make("f2", NAMES, method="full-constrained", budget=None, prompt="other ")
    make("full", NAMES[:50], method="full", budget=None)
    make("a", NAMES[:30], method="rkv")
    folder = make("b", NAMES[:40], method="h2o")
    (board,) = boards(loaded(folder))
    assert {run.run_id for run, _ in board.out} == {"f1", "f2"}


def test_a_board_of_scores_has_no_distances(make: Make) -> None:
    """Also beside a run that is on no board: the page of a task was one of fidelity's."""
    make("a", NAMES[:30], method="rkv")
    folder = make("b", NAMES[:30], method="h2o", samples=NAMES[:40])
    (view,) = views(loaded(folder))
    assert view.board.out
    assert view.distance == []


def test_other_seeds_are_told(make: Make) -> None:
    """Of twenty seeds of one method, the luckiest leads."""
    make("a", NAMES[:30], method="rkv")
    folder = make("b", NAMES[:31], method="h2o")
    (board,) = boards(loaded(folder))
    assert board.seeds == []
    make("c", NAMES[:55], method="snapkv", seed=17)
    (board,) = boards(loaded(folder))
    (said,) = board.seeds
    assert said.endswith("h2o at 256: 0; rkv at 256: 0; snapkv at 256: 17")


def test_who_hardly_ever_evicts_has_no_place(make: Make) -> None:
    """By an interval as long as all sessions but one, a method was `full` in the others."""
    make("a", NAMES[:30], method="rkv")
    folder = make("lazy", NAMES[:59], method="h2o")
    path = folder / "lazy" / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        line["kv"]["events"] = 0
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (board,) = boards(loaded(folder))
    assert [entry.group.method for entry in board.placed] == ["rkv"]
    (said,) = board.unplaced
    assert said.endswith("h2o at 256 (2%)")
    (scores, *_) = accuracy_tables(loaded(folder))
    assert said in scores.notes
    (view,) = views(loaded(folder))
    assert {row.name for row in view.matrix} == {"rkv", "h2o"}  # shown all the same
    assert any("h2o at 256 (2%)" in str(sentence) for _, sentence in view.answers)


def test_who_is_told_what_will_be_needed_has_no_place(make: Make) -> None:
    """By the task's own gold a control loses nothing, and honest methods lost their star to it."""
    make("full", NAMES[:58], method="full", budget=None)
    make("a", NAMES[:30], method="rkv")
    make("oracle", NAMES[:58], method="oracle-tools")
    folder = make("plug-in", NAMES[:58], method="mine", provenance={"foresees": True})
    (board,) = boards(loaded(folder))
    assert [entry.group.method for entry in board.placed] == ["rkv"]
    (said,) = board.unplaced
    assert said == (
        "no place, as it is told what a session still needs: mine at 256, oracle-tools at 256"
    )
    (view,) = views(loaded(folder))
    assert {r.entry.group.method for c in (*view.budgets, *view.tiers) for r in c.ranks} == {"rkv"}
    (table,) = curve_tables(loaded(folder))
    assert {row.cells[0].text or row.cells[0].value for row in table.rows} == {"rkv"}
    assert said in table.notes


def test_a_method_at_many_budgets_is_not_many_methods(make: Make) -> None:
    for budget in (100, 200, 300):
        make(f"a{budget}", NAMES[:20], samples=NAMES[:30], method="agentkv", budget=budget)
    make("b", NAMES[:40], method="rkv")
    folder = make("c", NAMES[:30], method="h2o")
    (board,) = boards(loaded(folder))
    assert len(board.samples) == 60
    assert {run.method for run, _ in board.out} == {"agentkv"}


def test_an_edited_summary_changes_nothing(make: Make) -> None:
    folder = make("a", NAMES[:10], method="rkv")
    before = loaded(folder)[0].summary
    (folder / "a" / "summary.json").write_text('{"score": {"point": 1.0}, "status": "complete"}')
    assert loaded(folder)[0].summary == before


def test_ranks_are_level_for_equal_methods_whatever_their_number(make: Make) -> None:
    """Thirty equal methods: the best of them looks good by luck alone."""
    rng = np.random.default_rng(5)
    for i in range(30):
        right = [name for name in NAMES if rng.random() < 0.5]
        folder = make(f"m{i}", right, method=f"method{i}")
    (board,) = boards(loaded(folder))
    assert set(ranks(board).values()) == {1}


def test_a_copy_of_a_run_is_no_noise_floor(make: Make) -> None:
    folder = make("full", NAMES[:50], method="full", budget=None)
    (one,) = loaded(folder)
    assert repeats([one, one]) == []
    assert "unknown" in describe([])
    make("full-again", NAMES[:49], method="full", budget=None)
    (pair,) = repeats(loaded(folder))
    assert pair.changed == 1
    assert "1 of 60 samples changed" in describe([pair])


def test_a_failed_trial_is_asked_what_others_were(
    tmp_path: Path, spec: dict[str, Any], make_trial: Callable[..., TrialRecord]
) -> None:
    for name, method in (("a", "rkv"), ("b", "h2o")):
        with RunStore(tmp_path).open(name, spec | {"method": method}, expected_trials=2) as run:
            kv = {"peak_live": 300, "logical": 900, "events": 1, "longest_prefill": 90}
            run.append_trial(make_trial("s0", metrics={"x_right": 2, "x_asked": 4}, kv=kv))
            if name == "a":
                run.append_trial(make_trial("s1", metrics={"x_right": 1, "x_asked": 2}, kv=kv))
            else:
                run.append_trial(make_trial("s1", status="timeout", kv=kv))
    (board,) = boards(loaded(tmp_path), "x")
    shares = {entry.group.method: entry.level.point for entry in board.entries}
    assert shares == {"rkv": pytest.approx(0.5), "h2o": pytest.approx(2 / 6)}


def test_a_sub_score_that_nobody_was_asked_is_on_no_board(
    tmp_path: Path, spec: dict[str, Any], make_trial: Callable[..., TrialRecord]
) -> None:
    """Nor is that of two methods' further runs a board of its own."""
    kv = {"peak_live": 300, "logical": 900, "events": 1, "longest_prefill": 90}
    for model, method, seed, asked in (
        ("asked", "rkv", 0, 2),
        ("never", "rkv", 0, 0),
        ("never", "h2o", 0, 0),
        ("asked", "h2o", 0, 2),
        ("asked", "rkv", 1, 0),
        ("asked", "h2o", 1, 0),
    ):
        own = spec | {"model": model, "method": method, "seed": seed}
        with RunStore(tmp_path).open(f"{model}-{method}-{seed}", own, expected_trials=1) as run:
            metrics = {"x_right": asked, "x_asked": asked}
            run.append_trial(make_trial(f"s{seed}", metrics=metrics, kv=kv))
    found = boards(loaded(tmp_path), "x")
    assert {board.setting.model: len(board.entries) for board in found} == {"asked": 2, "never": 0}
    assert {each.where["model"] for each in accuracy_tables(loaded(tmp_path), "x")} == {"asked"}
