"""Repeated measurements: files, medians, paired ratios, reasons, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.results.tables.formats import render_markdown
from agentbench_kv.results.tables.model import Kind, Table
from agentbench_kv.serving_bench.measurements import (
    LoadMeasurement,
    ServingArm,
    ServingFolder,
    ServingPlan,
    serving_folders,
)
from agentbench_kv.serving_bench.summary import ServingSummary, summarize_serving
from agentbench_kv.serving_bench.table_notes import DUMMY
from agentbench_kv.serving_bench.tables import serving_tables, summary_tables

AGENTKV = ServingArm(name="agentkv 4096", method="agentkv", budget=4096, settings={"interval": 128})
OTHER = AGENTKV.model_copy(update={"settings": {"interval": 8192, "trigger": "turn"}})
GONE = ServingArm(name="a plug-in's", method="not-installed", settings={"a": 1})
ARMS = [ServingArm(name="full", method="full"), AGENTKV]
KV = {"events": 8, "session_resets": 0, "max_over_budget": 100, "median_peak_live": 4224.0}
SPEEDS = {
    ("full", "c8"): [100.0, 200.0, 300.0],
    ("full", "c16"): [90.0, 180.0, 270.0],
    ("agentkv 4096", "c8"): [110.0, 260.0, 330.0],
    ("agentkv 4096", "c16"): [200.0, 300.0, 600.0],
}


def plan(**changes: Any) -> ServingPlan:
    fields: dict[str, Any] = {
        "engine": "vllm",
        "model": "/models/Qwen3-8B",
        "arms": ARMS,
        "shapes": ["32k/1k"],
        "loads": ["c8", "c16"],
        "turns": 1,
        "tool_tokens": 256,
        "think_time_s": 0.0,
        "sessions": None,
        "warmup": 2,
        "repeats": 3,
        "seed": 0,
    }
    return ServingPlan(**{**fields, **changes})


def measurement(
    arm: str, load: str, repetition: int, speed: float, **changes: Any
) -> LoadMeasurement:
    figures = {
        "output_throughput": speed, "completed": 16, "failed": 0, "median_ttft_ms": 10.5,
        "duration": 8.0, "total_output_tokens": 8 * speed, "mean_e2el_ms": 4e3,
        "request_throughput": 2.0,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "arm": arm,
        "shape": "32k/1k",
        "load": load,
        "repetition": repetition,
        "place": 0,
        "date": "2026-11-21T00:00:00+00:00",
        "backend": "vllm/gateway",
        "model_id": "Qwen3-8B",
        "num_prompts": 16,
        "max_concurrency": int(load[1:]) if load.startswith("c") else None,
        "request_rate": "inf",
        "figures": {**figures, **changes.pop("figures", {})},
        "kv": KV if arm.startswith("agentkv") else None,
    }
    return LoadMeasurement(**{**fields, **changes})


def measured() -> list[LoadMeasurement]:
    return [
        measurement(arm, load, repetition, speed)
        for (arm, load), speeds in SPEEDS.items()
        for repetition, speed in enumerate(speeds)
    ]


def summary(changed: list[LoadMeasurement] | None = None, **changes: Any) -> ServingSummary:
    return summarize_serving(plan(**changes), measured() if changed is None else changed)


def cell(found: ServingSummary, arm: str, load: str) -> Any:
    return next(each for each in found.cells if (each.arm, each.load) == (arm, load))


def test_a_cell_is_the_median_of_its_repetitions() -> None:
    found = cell(summary(), "full", "c8")
    assert found.repetitions == 3
    assert found.figures["output_throughput"].point == 200.0
    assert found.figures["median_ttft_ms"].point == 10.5
    assert (found.ratios, found.kv, found.reasons) == ({}, {}, [])


def test_ratios_are_paired_by_repetition() -> None:
    ratio = cell(summary(), "agentkv 4096", "c8").ratios["full"]
    paired = np.array(SPEEDS["agentkv 4096", "c8"]) / np.array(SPEEDS["full", "c8"])
    assert ratio.point == pytest.approx(np.median(paired))
    assert ratio.point != pytest.approx(260.0 / 200.0)
    assert ratio.low == pytest.approx(min(paired))
    assert ratio.high == pytest.approx(max(paired))


def test_a_repetition_that_one_side_lacks_is_left_out_of_the_ratio() -> None:
    kept = [m for m in measured() if m.key != ("full", "32k/1k", "c8", 1)]
    assert cell(summary(kept), "agentkv 4096", "c8").ratios["full"].n == 2


def test_a_repetition_with_failures_is_left_out_of_the_ratio() -> None:
    broken = measurement("full", "c8", 0, 1.0, figures={"failed": 1})
    runs = [broken if run.key == broken.key else run for run in measured()]
    ratio = cell(summary(runs), "agentkv 4096", "c8").ratios["full"]
    assert (ratio.n, ratio.point) == (2, pytest.approx((260 / 200 + 330 / 300) / 2))


def test_the_best_load_of_each_arm_is_compared_with_the_best_of_the_base() -> None:
    best = {each.arm: each for each in summary().best}
    assert (best["full"].load, best["agentkv 4096"].load) == ("c8", "c16")
    assert best["full"].ratios == {}
    ratios = [200 / 100, 300 / 200, 600 / 300]
    assert best["agentkv 4096"].ratios["full"].point == pytest.approx(np.median(ratios))


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        ({"c8": 1.0}, "full (c8, the only one)"),
        ({"c8": 2.0, "c16": 1.0}, "full (c8, the lowest)"),
        ({"c1": 2.0, "c16": 1.0}, None),  # there is no lower one
        ({"c8": 1.0, "c16": 2.0, "c100": 3.0}, "full (c100, the highest)"),
        ({"c8": 1.0, "c16": 2.0, "c100": 1.5}, None),
        ({"c8": 1.0, "c16": 2.0, "c100": 0.0}, None),  # more was tried, and failed
        ({"c8": 1.0, "2/s": 2.0, "0.5/s": 1.0}, "full (2/s, the highest)"),
        ({"schedule": 1.0}, None),
    ],
)
def test_a_best_load_at_the_end_of_those_tried_is_named(
    speeds: dict[str, float], told: str | None
) -> None:
    """With the wrong loads alone, an arm looks worse than it is."""
    runs = [
        measurement("full", load, 0, speed, figures={"failed": int(not speed)})
        for load, speed in speeds.items()
    ]
    _, best = summary_tables(summary(runs, loads=list(speeds)))
    notes = [note for note in best.notes if "another may be better" in note]
    assert notes == (
        [f"best at the end of the loads tried, so another may be better: {told}"] if told else []
    )


@pytest.mark.parametrize(("speed", "told"), [(50.0, False), (500.0, True)])
def test_a_better_load_that_is_not_ranked_is_told_beside_the_best(speed: float, told: bool) -> None:
    """One failed request of `full` at its best load made every ratio to it larger, in silence."""
    broken = {"figures": {"failed": 1, "completed": 15}, "errors": {"no answer": 1}}
    runs = [run for run in measured() if (run.arm, run.load) != ("full", "c16")]
    runs += [measurement("full", "c16", n, speed, **broken) for n in range(3)]
    _, best = summary_tables(summary(runs))
    said = (
        "better than the load shown, and not ranked: full c16 (3 of 48 requests failed: no answer)"
    )
    assert (said in best.notes) is told
    alone = [run for run in runs if run.load == "c16"]
    _, best = summary_tables(summary(alone))
    assert said in best.notes  # without any that is ranked


def test_a_measurement_whose_warm_up_failed_is_not_ranked() -> None:
    (found,) = summary([measurement("full", "c8", 0, 1.0, warmup_errors=2)]).cells
    assert found.reasons == ["2 requests of the warm-up failed, so that it was measured cold"]


def test_requests_that_failed_after_different_times_are_told() -> None:
    runs = [measurement("full", "c8", 0, 1.0, timeout_s=60.0)]
    runs += [measurement("agentkv 4096", "c8", 0, 1.0, timeout_s=60.0)]
    assert not any("--timeout" in note for note in summary_tables(summary(runs))[0].notes)
    runs[1] = runs[1].model_copy(update={"timeout_s": 1800.0})
    said = "60 s (full c8); 1800 s (agentkv 4096 c8)"
    for table in summary_tables(summary(runs)):
        assert f"requests failed after different times (--timeout): {said}" in table.notes


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"method_code": "a"}, {"method_code": "b"}, "2 states of the method's code"),
        ({"method_code": "a"}, {"method_code": "a"}, ""),
        ({"method_code": "a"}, {}, ""),  # an older measurement
        (
            {"calibration": {"sha256": "a"}},
            {"calibration": {"sha256": "b"}},
            "2 states of the method's calibration",
        ),
    ],
)
def test_an_arm_of_two_states_of_its_method_is_not_ranked(
    first: dict[str, Any], second: dict[str, Any], said: str
) -> None:
    """Slow and careful, fast and careless: an author's two versions made one median."""
    runs = [
        measurement("agentkv 4096", "c8", n, 1.0, server=s) for n, s in ((0, first), (1, second))
    ]
    (found,) = summary(runs).cells
    assert found.reasons == ([f"measured with {said}"] if said else [])


def test_a_cell_with_failures_is_not_ranked_and_never_the_best() -> None:
    runs = measured()
    broken = measurement(
        *("agentkv 4096", "c16", 1, 9999.0), figures={"failed": 2}, errors={"HTTP 500: no": 2}
    )
    found = summary([broken if run.key == broken.key else run for run in runs])
    assert cell(found, "agentkv 4096", "c16").reasons == ["2 of 50 requests failed: HTTP 500: no"]
    assert {each.arm: each.load for each in found.best}["agentkv 4096"] == "c8"


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        (None, "no KV accounting"),
        ({**KV, "events": 0}, "never triggered at budget 4096"),
        ({**KV, "max_over_budget": 129}, "held 129 tokens above budget"),
        ({**KV, "session_resets": 3}, "3 session resets"),
        ({**KV, "refused": 2}, "2 events had no room: what is always kept leaves none"),
        ({**KV, "max_over_budget": 128}, None),
        ({**KV, "max_over_budget": None}, None),
    ],
)
def test_a_compressed_arm_must_show_its_budget(
    kv: dict[str, Any] | None, reason: str | None
) -> None:
    runs = [measurement("agentkv 4096", "c8", 0, 1.0, kv=kv)]
    (found,) = summary(runs).cells
    assert [reason in each for each in found.reasons] == [True] if reason else not found.reasons


@pytest.mark.parametrize(("trigger", "cured"), [("every", True), ("prefill+every", False)])
@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ({"events": 0}, "never triggered at budget 4096"),
        ({"max_over_budget": 129}, "budget not applied: a session held 129 tokens above"),
    ],
)
def test_an_arm_that_did_not_fire_in_time_says_what_would_make_it(
    trigger: str, cured: bool, kv: dict[str, int], said: str
) -> None:
    """Answers shorter than the interval: no event at all, or several prefills before the next."""
    settings = {"interval": 64, "trigger": trigger}
    arm = AGENTKV.model_copy(update={"settings": settings})
    runs = [measurement("agentkv 4096", "c8", 0, 1.0, kv=KV | kv)]
    (found,) = summarize_serving(plan(arms=[ARMS[0], arm]), runs).cells
    (reason,) = found.reasons
    assert reason.startswith(said)
    assert ("every 64th generated token" in reason) is cured
    assert ("--set trigger=prefill+every" in reason) is cured


def test_a_server_by_url_must_show_the_budget_it_says() -> None:
    server = ServingArm(name="server", method="server", url="http://a:1")
    for kv, held in (
        (None, []),
        ({**KV, "budget": None}, []),
        ({**KV, "budget": 512, "events": 0}, ["never triggered at budget 512"]),
    ):
        run = measurement("server", "c8", 0, 1.0, kv=kv)
        (found,) = summary([run], arms=[server], weights="unknown").cells
        assert found.reasons == held


def test_files_hold_the_figures_beside_the_other_keys(tmp_path: Path) -> None:
    folder = ServingFolder.create(tmp_path / "s", plan(), {"kvbench": "0"})
    path = folder.add(measured()[0])
    document = json.loads(path.read_text())
    assert path.name == "rep01-full-32k-1k-c8.json"
    assert document["output_throughput"] == 100.0
    assert document["completed"] == 16
    assert isinstance(document["completed"], int)
    assert document["request_rate"] == "inf"
    # A file from before measurements had a provenance has the folder's.
    expected = measured()[0].model_copy(update={"provenance": {"kvbench": "0"}})
    assert folder.measurements() == [expected]


def test_a_folder_goes_on_with_its_own_plan_only(tmp_path: Path) -> None:
    ServingFolder.create(tmp_path, plan(), {"kvbench": "0"})
    again = ServingFolder.create(tmp_path, plan(), {"kvbench": "1"})
    assert (again.plan, again.provenance) == (plan(), {"kvbench": "0"})
    with pytest.raises(UsageError, match="other settings"):
        ServingFolder.create(tmp_path, plan(turns=2), {})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"engine": 1}'])
def test_an_unreadable_folder_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "serving.json").write_text(text)
    with pytest.raises(UsageError, match=r"serving\.json"):
        ServingFolder.read(tmp_path)


def test_a_file_that_is_no_measurement_is_named(tmp_path: Path) -> None:
    folder = ServingFolder.create(tmp_path, plan(), {})
    (tmp_path / "rep01-x.json").write_text('{"arm": "full"}')
    with pytest.raises(UsageError, match=r"rep01-x\.json"):
        folder.measurements()


def changed_file(folder: ServingFolder, **changes: Any) -> Path:
    path = folder.add(measured()[0])
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed": None}, "has no failed"),
        ({"request_goodput": None}, "has no request_goodput"),
        ({"duration": None}, "has no duration"),
        (
            {"median_e2el_ms": 9e3, "std_e2el_ms": 4.9e3},
            "mean_e2el_ms, median_e2el_ms and std_e2el_ms do not go together",
        ),
        ({"mean_e2el_ms": None}, "has no mean_e2el_ms"),
        ({"total_output_tokens": None}, "has no total_output_tokens"),
        ({"duration": 7.0}, "no whole number"),
        ({"request_goodput": 3.0}, "make 24, and there were 12"),
        ({"session_goodput": 0.625}, "session_goodput and duration make 5, and there were 4"),
        ({"completed": 11}, r"do not go together with num_prompts \(12\)"),
        ({"failed": 1}, r"do not go together with num_prompts \(12\)"),
        ({"num_prompts": 13}, r"do not go together with num_prompts \(13\)"),
        ({"errors": {"HTTP 500": 1}}, "errors are of more requests than failed"),
        ({"begun": 2}, r"begun 2 times by this file and 1 times by attempts\.json"),
        ({"duration": 4.0}, "concurrency and duration do not go together"),
        ({"duration": 4.0, "concurrency": 12.0}, "duration is too short"),
        ({"duration": 4.0, "concurrency": None}, "duration is too short for 12 requests"),
        (
            {"total_output_tokens": 65, "kv": {"decode_tokens": 64}},
            "more than the 64 that the engine decoded",
        ),
        ({"repetition": 1}, r"is rep02-full-32k-1k-c8\.json by what it holds"),
        ({"arm": "agentkv 4096"}, "by what it holds"),
    ],
)
def test_a_file_that_was_changed_by_hand_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = ServingFolder.create(tmp_path, plan(goodput={"ttft": 100.0}), {})
    honest = {"duration": 8.0, "request_goodput": 1.5, "completed": 12, "num_prompts": 12}
    honest |= {"mean_e2el_ms": 4e3, "concurrency": 6.0, "session_goodput": 0.5, "sessions": 4}
    changed_file(folder, **honest)
    folder.measurements()
    (tmp_path / "attempts.json").write_text('{"rep01-full-32k-1k-c8.json": 1}')
    folder.measurements()
    path = changed_file(folder, **honest | changes)
    with pytest.raises(UsageError, match=said) as error:
        folder.measurements()
    assert str(path) in str(error.value)


def test_a_copied_file_is_no_other_repetition(tmp_path: Path) -> None:
    folder = ServingFolder.create(tmp_path, plan(), {})
    path = folder.add(measured()[0])
    path.with_name("rep02-full-32k-1k-c8.json").write_bytes(path.read_bytes())
    with pytest.raises(UsageError, match="a copied file is no other repetition"):
        folder.measurements()
    folder.add(measurement("full", "c8", 3, 1.0))
    path.with_name("rep02-full-32k-1k-c8.json").unlink()
    with pytest.raises(UsageError, match="repetition 4 of 3"):
        folder.measurements()


def test_rates_are_those_of_totals_and_duration(tmp_path: Path) -> None:
    folder = ServingFolder.create(tmp_path, plan(), {})
    changed_file(folder, duration=10.0, total_output_tokens=250, output_throughput=9999.0)
    (found,) = folder.measurements()
    assert found.figures["output_throughput"] == 25.0


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": [ServingArm(name="a b"), ServingArm(name="a-b")]},
        {"loads": ["0.1/s", "0.1/s"]},
    ],
)
def test_measurements_that_would_share_a_file_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="would share a file"):
        ServingFolder.create(tmp_path, plan(**changes), {})
    assert not list(tmp_path.iterdir())


HERE = {"kvbench": "1", "git_commit": "a" * 40, "hardware": {"cpu": "here"}}


def measured_at(here: dict[str, Any], there: dict[str, Any]) -> list[LoadMeasurement]:
    """Return measurements at one place, but for a repetition of one arm at another."""
    return [
        each.model_copy(
            update={"provenance": there if (each.repetition, each.arm) == (2, "full") else here}
        )
        for each in measured()
    ]


def test_servers_with_other_threads_are_not_paired() -> None:
    """`full` on one thread, and the method on two, were repetitions of one another."""
    bind = {"environment": "VLLM_CPU_OMP_THREADS_BIND=0"}
    runs = [
        each.model_copy(update={"server": bind if each.arm == "full" else {}})
        for each in measured()
    ]
    found = summary(runs)
    assert "full" not in cell(found, "agentkv 4096", "c8").ratios
    (note,) = (n for n in summary_tables(found)[0].notes if n.startswith("measured with 2"))
    assert "kvbench unknown, VLLM_CPU_OMP_THREADS_BIND=0 (" in note


@pytest.mark.parametrize(
    ("one", "other", "paired"),
    [
        ({"version": "0.32.0"}, {"version": "0.33.0"}, False),
        ({"model_sha": "a"}, {"model_sha": "b"}, False),
        ({"attention": "flash"}, {}, True),  # llama.cpp's quantised rows have it, others may not
        ({"setup": "as shipped"}, {"setup": "plug-in"}, True),  # by a version that said no more
        ({"setup": "llama-cpp-python 0.3.36"}, {"setup": "llama-cpp-python 0.3.37"}, False),
        ({"version": "0.32.0", "setup": "as shipped"}, {"version": "0.32.0", "setup": "x"}, True),
        ({"model_runner": "V2", "flags": "--a"}, {"model_runner": "V1"}, True),
    ],
)
def test_engines_of_two_versions_or_weights_are_not_paired(
    one: dict[str, str], other: dict[str, str], paired: bool
) -> None:
    """An engine was brought up to date between two arms; flags may differ by arm."""
    runs = [
        each.model_copy(update={"server": one if each.arm == "full" else other})
        for each in measured()
    ]
    assert ("full" in cell(summary(runs), "agentkv 4096", "c8").ratios) is paired


@pytest.mark.parametrize(("hour", "told"), [("00:50", ""), ("05:15", "up to 5.2 h apart")])
def test_pairs_that_lie_hours_apart_are_told_of(hour: str, told: str) -> None:
    """An arm may be measured in a quiet night, and its base beside other work."""
    late = f"2026-11-21T{hour}:00+00:00"
    runs = [
        each.model_copy(update={"date": late} if each.arm == "full" else {}) for each in measured()
    ]
    notes = [n for n in summary_tables(summary(runs))[0].notes if n.startswith("paired repet")]
    assert [told in note for note in notes] == [True] * bool(told)


def test_commits_of_the_same_code_are_paired() -> None:
    """A change of the docs made two places of one."""
    code = {"code_sha": "0123abcd" * 2}
    runs = measured_at(HERE | code, HERE | code | {"git_commit": "b" * 40})
    assert cell(summary(runs), "agentkv 4096", "c8").ratios["full"].n == 3
    assert {each.origin[: each.origin.index(" (")] for each in runs} == {
        "here, kvbench 1, code 0123abcd"
    }


@pytest.mark.parametrize(
    "other",
    [
        HERE | {"hardware": {"cpu": "there"}},
        HERE | {"git_commit": "b" * 40},
        HERE | {"kernels": 2},
        HERE | {"code_sha": "0123abcd" * 2},
    ],
)
def test_repetitions_of_two_machines_or_versions_are_not_paired(other: dict[str, Any]) -> None:
    found = summary(measured_at(HERE, other))
    assert cell(found, "agentkv 4096", "c8").ratios["full"].n == 2
    notes = summary_tables(found)[0].notes
    assert any(note.startswith("measured with 2 machines or versions") for note in notes)
    same = summary([each.model_copy(update={"provenance": HERE}) for each in measured()])
    assert cell(same, "agentkv 4096", "c8").ratios["full"].n == 3
    assert not any("machines or versions" in note for note in summary_tables(same)[0].notes)


@pytest.mark.parametrize(
    ("hits", "drawn", "held"),
    [(0.9, True, True), (0.9, None, True), (0.9, False, True), (0.51, True, False)],
)
def test_a_server_that_knew_its_prompts_is_not_ranked(
    hits: float, drawn: bool | None, held: bool
) -> None:
    figures = {"prefix_hit_rate": hits, "prefix_hit_bound": 0.5, "total_prompt_tokens": 16_000}
    run = measurement("server", "c8", 0, 1.0, figures=figures, random_prompts=drawn)
    server = ServingArm(name="server", method="server", url="http://a:1")
    (found,) = summary([run], arms=[server], weights="unknown").cells
    assert [each for each in found.reasons if "knew its prompts" in each] == found.reasons
    assert bool(found.reasons) is held


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefixes_kept": "200 no"}, "the prefix cache was not emptied before: 200 no"),
        ({"restarts": 2}, "the backend died and was started again, 2 times in all"),
    ],
)
def test_a_measurement_that_was_disturbed_is_not_ranked(change: dict[str, Any], said: str) -> None:
    runs = [measurement("full", "c8", 0, 9.0), measurement("full", "c8", 1, 9.0, **change)]
    found = summary(runs)
    assert cell(found, "full", "c8").reasons == [said]
    assert not found.best


def good(arm: str, load: str, speed: float, goodput: float) -> LoadMeasurement:
    return measurement(arm, load, 0, speed, figures={"request_goodput": goodput})


def test_loads_without_a_good_request_are_ordered_by_output_and_compared_with_nobody() -> None:
    """The first load was taken, so that a strict target made any method 3.3 times as fast."""
    speeds = {"full": {"c8": 100.0, "c16": 180.0}, "agentkv 4096": {"c8": 110.0, "c16": 200.0}}
    runs = [good(arm, c, speed, 0.0) for arm, of in speeds.items() for c, speed in of.items()]
    runs[-1] = good("agentkv 4096", "c16", 200.0, 0.1)
    found = {each.arm: each for each in summary(runs, goodput={"ttft": 100.0}).best}
    assert (found["full"].load, found["agentkv 4096"].load) == ("c16", "c16")
    assert found["agentkv 4096"].ratios == {}
    runs[1] = good("full", "c16", 180.0, 0.05)
    (best,) = [each for each in summary(runs, goodput={"ttft": 100.0}).best if each.arm != "full"]
    assert best.ratios["full"].point == pytest.approx(0.1 / 0.05)


def test_with_targets_the_best_loads_are_compared_by_good_requests() -> None:
    """Output counts requests that missed the target, at a load that the base was not given."""
    runs = [
        *(good("full", "c8", 100.0, 0.50), good("full", "c16", 300.0, 0.45)),
        *(good("agentkv 4096", "c8", 105.0, 0.50), good("agentkv 4096", "c16", 310.0, 0.52)),
    ]
    found = summary(runs, goodput={"ttft": 100.0})
    best = {each.arm: each for each in found.best}
    assert (best["full"].load, best["agentkv 4096"].load) == ("c8", "c16")
    assert best["agentkv 4096"].ratios["full"].point == pytest.approx(0.52 / 0.50)
    assert cell(found, "agentkv 4096", "c16").ratios["full"].point == pytest.approx(310 / 300)
    table = summary_tables(found)[1]
    assert "ratios, of good requests/s, pair repetitions" in table.notes[0]
    assert not [row for row in table.rows if row.published]  # those are of output


def test_no_ratio_is_taken_to_a_base_without_a_good_request_in_a_pair() -> None:
    runs = [
        measurement(arm, "c8", n, 100.0, figures={"request_goodput": value})
        for arm, values in (("full", [0.5, 0.0, 0.5]), ("agentkv 4096", [0.6, 0.6, 0.6]))
        for n, value in enumerate(values)
    ]
    best = {each.arm: each for each in summary(runs, goodput={"ttft": 100.0}).best}
    assert best["agentkv 4096"].ratios == {}


def test_the_table_that_ranks_says_how_few_repetitions_there_were() -> None:
    best = tables()[1]
    assert [column.title for column in best.columns][:3] == ["arm", "load", "repeats"]
    assert best.rows[0].cells[2].value == 3
    assert any(note.startswith("fewest repetitions: 3; fewer") for note in best.notes)


def test_slots_of_the_embedded_engine_may_take_more_than_the_pool() -> None:
    for engine, held in (("embedded", True), ("vllm", False)):
        notes = tables(engine=engine, pool_mb=10.0)[0].notes
        assert "equal memory: every arm has 10 MB for cached rows" in notes
        assert any("twice" in note for note in notes) is held


@pytest.mark.parametrize("number", [0, 1])
def test_what_changes_every_figure_and_stands_in_no_row_is_told(number: int) -> None:
    plain = tables()[number].notes
    moving = ServingArm(name="full@offload", method="full@offload", settings={"offload": 16})
    told = {
        "engine arguments of every arm: max-num-seqs=4 a=": {
            "engine_args": {"max-num-seqs": "4", "a": ""}
        },
        "all arms' servers were up at once, and one of them was measured at a time": {
            "together": True
        },
        "equal memory: every arm has 9 MB for cached rows; full@offload may move rows to the "
        "machine's own memory beside it": {"pool_mb": 9.0, "arms": [*ARMS, moving]},
        "c16: there are 9 sessions, so no more were open at once": {"sessions": 9},
        "settings other than the preset's: agentkv 4096 interval=8192 trigger=turn": {
            "arms": [ARMS[0], OTHER]
        },
        "settings other than the preset's: agentkv 4096 interval=8192": {
            "arms": [ARMS[0], GONE, AGENTKV.model_copy(update={"settings": {"interval": 8192}})]
        },
    }
    for note, change in told.items():
        assert note not in plain
        assert note in tables(**change)[number].notes


def test_a_load_of_more_sessions_than_there_are_is_no_larger_one() -> None:
    """Of four equal loads, one is the best by chance, and seemed to lie between the others."""
    runs = [measurement("full", load, 0, speed) for load, speed in (("c8", 90.0), ("c16", 99.0))]
    runs += [measurement("full", "c32", 0, 95.0)]
    loads = ["c8", "c16", "c32"]
    (best,) = summary(runs, loads=loads).best
    assert (best.load, best.end) == ("c16", "")
    (best,) = summary(runs, loads=loads, sessions=12).best
    assert (best.load, best.end) == ("c16", "highest")
    (best,) = summary(runs, loads=loads, sessions=8).best
    assert (best.load, best.end) == ("c16", "only one")


def test_disturbed_repetitions_are_in_no_ratio_and_the_pairs_that_are_left_are_counted() -> None:
    """The base was started anew twice, and the method was ten times as fast."""
    restarts = [0, 1, 1]
    runs = [
        measurement("full", "c8", n, speed, restarts=restarts[n])
        for n, speed in enumerate([100.0, 10.0, 10.0])
    ]
    runs += [measurement("agentkv 4096", "c8", n, 100.0) for n in range(3)]
    found = summary(runs)
    ratio = cell(found, "agentkv 4096", "c8").ratios["full"]
    assert (ratio.n, ratio.point) == (1, 1.0)
    said = "repetitions that could be paired, where not all could: agentkv 4096 c8 1 of 3"
    assert said in summary_tables(found)[0].notes
    assert not any("could be paired" in note for note in summary_tables(summary())[0].notes)


def test_the_table_that_ranks_tells_of_pairs_that_lie_hours_and_machines_apart() -> None:
    late = "2026-11-21T05:15:00+00:00"
    runs = [
        each.model_copy(update={"date": late} if each.arm == "full" else {}) for each in measured()
    ]
    assert any("5.2 h apart" in note for note in summary_tables(summary(runs))[1].notes)
    other = summary(measured_at(HERE, HERE | {"kernels": 2}))
    assert any(n.startswith("measured with 2 machines") for n in summary_tables(other)[1].notes)


@pytest.mark.parametrize(
    ("drawn", "hits", "loads", "held"),
    [
        (False, {}, ["c8", "c16"], True),
        (True, {}, ["c8", "c16"], False),
        (False, {"prefix_hit_rate": 0.4, "prefix_hit_bound": 0.5}, ["c8", "c16"], False),
    ],
)
def test_a_server_by_url_that_may_know_recorded_prompts_is_not_ranked(
    drawn: bool, hits: dict[str, float], loads: list[str], held: bool
) -> None:
    """Seventeen of eighteen measurements were warm where the server did not say what it had."""
    server = ServingArm(name="server", method="server", url="http://a:1")
    runs = [measurement("server", c, 0, 1.0, figures=hits, random_prompts=drawn) for c in loads]
    cells = summary(runs, arms=[server], weights="unknown").cells
    said = ["recorded prompts were sent 2 times" in "; ".join(each.reasons) for each in cells]
    assert said == [held] * len(loads)
    (once,) = summary(runs[:1], arms=[server], loads=["c8"], weights="unknown").cells
    assert once.reasons == []
    again = runs[0].model_copy(update={"begun": 2})
    (found,) = summary([again], arms=[server], loads=["c8"], weights="unknown").cells
    assert bool(found.reasons) is held
    other = server.model_copy(update={"name": "other"})
    twice = [runs[0], runs[0].model_copy(update={"arm": "other"})]
    cells = summary(twice, arms=[server, other], loads=["c8"], weights="unknown").cells
    assert [bool(each.reasons) for each in cells] == [held] * 2
    started = server.model_copy(update={"url": None})
    assert not any(each.reasons for each in summary(runs, arms=[started]).cells)


def test_sessions_without_an_event_are_counted_beside_those_with_one() -> None:
    some = KV | {"sessions": 20, "compressed_sessions": 1}
    (loads, *_) = summary_tables(summary([measurement("agentkv 4096", "c8", 0, 1.0, kv=some)]))
    said = "sessions with an event, where not all had one: agentkv 4096 c8 (1 of 20)"
    assert said in loads.notes
    every = KV | {"sessions": 20, "compressed_sessions": 20}
    (loads, *_) = summary_tables(summary([measurement("agentkv 4096", "c8", 0, 1.0, kv=every)]))
    assert not any("with an event" in note for note in loads.notes)


def test_by_url_tables_name_the_servers_own_model() -> None:
    found = summary(engine="url", model="micro")
    assert all("Qwen3-8B" in table.title for table in summary_tables(found))


def test_folders_are_found_at_a_path_and_below(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ServingFolder.create(tmp_path / name, plan(), {})
    (tmp_path / "c").mkdir()
    assert serving_folders([tmp_path, tmp_path / "b"]) == [tmp_path / "a", tmp_path / "b"]


def tables(**changes: Any) -> list[Table]:
    return summary_tables(summary(**changes))


def test_tables_of_a_folder(tmp_path: Path) -> None:
    folder = ServingFolder.create(tmp_path, plan(), {})
    for each in measured():
        folder.add(each)
    assert serving_tables([tmp_path]) == tables()
    loads, best = tables()
    assert loads.kind is best.kind is Kind.THROUGHPUT
    text = render_markdown([loads])
    assert "| c8 | agentkv 4096 | 3 | 260" in text
    assert "4,224" in text
    assert "fewest repetitions: 3" in text
    assert "Qwen3-8B, vllm" in loads.title


def test_the_papers_ratio_stands_beside_ours() -> None:
    published = [row for row in tables()[1].rows if row.published]
    assert [row.cells[4].value for row in published] == [1.76, 1.31]
    assert all("agentkv figure5" in str(row.cells[0].value) for row in published)
    other = tables(model="micro")[1]
    assert not [row for row in other.rows if row.published]


def test_dummy_weights_are_told_in_every_table() -> None:
    assert all(DUMMY in table.notes for table in tables(weights="dummy"))
    assert not any(DUMMY in table.notes for table in tables())


def test_vllms_model_runners_are_named_where_they_are_known() -> None:
    ran = {"full": "V2", "agentkv 4096": "V1"}
    changed = [
        each.model_copy(update={"server": {"model_runner": ran[each.arm]}}) for each in measured()
    ]
    under_load, _ = summary_tables(summary(changed))
    assert "vLLM's model runner, V2: full; V1: agentkv 4096" in under_load.notes
    assert not any("runner" in note for note in tables()[0].notes)


def test_an_arm_that_drops_messages_says_what_that_means() -> None:
    arm = ServingArm(name="clear-tools", settings={"exec": "text", "trigger": "900"})
    kv = {**KV, "recomputed": 300, "prefill_tokens": 1000}
    changed = [
        *[each for each in measured() if each.arm == "full"],
        *[measurement("clear-tools", load, 0, 90.0, kv=kv) for load in ("c8", "c16")],
    ]
    under_load, _ = summary_tables(summary(changed, arms=[ARMS[0], arm]))
    titles = [column.title for column in under_load.columns]
    assert titles[-2:] == ["prefilled", "computed again"]
    row = next(row for row in under_load.rows if row.cells[1].value == "clear-tools")
    assert [each.value for each in row.cells[-2:]] == [1000, 300]
    assert any(note.startswith("clear-tools: the recorded messages") for note in under_load.notes)


def test_memory_is_in_bytes_before_it_is_in_tokens() -> None:
    # 20 tokens of 16 answers, whose first ones came from prefills, which read nothing.
    account = KV | {"median_peak_bytes": 5e8, "bytes_read": 4e9, "decode_tokens": 20}
    runs = [
        measurement("agentkv 4096", "c8", n, 1.0, kv=account, pool_bytes=(n + 1) * 10**9)
        for n in range(3)
    ]
    (table, *_) = summary_tables(summary(runs))
    titles = [column.title for column in table.columns]
    row = dict(zip(titles, table.rows[0].cells, strict=True))
    assert [row[name].value for name in ("peak live MB", "pool MB", "read MB a token")] == [
        *(500.0, 2000.0, 1000.0),
    ]
    assert titles.index("read MB a token") < titles.index("peak live")
    assert any(note.startswith("pool MB: slots or blocks") for note in table.notes)
    # One repetition without it, and nothing is said.
    runs[1] = measurement("agentkv 4096", "c8", 1, 1.0, kv=account)
    (table, *_) = summary_tables(summary(runs))
    assert "pool MB" not in [column.title for column in table.columns]


def test_what_nobody_counted_has_no_column() -> None:
    titles = [column.title for column in tables()[0].columns]
    assert not {"peak live MB", "pool MB", "read MB a token"} & set(titles)
    assert "peak live" in titles


def test_a_full_cache_with_a_shared_prefix_is_a_base() -> None:
    runs = [
        measurement(arm, "c8", n, speed * (n + 1))
        for n in range(3)
        for arm, speed in (("full@prefix", 10.0), ("agentkv 4096", 25.0))
    ]
    arms = [ServingArm(name="full@prefix", method="full@prefix"), AGENTKV]
    found = summarize_serving(plan(arms=arms), runs)
    assert cell(found, "agentkv 4096", "c8").ratios["full@prefix"].point == 2.5
    assert "x full@prefix" in [column.title for column in summary_tables(found)[0].columns]
