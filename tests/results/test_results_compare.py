"""Matching, refusing and judging two sides of runs."""

from __future__ import annotations

import html
import json
import shutil
from itertools import combinations
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import fsspec
import numpy as np
import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.results import drift
from agentbench_kv.results.baseline import (
    open_sides,
    read_baseline,
    save_baseline,
    unread,
)
from agentbench_kv.results.compare import compare, sides
from agentbench_kv.results.compare_text import TEXT_FORMATS, targets
from agentbench_kv.results.drift import speed_conditions
from agentbench_kv.results.gate import Verdict, describe, repeats
from agentbench_kv.results.run_info import read_info, write_info
from agentbench_kv.results.runs import CONDITIONS, RunGroup, asked_once, load_runs
from agentbench_kv.results.store import RunStore

PROVENANCE = {
    "kvbench": "0.1.0",
    "packages": {"torch": "2.13.0", "scipy": "1.17.0", "numpy": "2.3.1"},
    "python": "3.11.7",
    "hardware": {"gpu": "A"},
    "task": {"data_sha": "d" * 64},
    "chat_template_sha": "c" * 64,
    "tool_parser": "hermes",
    "git_commit": "abc",
}
HOSTILE = "evil|<script>@me]]>\x1b[2J\u202e::error::%0A"


@pytest.fixture
def write_run(tmp_path, make_trial):
    """Return a function that writes a finished run and returns its folder."""

    def write(name, scores, *, budget=None, method="full", task="micro/recall-1k", seed=0, **more):
        spec = {"task": task, "method": method, "budget": budget, "engine": "embedded"}
        spec |= {"model": "micro", "seed": seed, "interval": 128, **more.get("spec", {})}
        provenance = PROVENANCE | more.get("provenance", {})
        peak = more.get("peak", 1000)
        kv = {"logical": 1000, "peak_live": peak, "longest_prefill": 200, "decode_tokens": 50}
        kv |= {"events": 1, "evicted": 500} if budget else {}
        store = RunStore(tmp_path / more.get("folder", "runs"))
        with store.open(name, spec, provenance, expected_trials=more.get("expected")) as run:
            for i, score in enumerate(scores, more.get("first", 0)):
                fields = {"kv": kv, "prompt_sha": f"sha{i}", "cluster": more.get("cluster")}
                fields |= {"score": score} if score is not None else {"status": "timeout"}
                fields["attempts"] = more.get("attempts", 1)
                fields["metrics"] = {} if score is None else {"tool_right": score, "tool_asked": 1}
                fields["metrics"] |= more.get("metrics", {}) if score is not None else {}
                if "groups" in more:
                    fields["cluster"] = f"g{i % more['groups']}"
                said = {"messages": [f"{name} {i}"]}
                fields["transcript"] = run.save_transcript(f"s{i}", 0, said)
                run.append_trial(make_trial(f"s{i}", **fields))
        path = store.root / name
        info = read_info(path)
        write_info(path, info.model_copy(update={"wall_s": more.get("wall_s", 10.0)}))
        return path

    return write


def load(*paths):
    return load_runs(paths)[0]


def test_a_harsh_budget_is_a_regression_and_itself_is_not(write_run):
    full = load(write_run("full", [1] * 40))
    harsh = load(write_run("harsh", [0] * 35 + [1] * 5, method="agentkv", budget=256, peak=300))
    found = compare(full, harsh)
    (row,) = found.rows
    assert (found.verdict, found.verdict.exit_code) == ("regression", 3)
    assert row.point == pytest.approx(-35 / 40)
    assert (row.n, row.test, row.more, row.less) == (40, "mcnemar", 0, 35)
    assert compare(full, full).verdict == "ok"
    assert compare(full, full, catch=8).verdict == "inconclusive"
    less = compare(full, harsh, metric="peak_live").rows[0]
    assert (less.verdict, less.point) == ("ok", pytest.approx(-0.7))
    worse = compare(harsh, full, metric="peak_live").rows[0]
    assert (worse.verdict, worse.point) == ("regression", pytest.approx(1000 / 300 - 1))


def test_an_undecided_verdict_names_the_samples_that_would_decide(write_run):
    base = load(write_run("a", [1] * 20 + [0] * 20))
    cand = load(write_run("b", [0] * 2 + [1] * 20 + [0] * 18, folder="other"))
    row = compare(base, cand).rows[0]
    assert row.verdict == "inconclusive"
    assert row.needed > 40
    assert row.needed_of == "samples"


def test_pairs_on_the_intersection_and_counts_the_rest(write_run):
    found = compare(
        load(write_run("a", [1] * 12)), load(write_run("b", [1] * 10, folder="other"))
    ).rows[0]
    assert (found.n, found.only_base, found.only_cand) == (10, 2, 0)


def test_failures_count_as_nothing_right_of_what_was_asked(write_run):
    base = load(write_run("a", [1] * 10))
    cand = load(write_run("b", [1] * 5 + [None] * 5, folder="other"))
    for metric in ("score", "tool"):
        row = compare(base, cand, metric=metric).rows[0]
        assert (row.n, row.cand_level) == (10, 0.5)
    with pytest.raises(UsageError, match=r"no sub-score 'tol'; known: .*tool"):
        compare(base, cand, metric="tol")


@pytest.mark.parametrize("metric", ["score", "tool"])
def test_a_small_earlier_run_does_not_hide_the_later_full_one(write_run, metric):
    """Of sub-scores only the 40 samples of the first run counted, and that was `ok`."""
    base = load(write_run("a", [1] * 200))
    cand = [
        *load(write_run("b", [1] * 40, folder="o", spec={"limit": 40})),
        *load(write_run("c", [0] * 20 + [1] * 20 + [0] * 160, folder="o", spec={"limit": 200})),
    ]
    (row,) = compare(base, cand, metric=metric).rows
    assert (row.verdict, row.n, row.only_base, row.cand_level) == ("regression", 200, 0, 0.2)
    (row,) = compare(cand, base, metric=metric).rows
    assert (row.n, row.base_level) == (200, 0.2)


def test_trials_of_several_runs_count_once_in_sub_scores(write_run, make_trial):
    """The earliest of a trial, also where that failed without saying what it was asked."""
    first = load(write_run("a", [None, 1, 0.0]))
    later = load(write_run("b", [1, 1, 1, 0], folder="o"))
    (group,) = sides([*first, *later])["micro/recall-1k", "micro"].values()
    asked = asked_once([group], "tool")
    assert group.scores("tool", asked).parts == {
        "s0": (0.0, 1.0), "s1": (1.0, 1.0), "s2": (0.0, 1.0), "s3": (0.0, 1.0),
    }  # fmt: skip
    path = write_run("c", [], folder="p")
    with RunStore(path.parent).open(path.name, read_info(path).spec, PROVENANCE) as run:
        run.append_trial(make_trial("s0", trial=1, metrics={"tool_right": 1, "tool_asked": 2}))
    both = RunGroup("full", (*later, *load(path)))
    assert both.scores("tool").parts["s0"] == (2.0, 3.0)


def test_samples_played_without_a_figure_are_never_ok(write_run):
    base = load(write_run("a", [1] * 60, metrics={"more_right": 1, "more_asked": 1}))
    few = {"metrics": {"more_right": 1, "more_asked": 1}, "spec": {"limit": 40}}
    cand = load(write_run("b", [1] * 40, folder="o", **few))
    assert compare(base, cand, metric="more").verdict == "ok"
    rest = load(write_run("c", [1] * 60, folder="o", spec={"limit": 60}))
    found = compare(base, [*cand, *rest], metric="more")
    assert (found.verdict, found.rows[0].n, found.rows[0].unsaid) == ("inconclusive", 40, 20)
    assert "20 of BASE's sessions have no more here" in found.rows[0].unfinished


def test_one_verdict_over_all_tasks_or_one_a_task(write_run):
    base = [
        *load(write_run("a1", [1] * 60, task="t/1")),
        *load(write_run("a2", [1] * 60, task="t/2")),
    ]
    cand = [
        *load(write_run("b1", [1] * 60, task="t/1", folder="o")),
        *load(write_run("b2", [0] * 60, task="t/2", folder="o")),
    ]
    pooled = compare(base, cand)
    assert [(row.tasks, row.n, row.point) for row in pooled.rows] == [(["t/1", "t/2"], 120, -0.5)]
    apart = compare(base, cand, by_task=True, margin=10)
    assert [str(row.verdict) for row in apart.rows] == ["ok", "regression"]
    assert apart.verdict == "regression"


@pytest.mark.parametrize(("tasks", "groups"), [(("b/x", "b/y"), 5), (("b/x", "c/x"), 10)])
def test_groups_of_a_benchmarks_tasks_are_the_same_groups(write_run, tasks, groups):
    """BFCL's memory tasks ask the same questions in three ways: no fifteen scenarios but five."""
    sides = []
    for folder in ("base", "cand"):
        runs = []
        for number, task in enumerate(tasks):
            path = write_run(f"r{number}", [1] * 30, task=task, folder=folder)
            lines = (path / "samples.jsonl").read_text().splitlines()
            found = [json.loads(line) | {"cluster": f"g{i % 5}"} for i, line in enumerate(lines)]
            (path / "samples.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in found))
            runs += load(path)
        sides.append(runs)
    assert compare(*sides).rows[0].clusters == groups


def test_folders_are_matched_by_task_model_method_and_budget(write_run):
    many = [("full", None), ("agentkv", 256), ("agentkv", 512)]
    base = [
        *(load(write_run(f"a{m}{b}", [1] * 3, method=m, budget=b, peak=300))[0] for m, b in many)
    ]
    cand = [load(write_run("b", [1] * 3, method="agentkv", budget=512, folder="o", peak=300))[0]]
    (row,) = compare(base, cand).rows
    assert (row.base, row.cand) == ("agentkv at 512", "agentkv at 512")
    stranger = load(write_run("c", [1] * 3, method="rkv", budget=64, folder="o", peak=200))
    with pytest.raises(UsageError, match="nothing to compare"):
        compare(base, stranger)
    (only,) = compare(base[:1], cand).rows
    assert only.base == "full"
    both = compare([*base], [*cand, *stranger])
    assert any("rkv at 64 on micro/recall-1k with micro has no partner" in n for n in both.notes)


PACKAGES = {"torch": "2.13.0", "scipy": "1.17.0", "numpy": "2.3.1"}


@pytest.mark.parametrize(
    ("changed", "named", "weight"),
    [
        (
            {"packages": PACKAGES | {"torch": "2.14.0"}},
            "packages.torch 2.13.0 -> 2.14.0",
            "refuses",
        ),
        ({"packages": PACKAGES | {"torch": "2.13.1"}}, "packages.torch 2.13.0 -> 2.13.1", "warns"),
        ({"packages": PACKAGES | {"scipy": "2.0.0"}}, "packages.scipy 1.17.0 -> 2.0.0", "warns"),
        ({"packages": {"scipy": "1.17.0"}}, "packages.numpy 2.3.1 -> not recorded", "refuses"),
        ({"kvbench": "0.2.0"}, "kvbench 0.1.0 -> 0.2.0", "refuses"),
        ({"kvbench": "0.1.1"}, "kvbench 0.1.0 -> 0.1.1", "warns"),
        ({"python": "3.12.1"}, "python 3.11.7 -> 3.12.1", "refuses"),
        ({"python": "3.11.9"}, "python 3.11.7 -> 3.11.9", "warns"),
        ({"task": {"data_sha": "e" * 64}}, "task.data_sha dddd", "refuses"),
        ({"task": {"data_sha": "d" * 64, "checker": "2"}}, "task.checker not recorded", "refuses"),
        ({"chat_template_sha": "x"}, "chat_template_sha", "refuses"),
        ({"tool_parser": None}, "tool_parser hermes -> not recorded", "refuses"),
        ({"phase_family": "qwen"}, "phase_family not recorded -> qwen", "refuses"),
        ({"model_sha": "m"}, "model_sha not recorded -> m", "refuses"),
        ({"engine_details": {"version": "9"}}, "engine_details.version not", "refuses"),
        ({"engine_details": {"flags": "--x"}}, "engine_details.flags not", "warns"),
        ({"hardware": {"gpu": "B"}}, "hardware.gpu A -> B", "warns"),
        ({"device": "cuda"}, "device not recorded -> cuda", "warns"),
    ],
)
def test_what_can_change_a_figure_refuses_and_the_rest_warns(write_run, changed, named, weight):
    base = load(write_run("a", [1] * 40))
    cand = load(write_run("b", [1] * 40, folder="o", provenance=changed))
    if weight == "refuses":
        with pytest.raises(UsageError, match="refused") as error:
            compare(base, cand)
        assert named in str(error.value)
        assert "--allow-drift" in str(error.value)
        assert "\n" not in str(error.value)
    allowed = compare(base, cand, allow_drift=weight == "refuses")
    assert allowed.verdict == "ok"
    assert {drift.weight for drift in allowed.drift} == {weight}
    text = TEXT_FORMATS["github"](allowed)
    assert f"differs, {'allowed' if weight == 'refuses' else 'should not matter'}: " in text
    assert named in text


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "timeout_s", "dtype", "task_params"])
def test_decoding_and_task_parameters_refuse(write_run, name):
    base = load(write_run("a", [1] * 5, spec={name: 1}))
    with pytest.raises(UsageError, match=f"{name} 1 -> 2"):
        compare(base, load(write_run("b", [1] * 5, spec={name: 2}, folder="o")))


@pytest.mark.parametrize("metric", [None, "output_tok_s"])
@pytest.mark.parametrize("theirs", [{"flash-attention": "on", "cells": "9"}, {}, None])
def test_an_engines_own_arguments_refuse(write_run, theirs, metric):
    """Flash attention on one side doubled the speed there, and a gate said `ok`."""
    mine = {"flash-attention": "off", "cells": "9"}
    base = load(write_run("a", [1] * 5, spec={"engine_args": mine}))
    cand = load(write_run("b", [1] * 5, spec={"engine_args": theirs}, folder="o"))
    now = (theirs or {}).get("flash-attention", "not recorded")
    with pytest.raises(UsageError, match=f"engine_args.flash-attention off -> {now}"):
        compare(base, cand, metric=metric)
    same = write_run("c", [1] * 5, spec={"engine_args": mine}, folder="s")
    assert compare(base, load(same), metric=metric).drift == []


def test_room_for_fewer_sessions_refuses_a_verdict_on_speed(write_run):
    base = load(write_run("a", [1] * 5, spec={"max_live_tokens": 4096}))
    cand = load(write_run("b", [1] * 5, spec={"max_live_tokens": 0}, folder="o"))
    assert compare(base, cand).drift[0].weight == "warns"
    with pytest.raises(UsageError, match="max_live_tokens 4096 -> not recorded"):
        compare(base, cand, metric="output_tok_s")
    older = load(write_run("c", [1] * 5, folder="s"))
    assert compare(older, cand, metric="output_tok_s").drift == []


@pytest.mark.parametrize("metric", [None, "output_tok_s"])
def test_threads_that_a_server_was_given_refuse_a_verdict_on_speed(write_run, metric):
    binds = {"environment": "VLLM_CPU_OMP_THREADS_BIND=0"}, {"environment": "OMP_NUM_THREADS=2"}
    sides = [
        load(write_run("a", [1] * 5, folder=f"{i}", provenance={"engine_details": bind}))
        for i, bind in enumerate(binds)
    ]
    if metric is None:
        assert compare(*sides).drift[0].weight == "warns"
        return
    with pytest.raises(UsageError, match=r"engine_details.environment VLLM_CPU_OMP_THR"):
        compare(*sides, metric=metric)


@pytest.mark.parametrize(
    ("number", "first", "told"), [(64, 0, "64 in b, 5 of them"), (5, 3, "5 in b, 2 of them")]
)
def test_speeds_of_other_work_are_refused(write_run, number, first, told):
    """One session alone is slower than 16 side by side, whatever the method."""
    base = load(write_run("a", [1] * 5))
    cand = load(write_run("b", [1] * number, folder="o", first=first))
    with pytest.raises(UsageError, match=f"trials 5 in a -> {told} the same"):
        compare(base, cand, metric="output_tok_s")
    mixed = load(write_run("c", [1] * 5, folder="o"))
    with pytest.raises(UsageError, match="trials 5 in a -> "):
        compare([*base, *cand], mixed, metric="output_tok_s")


def test_speeds_of_several_seeds_are_of_their_own_samples(write_run):
    """Micro tasks draw other samples with each seed; nine seeds are nine repetitions."""

    def side(name, number=5):
        return [
            load(write_run(f"{name}{i}", [1] * number, folder=name, seed=i, first=10 * i))[0]
            for i in range(3)
        ]

    assert compare(side("a"), side("b"), metric="output_tok_s").drift == []
    with pytest.raises(UsageError, match="trials 5 in a0 -> 6 in c0, 5 of them the same"):
        compare(side("a"), side("c", 6), metric="output_tok_s")


def test_attention_that_computes_otherwise_refuses(write_run):
    """llama.cpp's rows in float16 got flash attention, by the same command."""
    base = load(write_run("a", [1] * 5, provenance={"engine_details": {"setup": "x"}}))
    flash = {"engine_details": {"setup": "x", "attention": "flash"}}
    cand = load(write_run("b", [1] * 5, folder="o", provenance=flash))
    with pytest.raises(UsageError, match=r"engine_details.attention not recorded -> flash"):
        compare(base, cand)
    with pytest.raises(UsageError, match=r"engine_details.attention within BASE flash -> not rec"):
        compare([*base, *cand], [*base, *cand])


def test_a_side_is_of_one_code_of_its_method(write_run):
    """Seeds that were played before and after an edit counted as repetitions of one method."""

    def side(folder, *codes):
        for seed, code in enumerate(codes):
            told = {"provenance": {"method_code": code}} if code else {}
            write_run(f"r{seed}", [1] * 5, folder=folder, seed=seed, **told)
        return load(write_run("last", [1] * 5, folder=folder, seed=9).parent)

    old, new, unknown = side("a", "1", "1"), side("b", "2", "2"), side("d", "1", None)
    assert compare(old, new).drift == compare(old, unknown).drift == []
    with pytest.raises(UsageError, match="method_code within CAND 1 -> 2"):
        compare(old, side("c", "1", "2"))


def test_the_context_that_an_engine_found_is_compared(write_run):
    """The default of the option, which both had, hid it."""
    sides = [
        load(write_run("a", [1] * 5, folder=f"{limit}", spec={"context_limit": 0},
                       provenance={"context_limit": limit}))
        for limit in (8192, 4096)
    ]  # fmt: skip
    with pytest.raises(UsageError, match="context_limit 8192 -> 4096"):
        compare(*sides)


FAST, SLOW = ({"provenance": {"hardware": {"gpu": gpu}}} for gpu in "AB")
FLASH, PLAIN = ({"spec": {"engine_args": own}} for own in ({"flash-attention": "on"}, {}))
STILL, SPINS = (
    {"provenance": {"hardware": {"settings": {"GOMP_SPINCOUNT": n}}}} for n in ("1000", "unset")
)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (FAST, SLOW, "hardware.gpu within BASE A -> B"),
        (STILL, SPINS, "hardware.settings.GOMP_SPINCOUNT within BASE 1000 -> unset"),
        (FLASH, PLAIN, "engine_args.flash-attention within BASE not recorded -> on"),
        ({"provenance": {"concurrency": 1}}, {"provenance": {"concurrency": 16}},
         "concurrency within BASE 1 -> 16"),
    ],
)  # fmt: skip
def test_repetitions_of_a_side_are_alike(write_run, one, other, named):
    """Each side had both machines, one of them eight slow runs and the other eight fast ones."""

    def side(folder, most, rest):
        more = {"folder": folder, "wall_s": 10.0}
        for i in range(9):
            write_run(f"r{i}", [1], **more, **(most if i else rest))
        return load(write_run("last", [1], **more, **most).parent)

    base, cand = side("a", other, one), side("b", one, other)
    with pytest.raises(UsageError, match=named):
        compare(base, cand, metric="output_tok_s")
    if "provenance" in one:
        assert compare(base, cand).drift == []  # no machine changes a score


@pytest.mark.parametrize("mixed", [False, True])
def test_what_older_versions_did_not_record_is_no_difference(write_run, mixed):
    old, new = (
        write_run(name, [1], wall_s=10.0, folder=name, provenance={"hardware": hardware})
        for name, hardware in (
            ("a", {"gpu": "A"}),
            ("b", {"gpu": "A", "settings": {"OMP_WAIT_POLICY": "PASSIVE"}}),
        )
    )
    if mixed:
        write_run("c", [1], wall_s=10.0, folder="b", provenance={"hardware": {"gpu": "A"}})
    assert compare(load(old), load(new.parent), metric="output_tok_s").drift == []


def test_another_machine_refuses_a_verdict_on_speed_only(write_run):
    sides = [
        load(write_run("a", [1] * 5, folder=gpu, provenance={"hardware": {"gpu": gpu}}))
        for gpu in "AB"
    ]
    assert compare(*sides).drift[0].weight == "warns"
    with pytest.raises(UsageError, match=r"hardware.gpu A -> B"):
        compare(*sides, metric="output_tok_s")


def test_every_class_of_drift_is_in_the_manual():
    text = (Path(__file__).parents[2] / "docs" / "ci.md").read_text()
    names = (*drift.REFUSES, *drift.RELEASES, *drift.MACHINE, *drift.WARNS, *CONDITIONS)
    assert [name for name in names if f"`{name.removeprefix('packages.')}`" not in text] == []


def test_a_side_that_hardly_evicts_is_told(write_run):
    """By a long interval a candidate was the full cache, and `ok`."""
    base = load(write_run("a", [1] * 20, method="rkv", budget=256, peak=400))
    path = write_run("b", [1] * 20, method="rkv", budget=256, peak=400, folder="o")
    assert compare(base, load(path)).notes == []
    lines = (path / "samples.jsonl").read_text().replace('"events":1', '"events":0', 18)
    (path / "samples.jsonl").write_text(lines)
    (said,) = compare(base, load(path)).notes
    assert "100% of BASE's, 10% of CAND's trials had an event" in said


def test_prompts_and_mixed_runs_are_drift_and_commits_are_not(write_run):
    base = load(write_run("a", [1] * 3))
    commit = load(write_run("b", [1] * 3, folder="o", provenance={"git_commit": "def"}))
    assert compare(base, commit).drift == []
    other = write_run("d", [1] * 3, folder="o")
    lines = (other / "samples.jsonl").read_text().replace('"sha1"', '"shaX"')
    (other / "samples.jsonl").write_text(lines)
    with pytest.raises(UsageError, match="prompts differ from the other side's in 1 of 3 trials"):
        compare(base, load(other))
    asked = [
        load(write_run("f", [1] * 3, folder=sha, metrics={"session_sha": sha})) for sha in "pq"
    ]
    with pytest.raises(UsageError, match="prompts differ from the other side's in 3 of 3 trials"):
        compare(*asked)
    mixed = write_run("e", [1] * 3, folder="o")
    for changed, said in (
        ({"tool_parser": ["old", "hermes"]}, "tool_parser within run e old -> hermes"),
        ({"packages": [PACKAGES, PACKAGES | {"numpy": "1.9"}]}, "packages.numpy within run e"),
    ):
        document = json.loads((mixed / "run.json").read_text())
        document["resumes"] = [{"at": 1.0, "changed": changed}]
        (mixed / "run.json").write_text(json.dumps(document))
        with pytest.raises(UsageError, match=said):
            compare(base, load(mixed))
    sides = [
        load(write_run(f"w{w}", [1] * 3, folder="w", spec={"params": {"window": w}}))[0]
        for w in (8, 16)
    ]
    with pytest.raises(UsageError, match=r"params.window within CAND 16 -> 8"):
        compare(base, sides)


def test_further_seeds_and_samples_pair_on_what_is_shared(write_run):
    zero = load(write_run("a", [1] * 40))
    one = load(write_run("b", [0] * 40, seed=1))
    more = compare([*zero, *one], load(write_run("c", [1] * 50, folder="o")))
    (row,) = more.rows
    assert (row.base_level, row.n, row.only_cand, row.verdict) == (1.0, 40, 10, "ok")
    assert more.notes == ["left out: BASE b, as the other side has no run with seed 1"]
    assert "paired on the 40 samples both have; 0 only in BASE, 10 only in CAND" in (
        TEXT_FORMATS["github"](more)
    )
    with pytest.raises(UsageError, match="seed 0 -> 1"):
        compare(zero, one)
    assert compare(zero, one, allow_drift=True).verdict == "regression"


def test_what_no_verdict_may_rest_on_is_refused(write_run):
    base = load(write_run("a", [1] * 5))
    with pytest.raises(UsageError, match="CAND over is not valid"):
        compare(base, load(write_run("over", [1] * 5, method="agentkv", budget=64, peak=900)))
    with pytest.raises(UsageError, match="holds no trial"):
        compare(base, load(write_run("none", [])))
    with pytest.raises(UsageError, match=r"nothing to compare: BASE has full on micro/recall-1k"):
        compare(base, load(write_run("else", [1] * 5, task="bfcl/multi_turn_base")))
    with pytest.raises(UsageError, match="margin -1"):
        compare(base, base, margin=-1)
    with pytest.raises(UsageError, match=r"catch 3: .*at least the margin \(5\)"):
        compare(base, base, margin=5, catch=3)
    apart = load(write_run("apart", [1] * 5, folder="o", first=100))
    with pytest.raises(UsageError, match="share no sample"):
        compare(base, apart)


def test_a_half_written_run_and_nan_are_named_and_compared_on_what_they_have(write_run):
    base = load(write_run("a", [1] * 6))
    half = write_run("half", [1] * 6, folder="o", expected=9)
    lines = (half / "samples.jsonl").read_text().splitlines()
    lines[2] = lines[2].replace('"score":1.0', '"score":NaN')
    (half / "samples.jsonl").write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])
    found = compare(base, load(half))
    assert found.rows[0].n == 4
    notes = " ".join(found.notes)
    assert "4 of 9 trials finished" in notes
    assert "samples.jsonl line 3" in notes


def test_speed_needs_nine_repetitions_a_side(write_run):
    rng = np.random.default_rng(0)

    def runs(folder, seconds, number):
        for i in range(number):
            write_run(f"r{i}", [1], folder=folder, wall_s=seconds * rng.uniform(0.97, 1.03))
        return load(write_run(f"r{i}", [], folder=folder).parent) if number else []

    few = compare(runs("a", 10, 2), runs("b", 20, 2), metric="output_tok_s").rows[0]
    assert (few.verdict, few.needed, few.low) == ("inconclusive", 9, None)
    slow = compare(runs("c", 10, 9), runs("d", 20, 9), metric="output_tok_s", margin=5)
    assert slow.verdict == "regression"
    assert slow.rows[0].point == pytest.approx(-0.5, abs=0.03)
    assert any("not interleaved" in note for note in slow.notes)
    assert (
        compare(runs("c", 10, 9), runs("c", 10, 9), metric="output_tok_s", margin=5).verdict == "ok"
    )


def test_sessions_that_were_cut_off_are_not_fast(write_run):
    """Every trial of CAND ended after ten tokens, and it was called nine times as fast."""

    def runs(folder, score, seconds):
        for i in range(9):
            write_run(f"r{i}", [score] * 3, folder=folder, wall_s=seconds + i / 100)
        return load(write_run("r0", [], folder=folder, wall_s=seconds).parent)

    base, cut = runs("a", 1, 10), runs("b", None, 1)
    found = compare(base, cut, metric="output_tok_s")
    assert (found.verdict, found.exit_code) == ("inconclusive", 4)
    told = "0 of 27 trials failed in BASE, 27 of 27 trials failed in CAND, and what is cut off is n"
    assert found.rows[0].unfinished.startswith(told)
    assert found.rows[0].point > 5
    assert compare(cut, base, metric="output_tok_s").verdict == "regression"
    assert compare(cut, runs("c", None, 1), metric="output_tok_s").verdict == "ok"


def test_repetitions_that_do_not_alternate_are_told_of(write_run):
    """One early run of CAND said that they did; so did a run that was resumed much later."""

    def said(order):
        sides = {"b": [], "c": []}
        for at, side in enumerate(order):
            path = write_run(f"{side}{at}", [1], folder=order + side)
            info = read_info(path)
            write_info(path, info.model_copy(update={"created": 100.0 + at}))
            sides[side] += load(path)
        return compare(*sides.values(), metric="output_tok_s").notes

    told = "the repetitions were not interleaved"
    for order in ("bbbccc", "cccbbb", "cbbbbbbbcccccc"):
        assert any(note.startswith(told) for note in said(order)), order
    for order in ("bcbcbc", "bccbbccb", "bc", "bbbcccbbbccc"):
        assert not any(note.startswith(told) for note in said(order)), order
    path = write_run("resumed", [1], folder="r")
    document = json.loads((path / "run.json").read_text())
    document["resumes"] = [{"at": 1.0}]
    (path / "run.json").write_text(json.dumps(document))
    found = compare(load(path), load(write_run("x", [1], folder="x")), metric="output_tok_s")
    assert "resumed was resumed, so the speed is of several times" in found.notes


def test_a_past_from_files_makes_no_side_faster(write_run):
    read = {"ingest_calls": 5, "ingest_tokens": 100, "ingest_s": 9.0}
    files = read | {"ingest_files": 5, "ingest_files_s": 0.1}
    lost = load(write_run("early", [None] * 3))  # says nothing of files
    cold = load(write_run("a", [1] * 3, metrics=read))
    warm = load(write_run("b", [1] * 3, metrics=files, wall_s=1))
    told = "ingest_files 0 in sample s0 of a -> 5 of b"
    with pytest.raises(UsageError, match=told):
        compare(cold, warm, metric="output_tok_s")
    with pytest.raises(UsageError, match="ingest_files"):  # of one side, too
        compare([*cold, *warm], cold, metric="output_tok_s")
    with pytest.raises(UsageError, match=told):
        compare([*lost, *cold], warm, metric="output_tok_s")
    assert compare(cold, warm).drift == []
    assert speed_conditions(cold[0]) != speed_conditions(warm[0])
    # A trial that failed, or was tried again behind what it had read, is no other condition.
    failed = load(write_run("c", [1, None, 1], metrics=files))
    again = load(write_run("d", [1], metrics=read | {"ingest_files": 2}, attempts=2))
    for other, same in ((failed, warm), (again, load(write_run("e", [1], metrics=read)))):
        assert compare(other, same, metric="output_tok_s").drift == []
    assert speed_conditions(failed[0]) == speed_conditions(warm[0])


def test_memory_is_not_saved_by_sessions_that_were_cut_off(write_run):
    base = load(write_run("a", [1] * 40))
    cut = load(write_run("b", [1] * 20 + [None] * 20, folder="o", peak=500))
    (row,) = compare(base, cut, metric="peak_live").rows
    assert row.verdict == "inconclusive"
    told = "0 of 40 trials failed in BASE, 20 of 40 trials failed in CAND, and what is cut off"
    assert row.unfinished.startswith(told)
    copies = [load(write_run(f"a{i}", [None] * 3 + [1] * 37, folder="c"))[0] for i in range(9)]
    (row,) = compare(copies, cut, metric="peak_live").rows
    assert row.unfinished.startswith("27 of 360 trials failed in BASE, 20 of 40 trials")
    (row,) = compare(copies[:1], copies, metric="peak_live").rows
    assert row.unfinished is None
    (row,) = compare(cut, cut, metric="peak_live").rows
    assert (row.verdict, row.unfinished) == ("ok", None)


def test_the_noise_floor_is_two_fulls_that_share_samples(write_run):
    twice = load(write_run("a", [1, 1, 0, 1])), load(write_run("b", [1, 0, 0, 1], folder="o"))
    runs = [run for side in twice for run in side]
    (pair,) = repeats(runs)
    assert (pair.change.point, pair.change.n, pair.changed) == (0.25, 4, 1)
    assert "+25.0 points" in describe([pair])
    assert "1 of 4 samples changed" in compare(*twice).noise
    warmer = load(write_run("c", [1] * 4, folder="p", spec={"temperature": 0.7}))
    method = load(write_run("d", [1] * 4, method="agentkv", budget=64, folder="p"))
    assert repeats([runs[0], runs[0], *warmer, *method]) == []
    assert "no A/A arm" in describe([])


def test_the_noise_floor_is_that_of_the_metric(write_run):
    """It was the score's for all: two runs 50 points apart had a floor of nothing."""
    part = [{"part_right": right, "part_asked": 1} for right in (1, 0)]
    sides = [
        load(write_run(name, [1] * 40, folder=name, metrics=own))
        for name, own in zip("ab", part, strict=True)
    ]
    floor = compare(*sides, metric="part").noise
    assert floor.startswith("A/A noise floor of part on micro/recall-1k: full against full +100.0")
    assert "40 of 40 samples changed" in floor
    assert "0 of 40 samples changed" in compare(*sides).noise
    for metric in ("peak_live", "output_tok_s"):
        said = compare(*sides, metric=metric).noise
        assert said.startswith(f"the A/A noise floor of {metric} is unknown")


@pytest.mark.parametrize("metric", ["answer_ttft_ms", "recalled"])
def test_a_mean_that_is_neither_better_nor_worse_is_refused(write_run, metric):
    """A session's milliseconds were nats, and more of what was recalled was worse."""
    sides = [
        load(write_run(name, [1] * 40, folder=name,
                       metrics={f"{metric}_total": total, f"{metric}_count": 1}))
        for name, total in (("a", 100.0), ("b", 201.0))
    ]  # fmt: skip
    with pytest.raises(UsageError, match=f"{metric} is a mean of which more is no") as error:
        compare(*sides, metric=metric)
    assert "known: score" in str(error.value)
    with pytest.raises(UsageError, match="no sub-score 'tol'") as error:
        compare(*sides, metric="tol")
    assert metric not in str(error.value)


def test_a_run_and_its_own_copy_are_no_a_a_pair(write_run, tmp_path):
    run = load(write_run("a", [1] * 40))
    path = save_baseline("main", run, tmp_path)
    saved = read_baseline(path.read_bytes(), "main").loaded(path)
    found = compare(saved, run)
    assert found.verdict == "ok"
    assert "0 of 40 samples changed" not in found.noise
    assert "no A/A arm" in found.noise
    assert found.notes == [
        "CAND a is a copy of the run in BASE: they are alike because they are one, and no A/A"
    ]


def test_copies_of_a_run_are_no_repetitions(write_run, tmp_path):
    """A run copied nine times has a speed without spread, and would prove anything."""
    slow, fast = (write_run("r", [1] * 3, folder=f, wall_s=w) for f, w in (("s", 20), ("f", 10)))
    for i in range(9):
        for run in (slow, fast):
            shutil.copytree(run, tmp_path / f"nine{run.parent.name}" / str(i))
    sides = [load(*(tmp_path / f"nine{name}").glob("*")) for name in "fs"]
    row = compare(*sides, metric="output_tok_s").rows[0]
    assert (row.n, row.verdict) == (1, "inconclusive")
    assert compare(*sides).rows[0].n == 3


def test_a_saving_is_not_written_as_a_gain(write_run):
    full = load(write_run("a", [1] * 20))
    less = load(write_run("b", [1] * 20, method="agentkv", budget=256, peak=565, folder="o"))
    text = TEXT_FORMATS["markdown"](compare(full, less, metric="peak_live"))
    assert html.unescape(text).count("-43.5% [-43.5%, -43.5%] (less)") == 1
    back = TEXT_FORMATS["markdown"](compare(less, full, metric="peak_live"))
    assert "+77.0% [+77.0%, +77.0%] (more)" in html.unescape(back)


def test_few_equal_sizes_prove_nothing(write_run):
    base = load(write_run("a", [1] * 8))
    row = compare(base, load(write_run("b", [1] * 8, folder="o")), metric="peak_live").rows[0]
    assert (row.verdict, row.needed) == ("inconclusive", 9)


def test_several_rows_are_judged_together(write_run):
    """A change that one row alone would be failed for is not enough among twenty."""
    lost = 9
    tasks = [f"t/{i}" for i in range(20)]
    base = [load(write_run(f"a{i}", [1] * 100, task=t))[0] for i, t in enumerate(tasks)]
    cand = [
        load(write_run(f"b{i}", [0] * lost + [1] * (100 - lost), task=t, folder="o"))[0]
        for i, t in enumerate(tasks)
    ]
    alone = compare(base[:1], cand[:1], by_task=True)
    assert alone.verdict == "regression"
    assert alone.rows[0].p_adjusted == alone.rows[0].p_value
    together = compare(base, cand, by_task=True)
    assert together.verdict == "inconclusive"
    assert together.rows[0].p_adjusted == pytest.approx(20 * together.rows[0].p_value)
    text = TEXT_FORMATS["github"](together)
    assert text.count("p-values are Holm's for 20 rows") == 1
    assert text.count("the 99.85%25 interval of the change shows a loss of more than 1 point") == 1


def test_pass_k_pairs_by_sample(write_run, make_trial):
    tries = {"a": ([1, 1, 1, 0], [1, 0, 1, 0]), "b": ([1, 1], [1, 1]), "c": ([1, 0, 0], [0, 0, 0])}
    sides = [write_run(name, [], folder=name) for name in "ab"]
    for i, folder in enumerate(sides):
        with RunStore(folder.parent).open(folder.name, read_info(folder).spec, PROVENANCE) as run:
            for sample, scores in tries.items():
                for trial, score in enumerate(scores[i]):
                    run.append_trial(make_trial(sample, trial=trial, score=score))
    base, cand = map(load, sides)
    (row,) = compare(base, cand, metric="pass^2").rows
    chances = [
        [fmean(map(all, combinations(scores[i], 2))) for scores in tries.values()] for i in (0, 1)
    ]
    assert (row.base_level, row.cand_level) == pytest.approx(tuple(map(fmean, chances)))
    assert (row.n, row.test) == (3, "permutation")
    with pytest.raises(UsageError, match="--trials 5"):
        compare(base, cand, metric="pass^5")
    with pytest.raises(UsageError, match=r"no sub-score 'pass\^0'"):
        compare(base, cand, metric="pass^0")


def test_two_releases_of_a_benchmark_share_no_verdict(write_run):
    tasks = ("bfcl/memory", "tau2-v1/retail", "tau2/retail")
    sides = [
        [load(write_run(t.replace("/", "_"), [1] * 9, task=t, folder=f))[0] for t in tasks]
        for f in "ab"
    ]
    with pytest.raises(UsageError, match=r"tau2 and tau2-v1 are two releases .*--by task"):
        compare(*sides)
    assert [row.tasks for row in compare(*sides, by_task=True).rows] == [[t] for t in tasks]
    pooled = compare(*([run for run in side if "-v1" not in run.setting.task] for side in sides))
    assert pooled.rows[0].tasks == ["bfcl/memory", "tau2/retail"]


def test_few_groups_say_what_they_cannot_rule_out(write_run):
    sides = [load(write_run(f, [1] * 200, folder=f, groups=10)) for f in "ab"]
    found = compare(*sides)
    assert (found.verdict, found.rows[0].clusters) == ("ok", 10)
    assert found.notes == [
        "10 groups cannot rule out that 28% of all groups are lost whole, if none of these was"
    ]
    alone = [load(write_run(f"n{f}", [1] * 200, folder=f)) for f in "ab"]
    assert compare(*alone).notes == []


@pytest.mark.parametrize("inconclusive", ["fail", "ok"])
@pytest.mark.parametrize(
    ("right", "verdict"), [(60, "ok"), (56, "inconclusive"), (20, "regression")]
)
def test_junit_and_annotations_agree_with_the_exit_code(write_run, inconclusive, right, verdict):
    base = load(write_run("a", [1] * 60))
    cand = load(write_run("b", [0] * (60 - right) + [1] * right, folder="o"))
    found = compare(base, cand, inconclusive=inconclusive)
    assert found.verdict == verdict
    suite = ElementTree.fromstring(TEXT_FORMATS["junit"](found))
    failed = verdict == "regression" or (verdict == "inconclusive" and inconclusive == "fail")
    assert bool(found.exit_code) == failed
    assert suite.get("errors") == "0"
    assert (suite.get("failures") == "1") == failed == (suite.find(".//failure") is not None)
    skipped = verdict == "inconclusive" and not failed
    assert (suite.get("skipped") == "1") == skipped == (suite.find(".//skipped") is not None)
    severity = "error" if failed else "warning" if skipped else "notice"
    assert TEXT_FORMATS["github"](found).startswith(f"::{severity} title=kvbench {verdict}::")


def test_notes_are_said_once(write_run):
    tasks = [f"t/{i}" for i in range(5)]
    sides = [
        [load(write_run(f"{f}{t[2:]}", [1] * 30, task=t, folder=f))[0] for t in tasks] for f in "ab"
    ]
    text = TEXT_FORMATS["github"](compare(*sides, by_task=True, catch=5))
    remarks = [line for line in text.splitlines() if line.startswith("::notice")]
    assert len(remarks) == len(set(remarks)) == 2  # the rule, and the A/A floor
    assert "not shown" not in text


def test_flips_list_the_largest_changes_with_both_transcripts(write_run, tmp_path):
    base = write_run("a", [1, 1, 0.8, 0.5, 0, 0.3])
    cand = write_run("b", [1, None, 0.7, 0.5, 1, 0.9], folder="o")
    found = compare(load(base), load(cand), listed=3)
    (row,) = found.rows
    assert (row.more, row.less) == (2, 2)
    assert [(f.sample, f.base, f.cand) for f in row.flips] == [
        ("s1", 1.0, 0.0), ("s4", 0.0, 1.0), ("s5", 0.3, 0.9),
    ]  # fmt: skip
    first = row.flips[0]
    assert (first.base_status, first.cand_status) == ("scored", "timeout")
    assert json.loads(Path(first.base_transcript).read_text()) == {"messages": ["a 1"]}
    assert json.loads(Path(first.cand_transcript).read_text()) == {"messages": ["b 1"]}
    text = html.unescape(TEXT_FORMATS["markdown"](found))
    assert "4 of 6 samples changed, 2 up and 2 down; the 3 largest changes" in text
    assert f"s1: 1 (scored) > 0 (timeout): {first.base_transcript} | " in text
    assert json.loads(TEXT_FORMATS["json"](found))["rows"][0]["flips"][0]["sample"] == "s1"
    assert compare(load(base), load(cand)).rows[0].flips == []
    path = save_baseline("main", load(base), tmp_path)
    saved = read_baseline(path.read_bytes(), "main").loaded(path)
    assert compare(saved, load(cand), listed=1).rows[0].flips[0].base_transcript is None


def test_flips_find_the_trial_that_differs(write_run, make_trial):
    sides = [write_run(name, [], folder=name) for name in "ab"]
    for folder, scores in zip(sides, ((1, 1), (1, 0)), strict=True):
        with RunStore(folder.parent).open(folder.name, read_info(folder).spec, PROVENANCE) as run:
            for trial, score in enumerate(scores):
                link = run.save_transcript("s", trial, {})
                run.append_trial(make_trial("s", trial=trial, score=score, transcript=link))
    (flip,) = compare(*map(load, sides), listed=5).rows[0].flips
    assert (flip.base, flip.cand) == (1.0, 0.5)
    paths = [Path(flip.base_transcript), Path(flip.cand_transcript)]
    assert paths[0].name == paths[1].name == sorted((sides[0] / "transcripts").iterdir())[1].name


def test_every_format_neutralizes_names(write_run):
    base = load(write_run("a", [1] * 20, task=HOSTILE))
    found = compare(base, load(write_run("b", [0] * 20, task=HOSTILE, folder="o")))
    text = {name: form(found) for name, form in TEXT_FORMATS.items()}
    for name in ("markdown", "junit", "github"):
        assert not {"\x1b", "\u202e"} & set(text[name])
    assert "<script>" not in text["markdown"]
    assert "@me" not in text["markdown"]
    assert {line.count("|") for line in text["markdown"].splitlines() if line[:1] == "|"} == {12}
    suite = ElementTree.fromstring(text["junit"])
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    assert suite.find("testcase").get("classname").startswith("evil|<script>@me]]>\\x1b")
    assert all(line.startswith("::") for line in text["github"].splitlines())
    assert "%250A" in text["github"]
    assert json.loads(text["json"])["verdict"] == "regression"
    assert targets(["junit=a=b.xml"]) == [("junit", targets(["junit=a=b.xml"])[0][1])]
    for bad in ("junit", "pdf=x", "junit="):
        with pytest.raises(UsageError, match="expected FORMAT=FILE"):
            targets([bad])


def test_a_baseline_gives_the_same_verdict_as_its_run(write_run, tmp_path):
    base = load(write_run("a", [1] * 30, cluster="g"))
    cand = load(write_run("b", [1] * 10 + [0] * 20, folder="o", cluster="g"))
    path = save_baseline("main", base, tmp_path / "baselines")
    saved = read_baseline(path.read_bytes(), "main").loaded(path)
    assert compare(saved, cand).rows == compare(base, cand).rows
    assert saved[0].info.host == "saved"
    assert path.read_text().count('"sample_id"') == 30
    with pytest.raises(UsageError, match=r"main.json exists; --force"):
        save_baseline("main", cand, path.parent)
    assert read_baseline(path.read_bytes(), "main").runs[0].info.run_id == "a"
    save_baseline("main", cand, path.parent, force=True)
    assert read_baseline(path.read_bytes(), "main").runs[0].info.run_id == "b"
    over = load(write_run("over", [1] * 5, method="agentkv", budget=64, peak=900))
    with pytest.raises(UsageError, match="over is not valid"):
        save_baseline("over", over, tmp_path)
    with pytest.raises(UsageError, match="letters, digits"):
        save_baseline("../main", base, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "format 2"),
        (
            lambda text: text.replace('"score":1.0', '"score":7', 1),
            "trials.0: Value error, score",
        ),
        (
            lambda text: text.replace('"score":1.0', '"score":NaN', 1),
            "(JSON is malformed",
        ),
        (lambda text: text[:-20], "not a baseline"),
        (lambda _: "[]", "not a baseline"),
    ],
)
def test_a_damaged_baseline_says_where(write_run, tmp_path, change, named):
    path = save_baseline("main", load(write_run("a", [1] * 3)), tmp_path)
    with pytest.raises(UsageError, match="main") as error:
        read_baseline(change(path.read_text()).encode(), "main")
    assert named in str(error.value)


def test_a_baseline_of_an_older_kvbench_loads_and_its_summary_is_ignored(write_run, tmp_path):
    base = load(write_run("a", [1] * 30))
    path = save_baseline("main", base, tmp_path)
    document = json.loads(path.read_text())
    (run,) = document["runs"]
    run["summary"] = base[0].summary.model_dump(mode="json") | {"score": None, "method": "evil"}
    run["trials"].append(run["trials"][0] | {"score": 0.0})
    (saved,) = read_baseline(json.dumps(document).encode(), "main").loaded(path)
    assert (saved.method, saved.summary.samples) == ("full", 30)
    assert saved.summary.score.point == pytest.approx(29 / 30)  # the last record of a trial counts


def test_sides_come_from_ids_folders_names_and_urls(write_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run("a", [1] * 3)
    write_run("deep", [1] * 3, folder="reps/1")
    saved = save_baseline("main", load(run), tmp_path / "baselines")
    memory = fsspec.filesystem("memory")
    memory.put(str(run.parent), "/store/runs", recursive=True)
    memory.pipe_file("/store/main.json", saved.read_bytes())
    urls = ["memory://store/runs", "memory://store/runs/a", "memory://store/main.json"]
    places = ["a", "runs", str(run), "reps", "main", str(saved), saved.as_uri(), *urls]
    with open_sides(places, tmp_path / "runs") as (sides, problems):
        assert [[len(run.records()) for run in runs] for runs in sides] == [[3]] * len(places)
    assert problems == []
    memory.rm("/store", recursive=True)
    for missing in ("nothing", "memory://store/gone", "nosuch://x", str(tmp_path / "none.json")):
        with pytest.raises(UsageError), open_sides([missing], tmp_path / "runs"):
            pass
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run in"), open_sides(["empty"], tmp_path):
        pass


def test_a_candidate_that_was_cut_off_is_never_ok(write_run):
    """Its engine died on the samples that it would have lost."""
    base = load_runs([write_run("base", [1.0] * 200)])[0]
    whole = load_runs([write_run("whole", [1.0] * 200, folder="whole")])[0]
    cut = load_runs([write_run("cut", [1.0] * 180, expected=200, folder="cut")])[0]
    assert compare(base, whole).verdict is Verdict.OK
    found = compare(base, cut)
    assert (found.verdict, found.exit_code) == (Verdict.INCONCLUSIVE, 4)
    assert "cut is not finished" in (found.rows[0].unfinished or "")
    assert "run it again" in TEXT_FORMATS["junit"](found)
    assert compare(base, cut, inconclusive="ok").exit_code == 4


def test_a_candidate_that_died_early_is_no_matter_of_too_few_samples(write_run):
    """The more is missing, the less is decided, and that passed."""
    base = load_runs([write_run("base", [1.0] * 200)])[0]
    died = load_runs([write_run("died", [1.0] * 12, expected=200, folder="died")])[0]
    few = load_runs([write_run("few", [1.0] * 12, folder="few", spec={"limit": 12})])[0]
    for cand, code in ((died, 4), (few, 0)):
        found = compare(base, cand, inconclusive="ok")
        assert (found.verdict, found.exit_code) == (Verdict.INCONCLUSIVE, code)


def test_a_candidate_whose_failures_were_dropped_is_never_ok(write_run):
    """Whole by its own count, which somebody lowered; a declared limit is no such thing."""
    base = load_runs([write_run("base", [1.0] * 200)])[0]
    kept = load_runs([write_run("kept", [1.0] * 180, expected=180, folder="kept")])[0]
    assert compare(base, kept).verdict is Verdict.INCONCLUSIVE
    first = {"spec": {"limit": 180}}
    declared = load_runs([write_run("few", [1.0] * 180, expected=180, folder="few", **first)])[0]
    assert compare(base, declared).verdict is Verdict.OK


@pytest.fixture
def two_tasks(write_run, tmp_path):
    """Return a BASE of two methods and two tasks, and the folder of a CAND that is its copy."""
    for name, more in (
        ("a", {"task": "t/1"}),
        ("b", {"task": "t/2"}),
        ("c", {"task": "t/1", "method": "h2o", "budget": 256, "peak": 400}),
    ):
        path = write_run(name, [1.0] * 60, **more)
    shutil.copytree(path.parent, tmp_path / "cand")
    return load(path.parent), tmp_path / "cand"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("b", "CAND has nothing on t/2 with micro"),
        ("c", "CAND has no h2o at 256 on t/1 with micro"),
    ],
)
def test_a_candidate_that_lacks_a_method_or_a_task_is_never_ok(two_tasks, gone, said):
    """Its run broke, and the part that went well was called `ok`."""
    base, cand = two_tasks
    assert compare(base, load(cand)).verdict == "ok"
    shutil.rmtree(cand / gone)
    found = compare(base, load(cand), by_task=True)
    assert (found.verdict, found.exit_code, found.missing) == ("inconclusive", 4, [said])
    assert {row.verdict for row in found.rows} == {"ok"}
    for form in TEXT_FORMATS.values():
        assert html.unescape(form(found)).count(said) >= 1
    suite = ElementTree.fromstring(TEXT_FORMATS["junit"](found))
    count = len(found.rows) + 1
    assert (suite.get("tests"), suite.get("failures")) == (str(count), "1")
    assert TEXT_FORMATS["github"](found).count("::error title=kvbench inconclusive::not comp") == 1
    # What was not played is no matter of too few samples, of which `--inconclusive ok` is.
    lenient = compare(base, load(cand), inconclusive="ok")
    assert lenient.exit_code == 4
    suite = ElementTree.fromstring(TEXT_FORMATS["junit"](lenient))
    assert (suite.get("failures"), suite.get("skipped")) == ("1", "0")
    meant = [run for run in base if run.run_id != gone]  # BASE by the runs that are meant
    assert compare(meant, load(cand)).verdict == "ok"


def test_a_candidate_with_a_run_that_cannot_be_read_is_never_ok(two_tasks):
    """Also where BASE has nothing like it, or another seed of the same."""
    base, cand = two_tasks
    shutil.copytree(cand / "b", cand / "b1")
    (cand / "b1" / "run.json").write_text("{")
    with open_sides([str(base[0].path.parent), str(cand)], cand) as (sides, problems):
        broken = unread(sides, problems)
        found = compare(*sides, unread=broken)
    assert [each.path.name for each in broken] == ["b1"]
    assert (found.verdict, found.exit_code) == ("inconclusive", 4)
    assert "b1 cannot be read" in found.lacking
    lines = (cand / "b" / "samples.jsonl").read_text()
    (cand / "b" / "samples.jsonl").write_text(lines + '{"sample_id"')
    shutil.rmtree(cand / "b1")
    with open_sides([str(cand)], cand) as (sides, problems):
        assert problems
        assert unread(sides, problems) == []  # a torn line is of a run that was read


def test_a_loss_of_what_is_there_stays_a_regression(two_tasks, write_run):
    base, _ = two_tasks
    cand = load(write_run("a", [0.0] * 60, task="t/1", folder="o"))
    found = compare(base, cand)
    assert (found.verdict, len(found.missing)) == ("regression", 2)


def test_many_things_that_are_missing_are_one_line(write_run):
    tasks = [f"t/{i}" for i in range(9)]
    base = [load(write_run(f"a{i}", [1] * 40, task=task))[0] for i, task in enumerate(tasks)]
    found = compare(base, load(write_run("b", [1] * 40, task="t/0", folder="o")))
    assert len(found.missing) == 8
    assert "t/6 with micro; and 2 more; it may be" in found.lacking
