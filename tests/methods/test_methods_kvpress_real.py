"""The real kvpress through the adapter, against kvpress itself and against our own methods.

Set KVBENCH_KVPRESS_PYTHON to the Python of an environment that has kvpress (docs/parity.md).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from agentbench_kv.methods.base import LayerView, Queries
from agentbench_kv.registry import make_method

PYTHON = os.environ.get("KVBENCH_KVPRESS_PYTHON", "")
ROOT = Path(__file__).parents[2]
TOKENS, BUDGET = 150, 90
WINDOW = 32
PRESSES = (
    f"SnapKVPress(window_size={WINDOW})",
    "TOVAPress()",
    "KnormPress()",
    "KeyDiffPress()",
    "LagKVPress(lag_size=16)",
    "CURPress()",
    "StreamingLLMPress(n_sink=6)",
    "RandomPress(seed=5)",
)
TIED = ("LagKVPress(lag_size=16)",)
"""They rank tokens of different parts of the cache equal; torch.topk then takes any of them."""

RUN_KVPRESS = f"""
import sys
sys.path.insert(0, sys.argv[1])
import kvpress, numpy, torch
import transformers.models.qwen3.modeling_qwen3 as qwen3
from agentbench_kv.methods.kvpress import press_method
from agentbench_kv.methods.base import LayerView, Queries

taken, plain = [], qwen3.apply_rotary_pos_emb

def taking(q, k, *args, **kwargs):
    rotated = plain(q, k, *args, **kwargs)
    taken.append(rotated[0][0].detach())
    return rotated

qwen3.apply_rotary_pos_emb = taking
torch.manual_seed(0)
config = qwen3.Qwen3Config(
    num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32, hidden_size=64,
    intermediate_size=64, vocab_size=200, initializer_range=0.3, attn_implementation="sdpa",
)
model = qwen3.Qwen3ForCausalLM(config).eval()
for name, weight in model.named_parameters():
    if name.endswith("k_norm.weight"):
        torch.nn.init.uniform_(weight, 0.5, 2)  # else all keys have the same norm
tokens = torch.randperm(200)[None, :{TOKENS}]  # a token that comes twice has a norm that ties
full = qwen3.DynamicCache()
with torch.no_grad():
    model(tokens, None, None, full)
queries = [q.clone() for q in taken]
keys, values = ([getattr(l, part)[0] for l in full.layers] for part in ("keys", "values"))
arrays = {{"queries": queries, "keys": keys, "values": values}}
places = torch.arange({TOKENS})

def recent(vectors, plan):
    last = places[{TOKENS} - plan.size:]
    return Queries(vectors[:, last], last, torch.zeros_like(last))

for text in sys.argv[3:]:
    method = press_method(text).create("", {BUDGET})
    layers = [LayerView(k, v, places.expand(len(k), -1)) for k, v in zip(keys, values)]
    kept = [recent(q, method.query_plan()) for q in queries]
    arrays[text + " kept"] = method.select(layers, kept, {TOKENS}).kept
    arrays[text + " ours"] = [
        method.press.score(q.vectors, k, v, i, {BUDGET})
        for i, (q, k, v) in enumerate(zip(kept, keys, values))
    ]
    press = method.press.cls(**{{"compression_ratio": 0.4, **dict(method.press.arguments)}})
    cache, scores, score = qwen3.DynamicCache(), [], press.score
    press.score = lambda *args: scores.append(score(*args)) or scores[-1]
    with torch.no_grad(), press(model):
        model(tokens, None, None, cache)
    arrays[text + " theirs"] = [part[0] for part in scores]
    arrays[text + " left"] = [layer.keys[0] for layer in cache.layers]
numpy.savez(
    sys.argv[2],
    **{{k: v if torch.is_tensor(v) else torch.stack(v).detach() for k, v in arrays.items()}},
)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """A random model's prompt: queries, keys, values; for every press, both sides' outcome."""
    if not PYTHON:
        pytest.skip("KVBENCH_KVPRESS_PYTHON is not set")
    if subprocess.run(
        [PYTHON, "-c", "import kvpress"], capture_output=True, check=False
    ).returncode:
        pytest.skip(f"kvpress is not installed for {PYTHON}")
    path = tmp_path_factory.mktemp("kvpress") / "run.npz"
    done = subprocess.run(
        [PYTHON, "-c", RUN_KVPRESS, ROOT, path, *PRESSES],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: torch.from_numpy(array) for name, array in np.load(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("press", PRESSES)
def test_a_press_scores_as_inside_kvpress(outcome, press):
    ours, theirs = outcome[f"{press} ours"], outcome[f"{press} theirs"]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("press", PRESSES)
def test_a_press_keeps_what_it_keeps_inside_kvpress(outcome, press):
    kept, left = outcome[f"{press} kept"], outcome[f"{press} left"]
    assert kept.shape == left.shape[:3] == (2, 2, BUDGET)
    for layer, heads in enumerate(kept):
        for head, rows in enumerate(heads):
            ours = {key.tobytes() for key in outcome["keys"][layer, head, rows].numpy()}
            theirs = {key.tobytes() for key in left[layer, head].numpy()}
            if press not in TIED:
                assert ours == theirs
            scores = outcome[f"{press} theirs"][layer, head]
            best = scores.sort(descending=True).values[:BUDGET]
            assert torch.equal(scores[rows].sort(descending=True).values, best)


@pytest.mark.slow
def test_snapkv_is_ours(outcome):
    """Two implementations of SnapKV, the press's and ours, keep the same rows."""
    press = f"SnapKVPress(window_size={WINDOW})"
    places, last = torch.arange(TOKENS), torch.arange(TOKENS - WINDOW, TOKENS)
    layers = [
        LayerView(keys, values, places.expand(len(keys), -1))
        for keys, values in zip(outcome["keys"], outcome["values"], strict=True)
    ]
    queries = [Queries(q[:, last], last, torch.zeros_like(last)) for q in outcome["queries"]]
    own = make_method("snapkv@kvpress", BUDGET, {"window": WINDOW}).select(layers, queries, TOKENS)
    assert torch.equal(own.kept, outcome[f"{press} kept"])
    competing = ~own.scores.isnan()
    assert competing.sum() == 2 * 2 * (TOKENS - WINDOW)
    torch.testing.assert_close(
        own.scores[competing], outcome[f"{press} ours"][competing], rtol=1e-4, atol=1e-7
    )


@pytest.mark.slow
def test_knorm_ranks_by_the_smallest_norm(outcome):
    norms = np.linalg.norm(outcome["keys"].double().numpy(), axis=-1)
    assert norms.std() > 0.1
    smallest = np.sort(np.argsort(norms, axis=-1)[..., :BUDGET], axis=-1)
    np.testing.assert_array_equal(outcome["KnormPress() kept"], smallest)
