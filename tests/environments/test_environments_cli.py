"""`kvbench env` and `kvbench doctor`."""

import json
import sys

import pytest
from click.testing import CliRunner

from agentbench_kv import environments
from agentbench_kv.cli import doctor as doctor_module
from agentbench_kv.cli.doctor import Diagnosis, diagnose, doctor
from agentbench_kv.cli.env import env
from agentbench_kv.environments import EnvironmentStatus
from agentbench_kv.errors import UsageError


@pytest.fixture
def empty_home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.delenv("KVBENCH_ENV_BFCL", raising=False)
    return tmp_path


def run(command, *args, **more):
    return CliRunner().invoke(command, args, **more)


@pytest.mark.usefixtures("empty_home")
def test_list_says_how_to_create():
    result = run(env, "list")
    assert result.exit_code == 0
    assert "bfcl     missing: nothing at" in result.output
    assert "mend with: kvbench env create bfcl" in result.output


@pytest.mark.usefixtures("empty_home")
def test_list_json_and_its_variable():
    assert json.loads(run(env, "list", "--json").output)[0]["state"] == "missing"
    found = json.loads(run(env, "list", env={"KVBENCH_JSON": "1"}).output)
    assert found[0]["name"] == "bfcl"


@pytest.mark.usefixtures("empty_home")
def test_check_of_a_missing_environment_exits_with_2():
    assert run(env, "check", "bfcl").exit_code == 2
    result = run(env, "check", "bfcl", "--json")
    assert result.exit_code == 2
    assert json.loads(result.output)["mend"] == "kvbench env create bfcl"


@pytest.mark.usefixtures("empty_home")
def test_create_passes_its_options_and_reports_on_stderr(monkeypatch, tmp_path):
    seen = {}

    def create(name, **options):
        seen.update(options, name=name)
        options["report"]("progress")
        return EnvironmentStatus(name, "", "ready", "managed", None, "somewhere", folder=tmp_path)

    (tmp_path / "large").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(environments, "create", create)
    result = run(env, "create", "bfcl", "--python", sys.executable, "--recreate")
    assert result.exit_code == 0
    assert (seen["name"], str(seen["python"]), seen["recreate"]) == ("bfcl", sys.executable, True)
    assert result.stdout == "bfcl     ready: somewhere (3 MB)\n"
    assert result.stderr == "progress\n"
    assert json.loads(run(env, "create", "bfcl", "--json").stdout)["state"] == "ready"


def test_remove(empty_home):
    assert run(env, "remove", "bfcl").output == "bfcl: nothing to remove\n"
    folder = empty_home / "envs" / "bfcl-0123456789ab"
    folder.mkdir(parents=True)
    assert run(env, "remove", "bfcl").output == f"removed {folder}\n"
    assert json.loads(run(env, "remove", "bfcl", "--json").output) == {"removed": []}


@pytest.mark.usefixtures("empty_home")
def test_unknown_name_is_a_usage_error():
    assert isinstance(run(env, "create", "tau").exception, UsageError)


@pytest.mark.slow
@pytest.mark.usefixtures("empty_home")
def test_doctor_names_the_command_for_every_gap():
    findings = {each.name: each for each in diagnose()}
    assert findings["env bfcl"].verdict == "optional"
    assert findings["env bfcl"].mend == "kvbench env create bfcl"
    assert findings["kvbench"].verdict == "ok"
    assert findings["torch"].verdict == "ok"
    assert any(name.startswith("gpu") for name in findings)
    assert any(name.startswith("disk") for name in findings)
    assert all(each.mend for each in findings.values() if each.verdict != "ok")


def test_doctor_survives_an_examination_that_fails(monkeypatch):
    def _odd_thing():
        raise RuntimeError("boom")
        yield

    good = Diagnosis("x", "ok", "fine")
    monkeypatch.setattr(doctor_module, "EXAMINATIONS", (_odd_thing, lambda: iter([good])))
    result = run(doctor)
    assert result.exit_code == 2
    assert "BROKEN    odd thing: RuntimeError: boom" in result.output
    assert "ok        x: fine" in result.output


def test_doctor_json_and_exit_code(monkeypatch):
    absent = Diagnosis("y", "optional", "not there", "kvbench env create y")
    monkeypatch.setattr(doctor_module, "EXAMINATIONS", (lambda: iter([absent]),))
    result = run(doctor, "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == [
        {"name": "y", "verdict": "optional", "found": "not there", "mend": "kvbench env create y"}
    ]


def test_canned_call_parses():
    found = list(doctor_module._tool_parser())
    assert [each.verdict for each in found] == ["ok"]


def test_doctor_tells_data_that_is_there_from_data_that_is_not(tmp_path, monkeypatch):
    (tmp_path / "corpora" / "wiki").mkdir(parents=True)
    (tmp_path / "locomo10.json").write_text("[]")
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    found = {each.name: each for each in diagnose()}
    assert found["data locomo10.json"].verdict == "ok"
    assert found["corpora"].found == "wiki"
    absent = found["data tau2_v0.2.0"]
    assert (absent.verdict, absent.mend) == (
        "optional",
        "put it there or set KVBENCH_DATA; see docs/tau2.md",
    )
