"""One parameter at a time, against the method as it is."""

from __future__ import annotations

import json

import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.run.ablation import AXES, ablate, variants
from agentbench_kv.run.spec import RunSpec

BASE = RunSpec(
    engine="embedded",
    model="micro",
    method="agentkv",
    budget=256,
    task="micro/recall-1k",
    limit=2,
    concurrency=2,
)


def test_every_axis_is_varied_once_and_the_baseline_comes_first():
    arms = variants(BASE, {})
    assert (arms[0].axis, arms[0].value) == ("", "")
    assert {arm.axis for arm in arms[1:]} == set(AXES)
    assert len({arm.spec.id for arm in arms}) == len(arms)
    # 32 representatives, no phase dropped, ...: what the baseline is already is no variant.
    assert len(arms) == 1 + sum(len(values) - 1 for values in AXES.values())
    for arm in arms[1:]:
        changed = {k: v for k, v in arm.spec.params.items() if arms[0].spec.params[k] != v}
        assert {key: str(value) for key, value in changed.items()} == {arm.axis: arm.value}


def test_axes_the_method_lacks_are_left_out():
    arms = variants(RunSpec(**{**vars(BASE), "method": "streamingllm"}), {}, None)
    # Neither who shares a kept set nor a recency window changes what the newest tokens are.
    assert {arm.axis for arm in arms[1:]} == {"trigger"}


def test_default_values_that_do_not_fit_are_left_out_and_named(caplog):
    small = RunSpec(**{**vars(BASE), "budget": 100})
    with caplog.at_level("INFO", "agentbench_kv"):
        arms = variants(small, {})
    assert "128" not in {arm.value for arm in arms if arm.axis == "keep_recent"}
    assert "left out keep_recent=128: budget 100 is not above" in caplog.text
    with pytest.raises(UsageError, match="budget 100 is not above"):
        variants(small, {}, {"keep_recent": [128]})


def test_settings_behind_a_name_are_the_baseline_s():
    named = RunSpec(**{**vars(BASE), "method": "agentkv,pool=max"})
    arms = variants(named, {}, {"pool": ["avg"]})
    assert [arm.spec.params["pool"] for arm in arms] == ["max", "avg"]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"representative": [8]}, "did you mean 'representatives'"),
        ({"representatives": [7]}, "multiple of 4"),
        ({"representatives": [32]}, "nothing to ablate"),
    ],
)
def test_wrong_axes_are_refused(axes, message):
    with pytest.raises(UsageError, match=message):
        variants(BASE, {}, axes)


def test_arms_are_compared_with_the_baseline(tmp_path):
    arms = variants(BASE, {}, {"representatives": [8]})
    seen = []
    compared = ablate(arms, tmp_path, lambda *told: seen.append(told), "recurring")
    assert [arm.difference is None for arm in compared] == [True, False]
    gap = compared[1].difference
    levels = [arm.level.point for arm in compared]
    assert gap.point == pytest.approx(levels[1] - levels[0])
    assert gap.n == 2
    assert compared[1].adjusted_p == pytest.approx(gap.p_value)
    with pytest.raises(UsageError, match="no sub-score 'memory'"):
        ablate(arms, tmp_path, lambda *told: seen.append(told), "memory")


def test_runs_that_never_evicted_are_compared_with_nothing(tmp_path):
    ample = RunSpec(**{**vars(BASE), "budget": 100_000})
    compared = ablate(variants(ample, {}, {"pool": ["max"]}), tmp_path, lambda *_: None)
    assert [arm.level is None for arm in compared] == [False, False]
    assert all(arm.doubt.startswith("budget_not_applied") for arm in compared)
    assert [arm.difference for arm in compared] == [None, None]


def test_an_arm_of_another_release_is_refused(tmp_path):
    arms = variants(BASE, {}, {"pool": ["max"]})
    ablate(arms, tmp_path, lambda *_: None)
    path = tmp_path / arms[1].spec.id / "run.json"
    document = json.loads(path.read_text())
    document["provenance"] |= {"kvbench": "0.0.9"}
    path.write_text(json.dumps(document))
    with pytest.raises(
        UsageError, match=r"differ in more than the parameter: kvbench .*-> 0\.0\.9"
    ):
        ablate(arms, tmp_path, lambda *_: None)
