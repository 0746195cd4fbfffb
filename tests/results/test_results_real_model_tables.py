"""Tables from kept records, against the runs they were taken from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.results.fidelity import divergence
from agentbench_kv.results.runs import RunGroup, load_runs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import real_model_tables as tables

RECORDS = Path(__file__).parents[2] / "benchmarks" / "real_model_records"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    command = ["fidelity", "--task", "micro/recall-1k", "--limit", "3", "--budget", "256"]
    command += ["--method", "full", "--method", "agentkv", "--method", "agentkv,pool=max"]
    told = CliRunner().invoke(kvbench, [*command, "--out", str(out), "--quiet"])
    assert told.exit_code == 0, told.output
    return out


def test_records_say_what_the_runs_say(runs: Path, tmp_path: Path) -> None:
    tables.write(tmp_path / "r.xz", list(tables.packed([runs])))
    arms = {arm.method: arm for arm in tables.arms(tmp_path / "r.xz")}
    assert set(arms) == {"full", "agentkv", "agentkv pool=max"}
    for run in load_runs([runs])[0]:
        found = divergence(RunGroup(run.label, (run,)))
        assert found is not None
        own = arms["full" if run.budget is None else run.label.replace(" (", " ").strip(")")]
        assert tables.mean(own.figures["kl"]) == pytest.approx(found.means["kl"].point, rel=1e-4)
        assert np.mean(list(own.events.values())) == found.events


def test_a_session_that_an_arm_lacks_counts_for_none(runs: Path, tmp_path: Path) -> None:
    rows = list(tables.packed([runs]))
    missing = next(row for row in rows if row["method"] == "agentkv")
    tables.write(tmp_path / "r.xz", [row for row in rows if row is not missing])
    for arm in tables.arms(tmp_path / "r.xz"):
        assert missing["session"] not in arm.figures["kl"]
        assert len(arm.figures["kl"]) == 2


def test_records_are_added_to_and_are_of_one_model_and_text(runs: Path, tmp_path: Path) -> None:
    rows = tables.packed([runs])
    tables.write(tmp_path / "some.xz", [row for row in rows if row["method"] != "agentkv"])
    assert len(tables.packed([tmp_path / "some.xz", runs])) == len(rows)
    for key, said in (("model", "more than one model: "), ("sha", "tokens differ from arm to arm")):
        other = [{**row, key: "another"} if row is rows[0] else row for row in rows]
        tables.write(tmp_path / "other.xz", other)
        with pytest.raises(SystemExit, match=said):
            tables.packed([tmp_path / "other.xz"])
    tables.write(tmp_path / "older.xz", [{**rows[0], "model": "older"}])
    same = tables.packed([tmp_path / "older.xz", runs], {"older": rows[0]["model"]})
    assert len(same) == len(rows)


def test_arms_whose_budget_was_not_applied_are_left_out(tmp_path: Path) -> None:
    command = ["fidelity", "--task", "micro/recall-1k", "--limit", "1", "--budget", "100000"]
    command += ["--method", "agentkv", "--out", str(tmp_path), "--quiet"]
    assert CliRunner().invoke(kvbench, command).exit_code == 0
    with pytest.raises(SystemExit, match="is budget_not_applied: leave it out"):
        tables.packed([tmp_path])


def test_a_cell_is_the_mean_of_its_own_budget() -> None:
    def arm(method: str, budget: int, nats: float) -> tables.Played:
        figures = {
            "kl": {"a": (nats, 1.0), "b": (3 * nats, 3.0)},
            "kl_value": {"a": (2 * nats, 1.0)},
        }
        return tables.Played(method, budget, figures, {"a": 1, "b": 1})

    arms = [arm("m", 10, 0.5), arm("m", 20, 0.25), arm("n", 10, 0.4), arm("n", 20, 0.1)]
    *_, first, last = tables.matrix(arms)
    assert first == "| n | 0.400 / 0.800 | 0.100 / 0.200 |"
    assert last == "| m | 0.500 / 1.000 | 0.250 / 0.500 |"


def test_probes_are_counted_by_session(tmp_path: Path) -> None:
    def row(session: str, method: str, right: list[int], budget: str | None) -> dict[str, object]:
        asked = [[at, "tool", each, 0, "?"] for at, each in enumerate(right)]
        return {"session": session, "method": method, "settings": {"trigger": "every"},
                "budget": budget, "asked": asked}  # fmt: skip

    rows = [
        row("a", "full", [1, 1, 0], None),
        row("b", "full", [1, 1], None),
        row("c", "full", [1], None),
        row("a", "agentkv", [1, 0, 0], "512"),
        row("b", "agentkv", [0, 1], "512"),
        row("c", "agentkv", [0], "512"),
        row("a", "full:removed", [0], None),
    ]
    tables.write(tmp_path / "p.xz", rows)
    told = "\n".join(tables.probes(tmp_path / "p.xz"))
    assert "| 512 | agentkv | 3 | 6 | 33 [" in told
    assert "|  | full | 3 | 6 | 83 [" in told
    assert "|  | full:removed | 1 | 1 | 0 [" in told
    assert "-50 [" in told


def test_locomo_is_paired_by_question(tmp_path: Path) -> None:
    def row(session: str, method: str, budget: str | None, f1: list[float]) -> str:
        asked = [[7 * at, 1, each, int(each >= 0.5), "said"] for at, each in enumerate(f1)]
        return json.dumps({"session": session, "method": method, "settings": {}, "budget": budget,
                           "asked": asked})  # fmt: skip

    lines = [
        row("a", "full", None, [0.5, 0.25, 1.0]),
        row("b", "full", None, [0.0, 0.75]),
        row("a", "agentkv", "512", [0.25, 0.25, 0.5]),
        row("b", "agentkv", "512", [0.0, 0.25]),
        row("a", "full:none", None, [0.0, 0.0, 0.0]),
        row("b", "full:none", None, [0.0, 0.0]),
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    kept = list(tables.kept_locomo(tmp_path / "lines.jsonl"))
    assert "said" not in json.dumps(kept)
    tables.write(tmp_path / "l.xz", kept)
    told = "\n".join(tables.locomo(tmp_path / "l.xz"))
    assert "|  | full | 5 | 50.0 [" in told
    assert "|  | full:none | 5 | 0.0 [" in told
    assert "| 512 | agentkv | 5 | 25.0 [" in told
    differences = [-0.25, 0.0, -0.5, 0.0, -0.5]
    half = 2.776 * np.std(differences, ddof=1) / np.sqrt(5)
    low, high = (f"{100 * (np.mean(differences) + each):+.1f}" for each in (-half, half))
    assert f"-25.0 [{low}, {high}]" in told


@pytest.mark.skipif(not list(RECORDS.glob("fidelity*.xz")), reason="no records are kept")
def test_kept_records_make_all_tables(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    for path in sorted(RECORDS.glob("fidelity*.xz")):
        assert path.stat().st_size < 150_000
        for verb in ("fidelity", "steady"):
            command = [verb, str(path), "--without", "representatives"]
            monkeypatch.setattr(sys, "argv", ["real_model_tables.py", *command])
            tables.main()
        assert "random" in capsys.readouterr().out
        rows = tables.lines(path)
        assert "/" not in json.dumps([row["method"] for row in rows])
        full = [row["sums"]["kl"][0] for row in rows if row["method"] == "full"]
        assert not any(full)
