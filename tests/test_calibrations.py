"""Statistics of a model's queries, against queries taken from Hugging Face's own modules."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentbench_kv.engines.embedded.model import load_model, model_path
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.registry import make_method
from agentbench_kv.run.calibration import calibrate, calibrated, calibration_path, make_calibration


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


def test_short_text_is_refused():
    with pytest.raises(UsageError, match="has 12 tokens; calibration needs at least 256"):
        calibrate(load_model("micro", "float32", "cpu"), [[7] * 12])


@pytest.mark.usefixtures("home")
def test_a_method_without_one_makes_it_and_says_so(caplog):
    method = make_method("triattention", 256)
    with_it = calibrated(method, "micro", "float32", "cpu")
    assert "made from the micro task's text" in caplog.text
    assert with_it.calibration.meta["source"] == "the micro task's text"
    caplog.clear()
    again = calibrated(method, "micro", "float32", "cpu")
    assert not caplog.text
    assert torch.equal(again.calibration.mean, with_it.calibration.mean)


@pytest.mark.usefixtures("home")
def test_a_text_of_the_users_takes_its_place():
    model = load_model("micro", "float32", "cpu")
    path = make_calibration(model, ["a line of text, again and again\n" * 60], "mine.txt")
    assert path == calibration_path(model.sha)
    assert Calibration.load(path).meta["source"] == "mine.txt"


def test_a_broken_file_is_one_line(tmp_path):
    broken = tmp_path / "x.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(PrerequisiteError, match="make it with: kvbench calibrate"):
        Calibration.load(broken)


def test_other_methods_are_left_alone():
    method = make_method("snapkv", 256)
    assert calibrated(method, "micro", "float32", "cpu") is method
