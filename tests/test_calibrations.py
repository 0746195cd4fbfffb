"""Statistics of a model's queries, against queries taken from Hugging Face's own modules."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.engines.embedded.model import load_model, model_path
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.registry import make_method
from agentbench_kv.results.runs import load_run, variants
from agentbench_kv.results.store import RunStore
from agentbench_kv.run.calibration import (
    calibrate,
    calibrated,
    calibration_path,
    identified,
    make_calibration,
    recorded,
)
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    return tmp_path


def test_means_are_those_of_normed_queries_before_rope():
    model = load_model("micro", "float32", "cpu")
    documents = [list(range(5, 305)), list(range(600, 100, -1))]
    found = calibrate(model, documents)
    network = AutoModelForCausalLM.from_pretrained(model_path("micro"), dtype=torch.float32)
    seen: dict[int, list[torch.Tensor]] = {}
    for index, layer in enumerate(network.model.layers):
        layer.self_attn.q_norm.register_forward_hook(
            lambda _, __, out, index=index: seen.setdefault(index, []).append(out[0])
        )
    with torch.no_grad():
        for document in documents:
            network(torch.tensor([document]))
    for index, parts in seen.items():
        queries = torch.cat(parts).transpose(0, 1).double()
        half = queries.shape[-1] // 2
        pairs = torch.complex(queries[..., :half], queries[..., half:])
        torch.testing.assert_close(
            found.mean[index], pairs.mean(1).to(torch.complex64), atol=1e-4, rtol=1e-3
        )
        torch.testing.assert_close(
            found.abs_mean[index], pairs.abs().mean(1).float(), atol=1e-4, rtol=1e-3
        )
        for head, each in enumerate(queries):
            torch.testing.assert_close(
                found.covariance[index, head],
                torch.cov(each.T, correction=0).float(),
                atol=1e-3,
                rtol=1e-3,
            )


@pytest.mark.usefixtures("home")
def test_a_file_of_version_1_serves_the_methods_it_served_and_no_other():
    model, path = load_model("micro", "float32", "cpu"), calibration_path("micro")
    made = make_calibration(model, ["some words of a text " * 99], "mine.txt", path)
    named = identified(spec()).calibration
    assert identified(spec(method="expected-attention")).calibration == made.sha256 != named
    with safe_open(path, "pt") as file:  # as it was written before there were covariances
        old = {name: file.get_tensor(name) for name in file.keys() if "covariance" not in name}  # noqa: SIM118
        meta = {k: v for k, v in file.metadata().items() if k != "version"}
    save_file(old, path, metadata=meta)
    assert identified(spec()).calibration == named
    for wants in (identified, lambda s: calibrated(s.built_method, "micro", "cpu")):
        with pytest.raises(PrerequisiteError, match="earlier version, does not hold; make it"):
            wants(spec(method="expected-attention"))
    again = make_calibration(model, ["some words of a text " * 99], "mine.txt", path)
    assert again.sha256 == made.sha256
    assert identified(spec()).calibration == named


@pytest.mark.usefixtures("home")
def test_a_tasks_own_file_of_version_1_is_made_anew_where_covariances_are_needed(caplog):
    identified(spec())
    path = calibration_path("micro", "micro/recall-1k", "float32")
    Calibration.load(path).without_covariance().save(path)
    old = identified(spec())
    caplog.clear()
    assert (
        identified(spec(method="expected-attention")).built_method.calibration.covariance
        is not None
    )
    assert "calibrated model micro" in caplog.text
    assert identified(spec()).calibration == old.calibration


def test_a_file_of_a_later_version_is_refused(tmp_path):
    path = tmp_path / "later.safetensors"
    made_up_calibration(1, 2, torch.ones(4)).save(path)
    with safe_open(path, "pt") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = {**file.metadata(), "version": "3"}
    save_file(parts, path, metadata=meta)
    with pytest.raises(PrerequisiteError, match="version 3, this kvbench reads 2"):
        Calibration.load(path)
    save_file({**parts, "q_covariance": torch.ones(1, 2, 4, 4)}, path)
    with pytest.raises(PrerequisiteError, match="a covariance"):
        Calibration.load(path)


def test_short_text_is_refused():
    with pytest.raises(UsageError, match="has 12 tokens; calibration needs at least 256"):
        calibrate(load_model("micro", "float32", "cpu"), [[7] * 12])


def spec(task="micro/recall-1k", method="triattention", **more):
    base = RunSpec("embedded", "micro", method, 256, task, limit=1, concurrency=1, device="cpu")
    return resolve(replace(base, **more), {})


def quiet(*_):
    """Report nothing."""


@pytest.mark.usefixtures("home")
def test_a_run_is_calibrated_on_its_own_task_and_says_so(caplog):
    found = identified(spec())
    assert "sessions of micro/recall-1k that are no samples" in caplog.text
    assert found.built_method.calibration.sha256 == found.calibration
    assert found.id != spec().id
    other = identified(spec("micro/recall-5k"))
    assert other.calibration != found.calibration
    caplog.clear()
    again = identified(spec(seed=3))
    assert again.calibration == found.calibration
    assert not caplog.text
    assert RunSpec(**found.document()) == found


@pytest.mark.usefixtures("home")
def test_the_same_text_gives_the_same_hash_and_another_text_another():
    model = load_model("micro", "float32", "cpu")
    path, text = calibration_path("micro"), "a line of text, again and again\n" * 60
    first = make_calibration(model, [text], "mine.txt", path)
    assert make_calibration(model, [text], "renamed.txt", path).sha256 == first.sha256
    assert make_calibration(model, [text + "."], "mine.txt", path).sha256 != first.sha256


@pytest.mark.usefixtures("home")
def test_a_text_of_the_users_is_another_run_and_the_old_one_is_found_again():
    own = identified(spec())
    model = load_model("micro", "float32", "cpu")
    path, text = calibration_path("micro"), "a line of text, again and again\n" * 60
    made = make_calibration(model, [text], "mine.txt", path)
    named = identified(spec())
    assert named.calibration == made.without_covariance().sha256 != own.calibration
    make_calibration(model, [text * 2], "longer.txt", path)
    assert identified(spec()).calibration not in (named.calibration, own.calibration)
    for run in (own, named):  # as `analyze evidence` and `leaderboard rerun` read specs
        played = recorded(RunSpec(**run.document()))
        assert played.built_method.calibration.sha256 == run.calibration
    with pytest.raises(UsageError, match="does not say what it was calibrated on"):
        recorded(spec())  # a run of version 0.1


@pytest.mark.usefixtures("home")
def test_a_replaced_file_and_the_same_command_is_another_run(tmp_path):
    out = tmp_path / "runs"
    first = run_one(spec(), out, quiet)
    path = calibration_path("micro", "micro/recall-1k", "float32")
    used = Calibration.load(path).without_covariance()
    assert run_one(spec(), out, quiet).run_id == first.run_id
    replace(used, mean=used.mean * 1.001).save(path)
    second = run_one(spec(), out, quiet)
    assert second.run_id != first.run_id
    old = shutil.copytree(out / first.run_id, tmp_path / "old") / "run.json"
    document = json.loads(old.read_text())
    del document["spec"]["calibration"]  # as 0.1 wrote it
    old.write_text(json.dumps(document))
    runs = [*(load_run(out / each.run_id) for each in (first, second)), load_run(old.parent)]
    assert variants(runs)[2] == "triattention [calibration=unknown]"
    assert variants(runs[:2])[0] == f"triattention [calibration={used.sha256[:12]}]"
    assert variants(runs[:1]) == ["triattention"]
    for summary in (first, second):
        info = RunStore(out).find(summary.run_id).info
        assert info.provenance["calibration"]["sha256"] == info.spec["calibration"]
        assert any("calibrated on" in note for note in summary.notes)


@pytest.mark.usefixtures("home")
def test_another_task_is_refused_with_the_command_that_makes_one():
    identified(spec())  # the micro task's text is there, and is not taken
    with pytest.raises(PrerequisiteError, match="kvbench calibrate --model micro --text FILE"):
        identified(spec("locomo/qa"))


@pytest.mark.usefixtures("home")
def test_a_plan_makes_nothing(home):
    with pytest.raises(PrerequisiteError, match="calibrate --model micro --task micro/recall-1k"):
        identified(spec(), make=False)
    assert not list(home.iterdir())


@pytest.mark.usefixtures("home")
def test_a_server_takes_only_a_text_of_the_users():
    method = make_method("triattention", 256)
    identified(spec())
    with pytest.raises(PrerequisiteError, match="--text FILE"):
        calibrated(method, "micro", "cpu")
    model = load_model("micro", "float32", "cpu")
    made = make_calibration(model, ["some words of a text " * 99], "w", calibration_path("micro"))
    found = calibrated(method, "micro", "cpu").calibration
    assert found.sha256 == made.without_covariance().sha256


@pytest.mark.usefixtures("home")
def test_a_file_that_does_not_say_what_text_it_is_from_is_not_used(caplog):
    own = identified(spec())
    made = own.built_method.calibration
    old = {"model_sha": made.meta["model_sha"], "source": "the micro task's text", "tokens": "9"}
    replace(made, mean=made.mean * 2, meta=old).save(calibration_path("micro"))
    assert identified(spec()).calibration == own.calibration
    assert "does not say what text" in caplog.text


@pytest.mark.usefixtures("home")
def test_the_calibration_of_another_model_is_refused():
    made = identified(spec()).built_method.calibration
    replace(made, meta={**made.meta, "model_sha": "0" * 64}).save(calibration_path("micro"))
    with pytest.raises(PrerequisiteError, match="of another model"):
        identified(spec())


@pytest.mark.usefixtures("home")
def test_a_recorded_calibration_that_is_gone_is_named():
    with pytest.raises(PrerequisiteError, match=r"calibration of model micro \(abcabcabcabc\)"):
        identified(replace(spec(), calibration="abc" * 20 + "abcd"))


def test_a_folder_that_cannot_be_written_is_one_line(home):
    (home / "calibration").write_text("a file where the folder should be")
    with pytest.raises(PrerequisiteError, match="set KVBENCH_HOME"):
        identified(spec())


def test_a_broken_file_is_one_line(tmp_path):
    broken = tmp_path / "x.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(PrerequisiteError, match="make it again with kvbench calibrate"):
        Calibration.load(broken)


@pytest.mark.usefixtures("home")
def test_other_methods_are_left_alone():
    method = make_method("snapkv", 256)
    assert calibrated(method, "micro", "cpu") is method
    plain = spec(method="snapkv", calibration="0" * 64)
    assert "calibration" not in plain.document()
    assert identified(plain) is plain
