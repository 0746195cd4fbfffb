"""Scores and kept rows against NVIDIA's kvpress, which runs in an environment of its own.

Set KVBENCH_KVPRESS_PYTHON to the Python of an environment that has kvpress (docs/parity.md).
"""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
import torch

from agentbench_kv.kernels import attention_mass
from agentbench_kv.methods.base import LayerView, Queries
from agentbench_kv.registry import make_method

PYTHON = os.environ.get("KVBENCH_KVPRESS_PYTHON", "")
TOKENS, WINDOW = 150, 64
PRESSES = {
    "snapkv@kvpress": "SnapKVPress",
    "h2o@kvpress": "ObservedAttentionPress",
    "streamingllm": "StreamingLLMPress",
}

RUN_KVPRESS = f"""
import sys
import kvpress, numpy, torch
import transformers.models.qwen3.modeling_qwen3 as qwen3

taken, plain = [], qwen3.apply_rotary_pos_emb

def taking(q, k, *args, **kwargs):
    rotated = plain(q, k, *args, **kwargs)
    taken.append([x[0].detach() for x in rotated])
    return rotated

qwen3.apply_rotary_pos_emb = taking
torch.manual_seed(0)
config = qwen3.Qwen3Config(
    num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32, hidden_size=64,
    intermediate_size=64, vocab_size=80, initializer_range=0.3, attn_implementation="eager",
)
model = qwen3.Qwen3ForCausalLM(config).eval()
tokens = torch.randint(80, (1, {TOKENS}))
arrays = {{}}
for name in sys.argv[2:]:
    press, cache, scores = getattr(kvpress, name)(compression_ratio=0.4), qwen3.DynamicCache(), []
    score = press.score
    press.score = lambda *args: scores.append(score(*args)) or scores[-1]
    taken.clear()
    with torch.no_grad(), press(model):
        model(tokens, past_key_values=cache)
    arrays["queries"], arrays["keys"] = (torch.stack(part).numpy() for part in zip(*taken))
    arrays[name + " scores"] = torch.cat(scores).numpy()
    arrays[name + " left"] = torch.cat([layer.keys for layer in cache.layers]).numpy()
numpy.savez(sys.argv[1], **arrays)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Queries and keys of a random model's prompt; scores and keys left of every press."""
    if not PYTHON:
        pytest.skip("KVBENCH_KVPRESS_PYTHON is not set")
    if subprocess.run(
        [PYTHON, "-c", "import kvpress"], capture_output=True, check=False
    ).returncode:
        pytest.skip(f"kvpress is not installed for {PYTHON}")
    path = tmp_path_factory.mktemp("kvpress") / "run.npz"
    subprocess.run([PYTHON, "-c", RUN_KVPRESS, path, *PRESSES.values()], check=True, timeout=300)
    return {name: torch.from_numpy(array) for name, array in np.load(path).items()}


def layer_view(queries, keys):
    """A prefilled cache layer; its sums are those of a causal pass over the prompt."""
    places = torch.arange(TOKENS)
    positions = places.expand(keys.shape[0], -1)
    mass = attention_mass(queries, keys, query_positions=places, key_positions=positions)
    return LayerView(keys, keys, positions, mass * TOKENS)


def last_queries(queries):
    recent = torch.arange(TOKENS - WINDOW, TOKENS)
    return Queries(queries[:, -WINDOW:], recent, torch.zeros_like(recent))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "press"), PRESSES.items())
def test_method_agrees_with_kvpress(theirs, spec, press):
    scores, left = theirs[f"{press} scores"], theirs[f"{press} left"]
    layers = [layer_view(*pair) for pair in zip(theirs["queries"], theirs["keys"], strict=True)]
    queries = [last_queries(layer) for layer in theirs["queries"]]
    selection = make_method(spec, left.shape[2]).select(layers, queries, TOKENS, prompt=TOKENS)
    if spec != "streamingllm":  # kvpress marks what to keep there, it does not score
        competing = ~selection.scores.isnan()
        torch.testing.assert_close(
            selection.scores[competing], scores[competing], rtol=1e-4, atol=1e-7
        )
    for layer, heads in enumerate(selection.kept):
        for head, rows in enumerate(heads):
            ours = {key.tobytes() for key in theirs["keys"][layer, head, rows].numpy()}
            assert ours == {key.tobytes() for key in left[layer, head].numpy()}
