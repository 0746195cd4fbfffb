"""Random faults over real runs, `benchmarks/faults.py` in short form.

The long form's figures are in docs/records.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentbench_kv.adapters.data import data_folder
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError

if not sys.platform.startswith("linux"):
    pytest.skip("processes are found by /proc, which only Linux has", allow_module_level=True)

import faults
from faults_plan import KINDS, SETUPS, draw_case

Play = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Play cases of a setup and return what they came to; undisturbed runs are played once."""
    with faults.Campaign(tmp_path_factory.mktemp("faults"), seed=0) as campaign:

        def run(setup: str, *cases: tuple[str, ...], first: int = 0) -> list[dict[str, Any]]:
            if (environment := SETUPS[setup].environment) is not None:
                try:
                    python_of(environment)
                except PrerequisiteError as error:
                    pytest.skip(str(error))
            if setup == "tau2" and not (data_folder() / "tau2_v0.2.0").is_dir():
                pytest.skip(f"no tau2_v0.2.0 in {data_folder()}; see docs/tau2.md")
            drawn = [draw_case(setup, 0, first + at, kinds) for at, kinds in enumerate(cases)]
            return campaign.play(drawn, jobs=1)

        yield run


def problems(results: list[dict[str, Any]]) -> list[str]:
    return [f"{one['case']} {one['ended']}: {bad}" for one in results for bad in one["problems"]]


@pytest.mark.slow
def test_kills_and_crashes_cost_nothing(play: Play) -> None:
    kinds = ("kill", "torn files", "kill group", "torn files", "stop")
    (result,) = play("scripted", kinds)
    assert problems([result]) == []
    assert len(result["struck"]) >= 3


@pytest.mark.slow
def test_interrupts_and_a_full_disk_cost_nothing(play: Play) -> None:
    (result,) = play("scripted", ("int", "full disk", "term", "int twice"), first=10)
    assert problems([result]) == []
    assert len(result["struck"]) >= 2


@pytest.mark.slow
def test_of_two_writers_one_gives_way(play: Play) -> None:
    (result,) = play("scripted", ("takeover",), first=20)
    assert problems([result]) == []
    assert result["taken_over"] == 1
    assert any(line.startswith("takeover") for line in result["ended"])  # the first gave way


@pytest.mark.slow
def test_a_model_that_is_interrupted_says_the_same(play: Play) -> None:
    (result,) = play("embedded", ("int twice", "kill"), first=30)
    assert problems([result]) == []
    assert "int twice" in result["struck"]


@pytest.mark.slow
@pytest.mark.engine
def test_a_benchmark_whose_worker_dies_goes_on(play: Play) -> None:
    (result,) = play("bfcl", ("kill worker", "kill"), first=30)
    assert problems([result]) == []
    assert "kill worker" in result["struck"]


@pytest.mark.nightly
@pytest.mark.parametrize("setup", [name for name in SETUPS if name != "scripted"])
def test_many_faults(play: Play, setup: str) -> None:
    # Without kinds each case draws its own.
    results = play(setup, *[()] * 8, first=100)
    assert problems(results) == []
    assert sum(len(each["struck"]) for each in results) >= 20


def test_a_case_is_the_same_every_time() -> None:
    assert draw_case("bfcl", 3, 7) == draw_case("bfcl", 3, 7)
    assert draw_case("bfcl", 3, 7) != draw_case("bfcl", 4, 7)


@pytest.mark.parametrize("setup", SETUPS)
def test_every_kind_is_drawn(setup: str) -> None:
    drawn = {fault.kind for number in range(300) for fault in draw_case(setup, 0, number).faults}
    assert drawn == set(SETUPS[setup].weights)
    assert drawn <= set(KINDS)
