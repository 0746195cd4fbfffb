"""`kvbench run`, and what `ls` and `show` say about what it left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from agentbench_kv.cli import options
from agentbench_kv.run.spec import RunSpec

Kvbench = Callable[..., Any]
PLAN = ("run", "--method", "full", "--dry-run", "--json")
GOLD = ("run", "--engine", "scripted", "--model", "gold", "--task", "micro/recall-1k", "--limit")
OPTIONS = [
    ("--method", "KVBENCH_METHOD", "snapkv", "method", "snapkv"),
    ("--budget", "KVBENCH_BUDGET", "99", "budget", 99),
    ("--engine", "KVBENCH_ENGINE", "scripted", "engine", "scripted"),
    ("--model", "KVBENCH_MODEL", "gold", "model", "gold"),
    ("--task", "KVBENCH_TASK", "micro/recall-1k", "task", "micro/recall-1k"),
    ("--limit", "KVBENCH_LIMIT", "3", "limit", 3),
    ("--trials", "KVBENCH_TRIALS", "2", "trials", 2),
    ("--seed", "KVBENCH_SEED", "5", "seed", 5),
    ("--concurrency", "KVBENCH_CONCURRENCY", "3", "concurrency", 3),
    ("--temperature", "KVBENCH_TEMPERATURE", "0.5", "temperature", 0.5),
    ("--max-tokens", "KVBENCH_MAX_TOKENS", "77", "max_tokens", 77),
    ("--timeout", "KVBENCH_TIMEOUT", "12.5", "timeout_s", 12.5),
    ("--dtype", "KVBENCH_DTYPE", "bfloat16", "dtype", "bfloat16"),
    ("--device", "KVBENCH_DEVICE", "cuda", "device", "cuda"),
]


def needed(option: str) -> list[str]:
    """Return the options without which `option` changes nothing."""
    other = {
        "--method": ["--budget", "64"],
        "--budget": ["--method", "agentkv"],
        "--engine": ["--method", "full", "--model", "gold"],
        "--model": ["--method", "full", "--engine", "scripted"],
    }
    return other.get(option, ["--method", "full"])


@pytest.mark.parametrize(
    ("option", "variable", "text", "field", "value"), OPTIONS, ids=[o[0] for o in OPTIONS]
)
def test_every_option_and_its_twin_reach_the_spec(
    kvbench: Kvbench, option: str, variable: str, text: str, field: str, value: object
) -> None:
    plan = ["run", *needed(option), "--dry-run", "--json"]
    (given,) = json.loads(kvbench(*plan, option, text).stdout)
    (twin,) = json.loads(kvbench(*plan, **{variable: text}).stdout)
    assert given["spec"][field] == value
    assert twin == given


def test_settings_reach_the_method(kvbench: Kvbench) -> None:
    plan = ("run", "--budget", "64", "--dry-run", "--json")
    (given,) = json.loads(kvbench(*plan, "--set", "interval=32", "--set", "sinks=2").stdout)
    (twin,) = json.loads(kvbench(*plan, KVBENCH_SET="interval=32 sinks=2").stdout)
    assert (given["spec"]["params"]["interval"], given["spec"]["params"]["sinks"]) == (32, 2)
    assert twin == given


def test_a_method_brings_settings_of_its_own(kvbench: Kvbench) -> None:
    plan = ("run", "--budget", "64", "--set", "sinks=2", "--dry-run", "--json")
    both = ("--method", "agentkv", "--method", "agentkv,pool=max,sinks=3")
    plain, own = json.loads(kvbench(*plan, *both).stdout)
    (named,) = json.loads(kvbench(*plan[:3], "--set", "pool=max", "--set", "sinks=3",
                                 "--dry-run", "--json").stdout)  # fmt: skip
    assert own == named  # the same run, with the same id
    assert ("pool" in plain["spec"]["params"], plain["spec"]["params"]["sinks"]) == (False, 2)
    refused = kvbench("run", "--budget", "64", "--method", "agentkv,pool")
    assert refused.returncode == 2
    assert "expected METHOD,KEY=VALUE, found 'pool'" in refused.stderr


@pytest.mark.parametrize(
    ("given", "driven"),
    [
        ("", 16),
        ("--engine vllm", 16),
        ("--engine llamacpp", 1),
        ("--engine llamacpp --concurrency 3", 3),
    ],
)
def test_an_engine_says_how_many_sessions_a_run_drives(given: str, driven: int) -> None:
    @click.command()
    @options.spec_options
    def show(shared: dict[str, Any]) -> None:
        click.echo(options.base_spec(shared).concurrency)

    assert CliRunner().invoke(show, given.split()).output == f"{driven}\n"


def test_defaults(kvbench: Kvbench) -> None:
    (row,) = json.loads(kvbench(*PLAN).stdout)
    defaults = RunSpec("embedded", "micro", "full", None, "micro/recall-5k")
    assert row["spec"] == defaults.document()
    (row,) = json.loads(kvbench("run", "--budget", "64", "--dry-run", "--json").stdout)
    assert row["spec"]["method"] == "agentkv"
    scripted = ("--engine", "scripted", "--model", "gold")
    (row,) = json.loads(kvbench("run", *scripted, "--dry-run", "--json").stdout)
    assert row["spec"]["method"] == "full"


def test_repeated_options_make_a_grid(kvbench: Kvbench) -> None:
    tasks = ("--task", "micro/recall-1k", "--task", "micro/recall-5k")
    plan = json.loads(kvbench(*PLAN, *tasks, "--seed", "1", "--seed", "0", "--seed", "1").stdout)
    assert [(row["spec"]["task"], row["spec"]["seed"]) for row in plan] == [
        ("micro/recall-1k", 1), ("micro/recall-1k", 0),
        ("micro/recall-5k", 1), ("micro/recall-5k", 0),
    ]  # fmt: skip


def test_a_dry_run_names_the_folders(kvbench: Kvbench, tmp_path: Path) -> None:
    done = kvbench("run", "--method", "full", "--seed", "0", "--seed", "1", "--dry-run")
    assert done.returncode == 0
    *folders, last = done.stdout.splitlines()
    assert last == "2 runs; nothing was started"
    assert [folder.split("/")[0] for folder in folders] == ["runs", "runs"]
    assert [folder.rsplit("-", 2)[1] for folder in folders] == ["s0", "s1"]
    elsewhere = kvbench("run", "--method", "full", "--dry-run", "--out", "x/y").stdout
    assert elsewhere.startswith("x/y/micro_recall-5k-full-")
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_its_start_to_its_display(kvbench: Kvbench, tmp_path: Path) -> None:
    done = kvbench(*GOLD, "2", "--seed", "0", "--seed", "1", "--json")
    assert done.returncode == 0
    documents = json.loads(done.stdout)
    assert [document["seed"] for document in documents] == [0, 1]
    for document in documents:
        assert document["path"] == f"runs/{document['run_id']}"
        assert (tmp_path / document["path"] / "summary.json").is_file()
        assert (document["score"]["point"], document["validity"]["state"]) == (1.0, "valid")
    start, *lines = done.stderr.splitlines()[:3]
    assert start == "full on micro/recall-1k: 2 trials"
    assert [line.partition(",")[0] for line in lines] == ["  1/2 trials", "  2/2 trials"]
    name = documents[0]["run_id"]

    again = kvbench(*GOLD, "2")
    assert again.returncode == 0
    assert again.stderr == "full on micro/recall-1k: 2 trials (2 done before)\n"
    assert again.stdout.splitlines()[-1] == f"runs/{name}"
    assert "100.0%" in again.stdout

    listed = json.loads(kvbench("ls", "runs", "--json").stdout)
    assert [row["run_id"] for row in listed] == [d["run_id"] for d in documents]
    assert name in kvbench("ls", "runs").stdout.split()
    (tmp_path / "runs").rename(tmp_path / "kept")
    assert kvbench("ls", "runs").stdout == "no runs in runs\n"
    assert name in kvbench("ls", "runs", "--out", "kept").stdout
    assert name in kvbench("ls", "runs", KVBENCH_OUT="kept").stdout

    shown = json.loads(kvbench("show", name, "--out", "kept", "--json").stdout)
    assert {trial["sample_id"] for trial in shown["trials"]} == {"recall-1k-0", "recall-1k-1"}
    one = kvbench("show", f"kept/{name}", "--json", KVBENCH_SAMPLE="recall-1k-1").stdout
    assert [trial["sample_id"] for trial in json.loads(one)["trials"]] == ["recall-1k-1"]


def test_show_looks_in_the_folder_that_run_writes(kvbench: Kvbench) -> None:
    (document,) = json.loads(kvbench(*GOLD, "1", "--json").stdout)
    shown = kvbench("show", document["run_id"])
    assert shown.returncode == 0
    assert document["run_id"] in shown.stdout


def test_ls_in_tables(kvbench: Kvbench) -> None:
    tasks = kvbench("ls", "tasks").stdout
    assert "micro/recall-1k" in tasks
    assert "embedded" not in tasks
    engines = kvbench("ls", "engines").stdout
    assert "embedded" in engines
    assert "compress" in engines
    assert "on scripted" in kvbench("ls", "methods", KVBENCH_ENGINE="scripted").stdout
    assert "snapkv" in kvbench("ls", "methods").stdout


def test_calls_that_nobody_read_are_named_with_the_cure(kvbench: Kvbench) -> None:
    ran = kvbench(*GOLD, "1", "--method", "full", "--tool-syntax", "json", "--quiet")
    assert ran.returncode == 0
    (line,) = [line for line in ran.stdout.splitlines() if "warning: " in line]
    assert line.endswith("so none of these was run; to read them: --tool-syntax hermes")
    (record,) = Path("runs").glob("*/samples.jsonl")
    metrics = json.loads(record.read_text())["metrics"]
    assert metrics["other_syntax"] == "hermes"
    assert f"warning: {metrics['calls_in_other_syntax']} answers" in line
    assert metrics["calls_in_other_syntax"] > 0


def test_calls_that_are_read_bring_no_warning(kvbench: Kvbench) -> None:
    ran = kvbench(*GOLD, "1", "--method", "full", "--quiet")
    assert "warning" not in ran.stdout + ran.stderr
