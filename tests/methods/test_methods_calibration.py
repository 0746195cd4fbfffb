"""TriAttention's statistics against means of the plain model's own queries before RoPE."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentbench_kv.conformance.reference import ReferenceTensors, reference_logits, tiny_model
from agentbench_kv.engines.embedded.model import wrap_model
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.run.calibration import calibrate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def documents(*lengths):
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(64, (n,), generator=draw).tolist() for n in lengths]


def pairs_of(model, texts):
    """z[f] = q[f] + i·q[f + d/2] of every query [layers, q_heads, tokens, d/2], before RoPE."""
    parts = []
    for text in texts:
        n, shape = len(text), model.config
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        allowed = causal.expand(shape.num_hidden_layers, shape.num_key_value_heads, n, n)
        capture = ReferenceTensors()
        reference_logits(model, text, allowed, capture, positions="cache")
        parts.append(torch.stack(capture.queries).double())
    first, second = torch.cat(parts, 2).chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_statistics_are_means_over_all_tokens_of_all_documents(family):
    """Qwen3 has a q-norm: statistics are of what attention sees."""
    model = tiny_model(family, layers=2)
    texts = documents(300, 40)
    expected = pairs_of(model, texts)
    found = calibrate(wrap_model(tiny_model(family, layers=2), Path("in-memory"), "x"), texts)
    torch.testing.assert_close(
        found.mean, expected.mean(2).to(torch.complex64), rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(found.abs_mean, expected.abs().mean(2).float(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.frequencies, model.model.rotary_emb.inv_freq)
    assert found.scale == 1.0


def test_statistics_do_not_carry_the_attention_factor():
    """Under yarn cached queries are longer by the factor; those before RoPE are not."""
    texts = documents(300)
    expected = pairs_of(tiny_model("llama", layers=2, rope=YARN), texts)
    loaded = wrap_model(tiny_model("llama", layers=2, rope=YARN), Path("in-memory"), "x")
    found = calibrate(loaded, texts)
    assert found.scale > 1.1
    torch.testing.assert_close(found.abs_mean, expected.abs().mean(2).float(), rtol=1e-3, atol=1e-5)


def test_too_little_text_is_refused():
    loaded = wrap_model(tiny_model(layers=2), Path("in-memory"), "x")
    with pytest.raises(UsageError, match="256"):
        calibrate(loaded, documents(100, 100))


def test_a_calibration_comes_back_from_its_file(tmp_path):
    made = calibrate(wrap_model(tiny_model(layers=2), Path("in-memory"), "x"), documents(300))
    path = tmp_path / "folder" / "stats.safetensors"
    made.save(path)
    again = Calibration.load(path)
    assert torch.equal(made.mean, again.mean)
    assert torch.equal(made.abs_mean, again.abs_mean)
    assert torch.equal(made.frequencies, again.frequencies)
    assert (made.scale, made.meta) == (again.scale, again.meta)
    assert [entry.name for entry in path.parent.iterdir()] == ["stats.safetensors"]


@pytest.mark.parametrize("content", [None, b"", b"not safetensors"])
def test_a_file_that_is_no_calibration_is_one_clear_line(tmp_path, content):
    path = tmp_path / "stats.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PrerequisiteError, match="kvbench calibrate"):
        Calibration.load(path)


def test_a_safetensors_file_of_something_else_is_one_clear_line(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "stats.safetensors"
    save_file({"other": torch.zeros(2)}, path)
    with pytest.raises(PrerequisiteError, match="kvbench calibrate"):
        Calibration.load(path)
