"""Matching, refusing and judging two sides of runs."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import fsspec
import numpy as np
import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.results import aa
from agentbench_kv.results.baseline import read_baseline, save_baseline
from agentbench_kv.results.compare import compare
from agentbench_kv.results.compare_text import TEXT_FORMATS, targets
from agentbench_kv.results.runinfo import read_info, write_info
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.sources import open_sides
from agentbench_kv.results.store import RunStore

PROVENANCE = {
    "kvbench": "0.1.0",
    "packages": {"torch": "2.13", "scipy": "1.17"},
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
            for i, score in enumerate(scores):
                fields = {"kv": kv, "prompt_sha": f"sha{i}", "cluster": more.get("cluster")}
                fields |= {"score": score} if score is not None else {"status": "timeout"}
                fields["metrics"] = {} if score is None else {"tool_right": score, "tool_asked": 1}
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


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"packages": {"torch": "2.14", "scipy": "1.17"}}, "packages.torch 2.13 -> 2.14"),
        ({"task": {"data_sha": "e" * 64}}, "task.data_sha dddd"),
        ({"chat_template_sha": "x"}, "chat_template_sha"),
        ({"tool_parser": None}, "tool_parser hermes -> not recorded"),
    ],
)
def test_drifted_provenance_is_refused_unless_allowed(write_run, changed, named):
    base = load(write_run("a", [1] * 5))
    cand = load(write_run("b", [1] * 5, folder="o", provenance=changed))
    with pytest.raises(UsageError, match="refused") as error:
        compare(base, cand)
    assert named in str(error.value)
    assert "--allow-drift" in str(error.value)
    assert "\n" not in str(error.value)
    allowed = compare(base, cand, allow_drift=True)
    assert len(allowed.drift) == 1
    assert "differs, allowed" in TEXT_FORMATS["markdown"](allowed)


def test_seeds_prompts_and_mixed_resumes_are_drift_and_commits_are_not(write_run):
    base = load(write_run("a", [1] * 3))
    commit = load(write_run("b", [1] * 3, folder="o", provenance={"git_commit": "def"}))
    assert compare(base, commit).drift == []
    with pytest.raises(UsageError, match="seed 0 -> 1"):
        compare(base, load(write_run("c", [1] * 3, folder="o", seed=1)))
    other = write_run("d", [1] * 3, folder="o")
    lines = (other / "samples.jsonl").read_text().replace('"sha1"', '"shaX"')
    (other / "samples.jsonl").write_text(lines)
    with pytest.raises(UsageError, match="prompts differ from the other arm in 1 of 3 trials"):
        compare(base, load(other))
    mixed = write_run("e", [1] * 3, folder="o")
    resume = {"at": 1.0, "changed": {"tool_parser": ["old", "hermes"]}}
    document = json.loads((mixed / "run.json").read_text()) | {"resumes": [resume]}
    (mixed / "run.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="tool_parser within run e old -> hermes"):
        compare(base, load(mixed))


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
    apart = load(write_run("apart", [1] * 5, folder="o"))
    apart[0].__dict__["trials"] = [
        r.model_copy(update={"sample_id": f"x{r.sample_id}"}) for r in apart[0].trials
    ]
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


def test_the_noise_floor_is_two_fulls_that_share_samples(write_run):
    twice = load(write_run("a", [1, 1, 0, 1])), load(write_run("b", [1, 0, 0, 1], folder="o"))
    arms = [arm for side in twice for arm in side]
    (pair,) = noise_floor(arms)
    assert (pair.point, pair.n, pair.changed) == (0.25, 4, 1)
    assert "+25.0 points" in describe_noise([pair])
    assert "1 of 4 samples changed" in compare(*twice).noise
    warmer = load(write_run("c", [1] * 4, folder="p", spec={"temperature": 0.7}))
    method = load(write_run("d", [1] * 4, method="agentkv", budget=64, folder="p"))
    assert noise_floor([arms[0], arms[0], *warmer, *method]) == []
    assert "no A/A arm" in describe_noise([])


@pytest.mark.slow
def test_under_no_difference_compare_seldom_says_regression(write_run, make_trial):
    """Two arms that are right with the same chance on the same samples, and share half the luck."""
    (arm,) = load(write_run("a", [1] * 40))
    rng = np.random.default_rng(7)
    records = {s: [make_trial(f"s{i}", score=float(s)) for i in range(40)] for s in (0, 1)}
    said = []
    for _ in range(500):
        chance = rng.random(40)
        sides = [
            SavedArm(
                arm.path, arm.info, arm.summary,
                saved=tuple(records[int(s)][i] for i, s in enumerate(rng.random(40) < chance)),
            )
            for _ in range(2)
        ]  # fmt: skip
        said.append(compare(sides[:1], sides[1:], resamples=400).verdict)
    assert said.count("regression") <= 0.05 * len(said)
    assert len(set(said)) > 1


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
    saved = read_baseline(path.read_bytes(), "main").arms(path)
    assert compare(saved, cand).rows == compare(base, cand).rows
    assert saved[0].info.host == "saved"
    assert path.read_text().count('"sample_id"') == 30
    with pytest.raises(UsageError, match="letters, digits"):
        save_baseline("../main", base, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "format 2"),
        (lambda text: text.replace('"score":1.0', '"score":7', 1), "runs.0.trials.0.score"),
        (lambda text: text.replace('"score":1.0', '"score":NaN', 1), "holds NaN"),
        (lambda text: text[:-20], "not a baseline"),
        (lambda _: "[]", "not a baseline"),
    ],
)
def test_a_damaged_baseline_says_where(write_run, tmp_path, change, named):
    path = save_baseline("main", load(write_run("a", [1] * 3)), tmp_path)
    with pytest.raises(UsageError, match="main") as error:
        read_baseline(change(path.read_text()).encode(), "main")
    assert named in str(error.value)


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
        assert [[len(arm.trials) for arm in arms] for arms in sides] == [[3]] * len(places)
    assert problems == []
    memory.rm("/store", recursive=True)
    for missing in ("nothing", "memory://store/gone", "nosuch://x", str(tmp_path / "none.json")):
        with pytest.raises(UsageError), open_sides([missing], tmp_path / "runs"):
            pass
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run in"), open_sides(["empty"], tmp_path):
        pass
