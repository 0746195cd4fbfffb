"""`kvbench demo evoke`, and EVOKE from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.evoke.method import Evoke
from agentbench_kv.run.evoke_demo import Demo, episode_for


def test_the_demo_shows_what_left_came_back_and_was_recalled() -> None:
    result = CliRunner().invoke(kvbench, ["demo", "evoke"], catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line for line in lines if line.startswith("turn ")] == [
        f"turn {number}" for number in range(1, 15)
    ]
    assert any(line.startswith("  - ") for line in lines)
    assert any(line.startswith("  + ") for line in lines)
    assert "0 of them with other rows than had left" in result.output


def test_the_demos_account_is_the_engines() -> None:
    method = Evoke.create("", 1024, {"block": 64, "encoder": "hash"})
    demo = Demo(method, episode_for(85))
    turns = list(demo.play())
    assert len(turns) == 14
    assert all(turn.live <= 1024 for turn in turns)
    assert turns[-1].logical > 3000
    gone = sum(end - start for turn in turns for start, end in turn.evicted)
    back = sum(end - start for turn in turns for start, end in turn.restored)
    assert turns[-1].live == turns[-1].logical - 1 - gone + back
    assert demo.unlike == 0
    facts = demo.facts()
    assert {fact.stated for fact in facts} == {1, 2}
    assert all(fact.recalled for fact in facts if not fact.away)


def test_episodes_ask_in_the_end_for_what_the_second_turn_stored() -> None:
    for seed in (0, 86):
        turns = episode_for(seed).turns
        assert len(turns) == 14
        assert turns[1].subject == turns[-1].subject != ""


def run(out: Path, *options: str) -> list[dict]:
    command = ["run", "--method", "evoke", "--task", "micro/recall-1k", "--limit", "2", "--json"]
    result = CliRunner().invoke(
        kvbench, [*command, "--out", str(out), *options], catch_exceptions=False
    )
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_a_run_has_its_budget_evidence(tmp_path: Path) -> None:
    (summary,) = run(tmp_path, "--budget", "512", "--set", "block=32")
    assert summary["validity"]["state"] == "valid"
    assert summary["validity"]["triggered_samples"] == 2
    records = [
        json.loads(line)
        for line in (tmp_path / summary["run_id"] / "samples.jsonl").read_text().splitlines()
    ]
    assert all(record["kv"]["peak_live"] <= 512 for record in records)
    assert all(record["kv"]["evicted"] > 0 for record in records)


def test_an_engine_that_cannot_evict_is_refused(tmp_path: Path) -> None:
    command = ["run", "--engine", "scripted", "--model", "gold", "--method", "evoke"]
    with pytest.raises(UsageError, match="has no embed_tokens"):
        CliRunner().invoke(
            kvbench,
            [*command, "--budget", "512", "--task", "micro/recall-1k", "--out", str(tmp_path)],
            catch_exceptions=False,
            standalone_mode=False,
        )


@pytest.mark.parametrize(("engine", "able"), [("embedded", True), ("scripted", False)])
def test_the_matrix_says_who_can_run_it(engine: str, able: bool) -> None:
    result = CliRunner().invoke(
        kvbench, ["ls", "methods", "--engine", engine, "--json"], catch_exceptions=False
    )
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert rows["evoke"][f"on_{engine}"] is able
    assert rows["full"][f"on_{engine}"] is True
    assert set(rows["evoke"]["presets"]) == {"code", "readme"}
