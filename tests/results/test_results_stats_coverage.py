"""How often intervals and verdicts are wrong, simulated: `benchmarks/intervals.py`, in short form.

Seeds are fixed, so a figure changes only with the statistics. The long form's figures are in
docs/coverage.md.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from agentbench_kv.results.stats import change

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "intervals.py"


def _load() -> ModuleType:
    spec = spec_from_file_location("kvbench_intervals", SCRIPT)
    if spec is None or spec.loader is None:
        pytest.skip(f"{SCRIPT.name} is not here: not a checkout of the repository")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


intervals = _load()


@pytest.mark.parametrize("n", intervals.SIZES)
def test_binary_levels_cover_as_they_say(n: int) -> None:
    covered = intervals.binary_coverage(n)
    assert 0.94 <= np.mean(covered) <= 0.97
    assert min(covered) >= 0.90


@pytest.mark.parametrize("n", intervals.SIZES)
@pytest.mark.parametrize("kind", intervals.REPEATED)
def test_levels_of_three_trials_cover_as_they_say(kind: str, n: int) -> None:
    covered = intervals.repeated_coverage(kind, n, 100)
    assert 0.93 <= np.mean(covered) <= 0.975  # the mean of 1,900 draws strays by half a point
    assert min(covered) >= 0.84  # that of 100 by 3


@pytest.mark.parametrize("kind", intervals.UNLIKE)
@pytest.mark.parametrize(("samples", "questions"), intervals.FEW)
def test_many_questions_of_few_samples_are_no_many_samples(
    samples: int, questions: int, kind: str
) -> None:
    covered = intervals.counted_coverage(samples, questions, kind, 200)
    assert np.mean(covered) >= (0.86 if kind == "differ much" else 0.92)


@pytest.mark.parametrize("shape", list(intervals.shapes()), ids=lambda shape: shape.name)
def test_no_shape_of_data_makes_false_verdicts(shape: object) -> None:
    found = intervals.rates(shape, 250)
    assert found.level <= 0.10
    assert found.change <= 0.08
    assert found.ok <= 0.05
    assert found.regression <= 0.036  # of 250 draws; exactly at most 2 %, see the long form


@pytest.mark.parametrize("samples", [5, 10, 20])
def test_equal_arms_seldom_differ_however_few_the_samples(samples: int) -> None:
    """A plain bootstrap would leave 0 out in some 10 % of these."""
    rng = np.random.default_rng(3)
    sure = 0
    for _ in range(300):
        ease = rng.random(samples)
        one, other = ((ease + rng.normal(0, 0.25, samples) < 0.6) * 1.0 for _ in range(2))
        gap = change(intervals.scores(one), intervals.scores(other))
        sure += gap is not None and not gap.tied
    assert sure / 300 <= 0.05


def test_the_gate_catches_ten_points_of_200_samples() -> None:
    caught, slipped = intervals.gate_chances(200, 0.15, 0.10)
    assert caught >= 0.90
    assert slipped <= 0.05
    for loss in (0.0, 0.01):
        alarmed, passed = intervals.gate_chances(200, 0.15, loss)
        assert alarmed <= 0.02
        assert passed >= 0.85


@pytest.mark.parametrize("kind", intervals.KINDS)
def test_tables_of_equal_methods_seldom_tell_two_apart(kind: str) -> None:
    ranked, compared = intervals.table_differs(kind, 40)
    assert ranked <= 0.075
    assert compared <= 0.125  # of 40 tables; in the long form at most 5 %
