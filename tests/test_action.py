"""action.yml: its steps, run as a shell would run them."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunStore

ACTION = yaml.safe_load((Path(__file__).parents[1] / "action.yml").read_text())
HOSTILE = '$(touch pwned) `touch pwned` "; touch pwned #'


def write_run(root, name, scores):
    spec = {"task": "t/x", "method": "full", "budget": None, "engine": "e", "model": "m"}
    with RunStore(root).open(name, spec, expected_trials=len(scores)) as run:
        for i, score in enumerate(scores):
            run.append_trial(
                TrialRecord(sample_id=f"s{i}", trial=0, seed=1, status="scored", score=score)
            )


@pytest.fixture
def act(tmp_path):
    """Return a function that runs the action's steps; pip only notes what it was asked for."""
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {
        "python": f'[ "$2" = pip ] && echo "$@" >> "{tmp_path}/pip.txt"',
        "kvbench": f'exec {sys.executable} -c "from agentbench_kv.cli import main; main()" "$@"',
    }
    for name, body in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    write_run(tmp_path / "good", "r", [1] * 300)
    write_run(tmp_path / "bad", "r", [0] * 300)
    write_run(tmp_path / "few", "r", [1] * 9)
    write_run(tmp_path, "better", [1] * 300)

    def run_steps(**given):
        inputs = {name: spec.get("default", "") for name, spec in ACTION["inputs"].items()} | given
        outputs, summary = tmp_path / "output.txt", tmp_path / "summary.md"
        for file in (outputs, summary):
            file.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_STEP_SUMMARY": str(summary),
            "RUNNER_TEMP": str(tmp_path),
        }
        for step in ACTION["runs"]["steps"]:
            skipped = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) != '' \}\}", step.get("if", ""))
            if skipped and not inputs[skipped[1]]:
                continue
            own = {name: expand(text, inputs) for name, text in step["env"].items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=tmp_path, env=environment | own, capture_output=True, text=True, check=False,
                timeout=300,
            )  # fmt: skip
            if done.returncode:
                break
        lines = outputs.read_text().splitlines() if outputs.exists() else []
        said = dict(line.split("=", 1) for line in lines)
        return done, said, summary.read_text() if summary.exists() else ""

    return run_steps


def expand(text, inputs):
    return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], text)


def test_the_file_is_a_composite_action_whose_scripts_hold_no_expressions():
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]
        for name in re.findall(r"inputs\.([\w-]+)", str(step)):
            assert name in ACTION["inputs"]
    for output in ACTION["outputs"].values():
        name = re.fullmatch(r"\$\{\{ steps\.compare\.outputs\.(\w+) \}\}", output["value"])[1]
        assert f"{name}=" in ACTION["runs"]["steps"][-1]["run"]


def test_a_regression_fails_the_job_and_is_told_everywhere(act, tmp_path):
    done, said, summary = act(baseline="good", command="cp -r bad runs", install="wheel.whl")
    assert done.returncode == 3
    assert done.stdout.startswith("::error title=kvbench regression::score of full against full")
    assert "**kvbench compare: regression**" in summary
    assert said["verdict"] == "regression"
    assert Path(said["markdown"]).read_text() == summary
    assert ElementTree.parse(said["junit"]).getroot().get("failures") == "1"
    assert (tmp_path / "pip.txt").read_text() == "-m pip install wheel.whl\n"


def test_ok_passes_and_an_undecided_one_fails_unless_told_otherwise(act):
    done, said, _ = act(baseline="good", run="good", install="")
    assert (done.returncode, said["verdict"]) == (0, "ok")
    done, said, summary = act(baseline="few", run="few", install="")
    assert (done.returncode, said["verdict"]) == (4, "inconclusive")
    assert ElementTree.parse(said["junit"]).getroot().get("failures") == "1"
    assert "**kvbench compare: inconclusive**" in summary
    lenient = {"fail-on-inconclusive": "false", "by-task": "true", "allow-drift": "true"}
    done, said, _ = act(baseline="few", run="few", install="", **lenient)
    assert (done.returncode, said["verdict"]) == (0, "inconclusive")
    assert ElementTree.parse(said["junit"]).getroot().get("failures") == "0"
    wide = act(baseline="few", run="few", install="", catch="60", flips="5")
    assert (wide[0].returncode, wide[1]["verdict"]) == (0, "ok")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"baseline": HOSTILE}, "kvbench: no run"),
        ({"margin": "much"}, "'much' is not a valid float"),
        ({"metric": "nonsense"}, "no sub-score 'nonsense'"),
        ({"run": "gone"}, "no run 'gone'"),
        ({"baseline": ""}, "one of the runs has no name"),
        ({"run": " "}, "one of the runs has no name"),
        ({"by-task": "yes"}, "by-task: expected true or false, not 'yes'"),
        ({"fail-on-inconclusive": "True"}, "fail-on-inconclusive: expected true or false"),
        ({"bootstrap": "1"}, "bootstrap: expected true or false, not '1'"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason_in_every_file(act, given, why):
    done, said, summary = act(**({"baseline": "good", "run": "good", "install": ""} | given))
    assert (done.returncode, said["verdict"]) == (2, "refused")
    assert why in done.stderr
    assert "**kvbench compare" in summary
    assert Path(said["markdown"]).read_text() == summary
    assert ElementTree.parse(said["junit"]).getroot().get("errors") == "1"


def test_what_is_not_given_is_strict_and_no_variable_of_the_job_says_otherwise(act, monkeypatch):
    """An unset `vars.STRICT` was an empty input, which let every undecided comparison pass."""
    for name, value in (("INCONCLUSIVE", "ok"), ("CATCH", "60"), ("BOOTSTRAP", "1")):
        monkeypatch.setenv(f"KVBENCH_{name}", value)
    given = {"fail-on-inconclusive": "", "by-task": "", "allow-drift": "", "bootstrap": ""}
    done, said, _ = act(baseline="few", run="few", install="", **given)
    assert (done.returncode, said["verdict"]) == (4, "inconclusive")


def test_from_an_empty_repository_to_a_caught_regression(act, tmp_path):
    """No baseline: the job says how to make one; bootstrap makes it; then it guards."""
    same = {"baseline": "ci/agentkv.json", "command": "rm -rf runs; cp -r good runs", "install": ""}
    done, said, _ = act(**same)
    assert (done.returncode, said["verdict"]) == (2, "refused")
    assert "kvbench run --task t/x --method full" in done.stderr
    assert "kvbench baseline save agentkv runs/r --to ci" in done.stderr
    assert not (tmp_path / "ci").exists()

    done, said, summary = act(**same, bootstrap="true")
    assert (done.returncode, said["verdict"]) == (0, "bootstrapped")
    assert "commit that file" in summary
    assert ElementTree.parse(said["junit"]).getroot().get("errors") == "0"
    assert Path(said["markdown"]).read_text() == summary
    saved = (tmp_path / "ci" / "agentkv.json").read_bytes()

    again = same | {"command": "rm -rf runs; mkdir runs; cp -r better runs/r"}
    done, said, _ = act(**again, bootstrap="true")
    assert (done.returncode, said["verdict"]) == (0, "ok")
    worse = same | {"command": "rm -rf runs; cp -r bad runs"}
    done, said, summary = act(**worse, bootstrap="true", flips="3")
    assert (done.returncode, said["verdict"]) == (3, "regression")
    assert "300 of 300 samples changed" in html.unescape(summary)
    assert ElementTree.parse(said["junit"]).getroot().get("failures") == "1"
    assert (tmp_path / "ci" / "agentkv.json").read_bytes() == saved


def test_inputs_are_never_code(act, tmp_path):
    given = {"baseline": "good", "run": "good", "install": ""}
    every = dict.fromkeys(ACTION["inputs"].keys() - {"command"}, HOSTILE)
    for hostile in (every, {"baseline": HOSTILE, "bootstrap": "true"}, {"run": HOSTILE}):
        act(**(given | hostile))
    assert not (tmp_path / "pwned").exists()


def test_a_command_that_fails_stops_the_job(act):
    done, said, _ = act(baseline="good", command="false; cp -r good runs", install="")
    assert (done.returncode, said) == (1, {})
