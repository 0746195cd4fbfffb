"""Scores and kept rows against NVIDIA's kvpress, which runs in an environment of its own.

Set KVBENCH_KVPRESS_PYTHON to the Python of an environment that has kvpress (docs/parity.md).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from agentbench_kv.kernels import attention_mass
from agentbench_kv.methods.base import LayerView, Queries
from agentbench_kv.methods.calibration import Calibration, as_complex
from agentbench_kv.registry import make_method

PYTHON = os.environ.get("KVBENCH_KVPRESS_PYTHON", "")
WINDOW, SESSIONS, LAG, CHUNK = 64, 20, 24, 20
# Ours, our settings, and theirs as Python makes it.
PRESSES = {
    "snapkv@kvpress": ({}, "SnapKVPress(RATIO)"),
    "h2o@kvpress": ({}, "ObservedAttentionPress(RATIO)"),
    "streamingllm": ({}, "StreamingLLMPress(RATIO)"),
    "keydiff": ({}, "KeyDiffPress(RATIO)"),
    "tova": ({}, "TOVAPress(RATIO)"),
    "expected-attention": ({}, "ExpectedAttentionPress(RATIO)"),
    "lagkv": ({"lag": LAG}, f"LagKVPress(RATIO, lag_size={LAG})"),
    # Theirs sums over a layer's heads and takes whole chunks only.
    "chunk": (
        {"chunk": CHUNK, "kept_set": "per_layer"},
        f"ChunkKVPress(KeyDiffPress(RATIO), chunk_length={CHUNK})",
    ),
}

RUN_KVPRESS = """
import sys
from kvpress import *
import numpy, torch
import transformers.models.qwen3.modeling_qwen3 as qwen3

taken, plain = [], qwen3.apply_rotary_pos_emb

def taking(q, k, *args, **kwargs):
    rotated = plain(q, k, *args, **kwargs)
    taken.append([x[0].detach() for x in rotated])
    return rotated

qwen3.apply_rotary_pos_emb = taking
torch.manual_seed(int(sys.argv[2]))
tokens = torch.randint(80, (1, 120 + 20 * (int(sys.argv[2]) % 5)))
heads = (2, 4, 1)[int(sys.argv[2]) % 3]
# The chunks' press needs attention that gives no weights, the observed attention one that does.
arrays = {}
for number, made in enumerate(sys.argv[3:]):
    torch.manual_seed(int(sys.argv[2]))
    config = qwen3.Qwen3Config(
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=heads, head_dim=32,
        hidden_size=64, intermediate_size=64, vocab_size=80, initializer_range=0.3,
        attn_implementation="sdpa" if "Chunk" in made else "eager",
    )
    model = qwen3.Qwen3ForCausalLM(config).eval()
    press, cache, scores = eval(made.replace("RATIO", "0.4")), qwen3.DynamicCache(), []
    inner = getattr(press, "press", press)
    score = inner.score
    inner.score = lambda *args: scores.append(score(*args)) or scores[-1]
    statistics = []
    if "Expected" in made:
        turn = press.apply_avg_rope
        press.apply_avg_rope = lambda *args: statistics.append(args[1:]) or turn(*args)
    taken.clear()
    plain_cache = qwen3.DynamicCache()
    with torch.no_grad():
        model(tokens, None, None, plain_cache)
        taken.clear()
        with press(model):
            model(tokens, None, None, cache)
    arrays[f"queries {number}"], arrays[f"keys {number}"] = (
        torch.stack(part).numpy() for part in zip(*taken)
    )
    arrays[f"values {number}"] = torch.cat([layer.values for layer in plain_cache.layers]).numpy()
    for part, name in enumerate(("mean", "covariance") if statistics else ()):
        arrays[f"{name} {number}"] = torch.cat([each[part] for each in statistics]).numpy()
        arrays["frequencies"] = model.model.rotary_emb.inv_freq.numpy()
    arrays[f"scores {number}"] = torch.cat(scores).numpy()
    arrays[f"left {number}"] = torch.cat([layer.keys for layer in cache.layers]).numpy()
numpy.savez(sys.argv[1], **arrays)
"""


@pytest.fixture(scope="module", params=range(SESSIONS))
def theirs(request, tmp_path_factory):
    """Queries, keys and values of a random model's prompt; scores and keys left of every press."""
    if not PYTHON:
        pytest.skip("KVBENCH_KVPRESS_PYTHON is not set")
    found = subprocess.run([PYTHON, "-c", "import kvpress"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"kvpress is not installed for {PYTHON}")
    path = Path(tmp_path_factory.mktemp("kvpress")) / "run.npz"
    command = [PYTHON, "-c", RUN_KVPRESS, str(path), str(request.param)]
    command += [press for _, press in PRESSES.values()]
    subprocess.run(command, check=True, timeout=600)
    return {name: torch.from_numpy(array) for name, array in np.load(path).items()}


def layer_view(queries, keys, values):
    """A prefilled cache layer; its sums are those of a causal pass over the prompt."""
    tokens = keys.shape[1]
    places = torch.arange(tokens)
    positions = places.expand(keys.shape[0], -1)
    mass = attention_mass(queries, keys, query_positions=places, key_positions=positions)
    return LayerView(keys, values, positions, mass * tokens)


def last_queries(queries, size):
    tokens = queries.shape[1]
    recent = torch.arange(tokens - size, tokens)
    return Queries(queries[:, -size:], recent, torch.zeros_like(recent))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESSES)
def test_method_agrees_with_kvpress(theirs, name):
    number, (settings, _) = list(PRESSES).index(name), PRESSES[name]
    parts = [theirs[f"{part} {number}"] for part in ("queries", "keys", "values")]
    scores, left = theirs[f"scores {number}"], theirs[f"left {number}"]
    layers = [layer_view(*each) for each in zip(*parts, strict=True)]
    method = make_method("keydiff" if name == "chunk" else name, left.shape[2], settings)
    if method.needs_covariance:  # theirs are the prompt's own statistics
        mean, covariance = theirs[f"mean {number}"], theirs[f"covariance {number}"]
        known = (as_complex(mean), mean[..., ::2], theirs["frequencies"])
        method = method.with_calibration(Calibration(*known, covariance=covariance))
    queries = [last_queries(layer, max(1, method.query_plan().size)) for layer in parts[0]]
    tokens = scores.shape[-1]
    selection = method.select(layers, queries, tokens, prompt=tokens)
    # kvpress marks what to keep for streamingllm, and gives the stretches that stay one score.
    if name not in ("streamingllm", "lagkv", "chunk"):
        competing = ~selection.scores.isnan()
        torch.testing.assert_close(
            selection.scores[competing], scores[competing], rtol=1e-4, atol=1e-7
        )
    for layer, heads in enumerate(selection.kept):
        for head, rows in enumerate(heads):
            where = {key.tobytes(): i for i, key in enumerate(parts[1][layer, head].numpy())}
            taken = {where[key.tobytes()] for key in left[layer, head].numpy()}
            assert len(taken) == len(rows)
            # In tokens of one score only: every rank of lagkv occurs in every stretch.
            differing = sorted(taken ^ set(rows.tolist()))
            assert name == "lagkv" or not differing
            assert len(set(scores[layer, head, differing].tolist())) <= 1
