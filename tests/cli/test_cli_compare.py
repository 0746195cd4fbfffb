"""`kvbench compare` and `kvbench baseline` on real runs of the micro task."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with the real runs: full, full again, and agentkv at a harsh budget."""
    from agentbench_kv.run.runner import run_all
    from agentbench_kv.run.spec import RunSpec, resolve

    out = tmp_path_factory.mktemp("real")
    base = RunSpec("embedded", "micro", "full", None, "micro/recall-1k", limit=6)
    harsh = RunSpec(**{**vars(base), "method": "agentkv", "budget": 256})
    for folder, spec in (("full", base), ("again", base), ("harsh", harsh)):
        run_all([resolve(spec, {})], out / folder, lambda *_: None)
    return out


def test_a_harsh_budget_is_a_regression(kvbench, runs):
    result = kvbench("compare", str(runs / "full"), str(runs / "harsh"), "--flips")
    assert result.returncode == 3
    assert "verdict: regression (margin 1 point, catch 10 points, exit code 3)" in result.stdout
    assert "regression: the 97% interval of the change" in result.stdout
    assert "no A/A arm" in result.stdout
    flips = re.findall(r"\(scored\): (\S+) \| (\S+)", result.stdout)
    assert len(flips) == int(re.search(r"(\d) of 6 samples changed", result.stdout)[1]) > 0
    assert all(Path(path).is_file() for pair in flips for path in pair)
    assert result.stderr == ""


def test_full_again_is_inconclusive_and_ok_within_a_wide_limit(kvbench, runs):
    sides = (str(runs / "full"), str(runs / "again"))
    result = kvbench("compare", *sides)
    assert result.returncode == 4
    assert "samples would decide; there are 6" in result.stdout
    assert "A/A noise floor on micro/recall-1k" in result.stdout
    assert kvbench("compare", *sides, KVBENCH_CATCH="60").returncode == 0
    lenient = kvbench("compare", *sides, "--inconclusive", "ok")
    assert lenient.returncode == 0
    assert "verdict: inconclusive" in lenient.stdout


def test_drifted_provenance_is_refused(kvbench, runs, tmp_path):
    shutil.copytree(runs / "full", tmp_path / "drifted")
    (path,) = (tmp_path / "drifted").glob("*/run.json")
    document = json.loads(path.read_text())
    document["provenance"]["packages"]["transformers"] = "4.0"
    document["created"] += 1
    path.write_text(json.dumps(document))
    result = kvbench("compare", str(runs / "full"), "drifted")
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "packages.transformers" in result.stderr
    assert kvbench("compare", str(runs / "full"), "drifted", "--allow-drift").returncode == 4


def test_a_broken_run_of_the_candidate_fails_the_job(kvbench, runs, tmp_path):
    base, cand = tmp_path / "base", tmp_path / "cand"
    for folder in (base, cand):
        for name in ("full", "harsh"):
            shutil.copytree(runs / name, folder, dirs_exist_ok=True)
    sides = (str(base), str(cand), "--catch", "60", "--format", "json")
    assert kvbench("compare", *sides).returncode == 0
    (broken,) = cand.glob("*agentkv*")
    (broken / "run.json").write_text("{")
    result = kvbench("compare", *sides)
    assert result.returncode == 4
    missing = json.loads(result.stdout)["missing"]
    assert missing[0].startswith("CAND has no agentkv at 256 on micro/recall-1k")
    assert missing[1].startswith(f"{broken} cannot be read (")
    assert str(broken) in result.stderr
    (full,) = base.glob("*full*")
    sides = (str(full), str(cand / full.name), "--catch", "60")
    assert kvbench("compare", *sides).returncode == 0


def test_a_committed_baseline_stands_for_its_run(kvbench, runs, tmp_path):
    saved = kvbench("baseline", "save", "main", str(runs / "full"))
    assert saved.returncode == 0
    assert saved.stdout.splitlines()[-1].strip() == "baselines/main.json"
    shown = json.loads(kvbench("baseline", "show", "main", "--json").stdout)
    assert [run["spec"]["method"] for run in shown] == ["full"]
    assert "full" in kvbench("baseline", "show", "main").stdout
    files = ("--write", "junit=r.xml", "--write", "markdown=c.md")
    result = kvbench("compare", "main", str(runs / "harsh"), "--format", "json", *files)
    assert result.returncode == 3
    assert json.loads(result.stdout)["verdict"] == "regression"
    before = (tmp_path / "baselines" / "main.json").read_bytes()
    again = kvbench("baseline", "save", "main", str(runs / "harsh"))
    assert (again.returncode, again.stdout) == (2, "")
    assert "baselines/main.json exists; --force replaces it" in again.stderr
    assert (tmp_path / "baselines" / "main.json").read_bytes() == before
    assert kvbench("baseline", "save", "main", str(runs / "harsh"), "--force").returncode == 0
    assert (tmp_path / "baselines" / "main.json").read_bytes() != before


def test_an_edited_summary_changes_nothing(kvbench, runs, tmp_path):
    shutil.copytree(runs / "harsh", tmp_path / "edited")
    (path,) = (tmp_path / "edited").glob("*/summary.json")
    document = json.loads(path.read_text())
    document["score"] |= {"point": 1.0, "low": 0.99, "high": 1.0}
    path.write_text(json.dumps(document))
    for name, folder in (("one", str(runs / "harsh")), ("two", "edited")):
        assert kvbench("baseline", "save", name, folder).returncode == 0
    for command in (("baseline", "show", "--json"), ("compare", str(runs / "full"))):
        said = [kvbench(*command, name) for name in ("one", "two")]
        assert said[0].stdout == said[1].stdout != ""


def test_a_missing_baseline_is_named_with_the_command_that_makes_it(kvbench, runs, tmp_path):
    result = kvbench("compare", "main", str(runs / "harsh"), "--write", "junit=r.xml")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert ElementTree.parse(tmp_path / "r.xml").getroot().get("errors") == "1"
    command = re.search(r"(kvbench run .*) \(kvbench compare", result.stderr)[1]
    assert "--task micro/recall-1k --method agentkv --budget 256 --limit 6" in command
    for part in command.split(" && "):
        done = kvbench(*shlex.split(part)[1:])
        assert done.returncode == 0, done.stderr
    assert kvbench("compare", "main", str(runs / "harsh"), "--catch", "60").returncode == 0


def test_bootstrap_saves_the_candidate_once(kvbench, runs, tmp_path):
    full, harsh = (str(runs / name) for name in ("full", "harsh"))
    made = kvbench("compare", "b/main.json", full, "--bootstrap", "--write", "junit=r.xml")
    assert made.returncode == 0, made.stderr
    assert "commit that file" in made.stdout
    assert ElementTree.parse(tmp_path / "r.xml").getroot().get("errors") == "0"
    assert kvbench("compare", "b/main.json", harsh, "--bootstrap").returncode == 3


def test_the_command_for_a_baseline_makes_the_candidates_run(kvbench):
    """It left the precision of cached rows out, and so named a method of another memory."""
    chosen = (
        "--task micro/recall-1k --limit 1 --method agentkv --budget 512 --set sinks=2 --seed 3 "
        "--kv-dtype int8 --context-limit 4096 --max-live-tokens 9000 --tool-syntax json "
        "--concurrency 2 --temperature 0.5 --max-tokens 40 --timeout 900 --allow-untested-engine"
    )
    (made,) = json.loads(kvbench("run", *chosen.split(), "--json", "--quiet").stdout)
    said = kvbench("compare", "main", made["run_id"]).stderr
    command = shlex.split(said[said.index("kvbench run") : said.index(" && ")])
    (planned,) = json.loads(kvbench(*command[1:], "--dry-run", "--json").stdout)
    assert planned["run_id"] == made["run_id"]


def test_what_a_plan_says_of_a_baseline(kvbench, runs):
    plain = kvbench("compare", "--plan")
    assert plain.returncode == 0
    assert "200 samples, of which 15% differ between the sides (assumed); exact" in plain.stdout
    assert "10 points 91%" in plain.stdout
    assert "no difference is called ok: 94%" in plain.stdout
    assert "about 200 to catch 10 points, about 170 to say ok" in plain.stdout
    both = json.loads(kvbench("compare", "--plan", str(runs), "--json").stdout)
    rows = {row["name"]: row for row in both["rows"]}
    assert rows.keys() == {"full", "agentkv at 256"}
    assert (rows["full"]["samples"], rows["full"]["discordance"]) == (6, 0.05)
    assert rows["full"]["source"] == "assumed; repeats of BASE differ in 0.0%"
    assert rows["agentkv at 256"]["source"] == "assumed"
    assert both["alarm"] == 0.015
    given = kvbench("compare", "--plan", "--samples", "5000", "--discordance", "30").stdout
    assert "30% differ between the sides (as given); normal approximation" in given


def test_a_plan_names_what_it_could_not_read(kvbench, runs, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(runs, copied)
    first, *others = sorted(path.parent for path in copied.rglob("run.json"))
    (first / "run.json").write_text("{")
    some = kvbench("compare", "--plan", str(copied), "--json")
    assert some.returncode == 0
    assert json.loads(some.stdout)["rows"]
    assert str(first) in some.stderr
    for other in others:
        (other / "run.json").write_text("{")
    none = kvbench("compare", "--plan", str(copied))
    assert none.returncode == 2
    assert none.stdout == ""
    assert str(first) in none.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("main", "nothing"), "no baseline baselines/main.json"),
        (("no/such", "{full}"), "no run 'no/such'"),
        (("{full}",), "expected BASE and CAND, got 1 run"),
        (("--plan", "{full}", "{full}"), "--plan takes BASE alone"),
        (("--flips", "{full}", "{full}"), "write --flips 20, or --flips at the end"),
        (("{full}", "{full}", "--flips", "9" * 5000), "no number of samples; write --flips 20"),
        (("{full}", "{full}", "--catch", "0.5"), "at least the margin"),
        (("empty", "empty"), "no run in empty"),
        (("{full}", "{full}", "--metric", "nonsense"), "no sub-score 'nonsense'"),
        (("{full}", "{full}", "--write", "pdf=x"), "expected FORMAT=FILE"),
        (("{full}", "{full}", "--margin", "nan"), "nan is no number"),
    ],
)
def test_wrong_requests_are_one_line(kvbench, runs, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    result = kvbench("compare", *(each.format(full=runs / "full") for each in arguments))
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr


def test_an_unfinished_run_is_no_baseline(kvbench, runs, tmp_path):
    shutil.copytree(runs / "full", tmp_path / "half")
    (path,) = (tmp_path / "half").glob("*/run.json")
    path.write_text(path.read_text().replace('"complete"', '"failed"'))
    result = kvbench("baseline", "save", "main", "half")
    assert result.returncode == 2
    assert "is not finished (failed)" in result.stderr
