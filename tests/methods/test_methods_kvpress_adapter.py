"""kvpress' presses as methods, on a stand-in for kvpress: text, refusals, what a press is handed.

`test_methods_kvpress_real.py` runs the real one.
"""

# ruff: noqa: ARG002  presses have the arguments of kvpress

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from agentbench_kv.cli import main
from agentbench_kv.conformance.methods import check_method
from agentbench_kv.conformance.scenes import CacheShape, make_scene
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods import kvpress as kvpress_adapter
from agentbench_kv.methods.base import QueryKind, QueryPlan, in_order
from agentbench_kv.registry import load_class, load_method, make_method
from agentbench_kv.run import provenance
from agentbench_kv.run.provenance import method_code

calls: list[dict[str, Any]] = []
"""What the stand-in's presses were handed."""


class BasePress:
    """As kvpress' own, as far as the adapter can see."""


@dataclass
class ScorerPress(BasePress):
    compression_ratio: float = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError


@dataclass
class KnormPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        calls.append(
            {"ratio": self.compression_ratio, "layer": module.layer_idx, "attentions": attentions}
        )
        return -keys.norm(dim=-1)


@dataclass
class SnapKVPress(ScorerPress):
    window_size: int = 64
    kernel_size: int = 1

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        if hidden_states.shape[1] <= self.window_size:
            raise AssertionError("the input is not longer than the window")
        size, heads = self.window_size, module.config.num_attention_heads
        group = heads // module.config.num_key_value_heads
        plain = module.q_proj(hidden_states[:, -size:]).view(1, size, heads, module.head_dim)
        cos, sin = (part[:, None, -size:] for part in kwargs["position_embeddings"])
        queries = plain.transpose(1, 2)
        low, high = queries.chunk(2, -1)
        queries = queries * cos + torch.cat([-high, low], -1) * sin
        logits = queries @ keys.repeat_interleave(group, 1).mT / math.sqrt(module.head_dim)
        hidden = torch.ones(size, size, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., -size:] = logits[..., -size:].masked_fill(hidden, -torch.inf)
        mass = logits.softmax(-1).mean(2)[..., : -size or None]
        scores = mass.view(1, -1, group, mass.shape[-1]).mean(2)
        return pad(scores, (0, size), value=scores.max().item() + 1)


@dataclass
class RandomPress(ScorerPress):
    seed: int | None = None

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(keys.shape[:-1], generator=generator).to(keys.device)


@dataclass
class StreamingLLMPress(ScorerPress):
    n_sink: int = 4

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        tokens = keys.shape[2]
        pruned = tokens - int(tokens * (1 - self.compression_ratio))
        scores = torch.ones(keys.shape[:-1], device=keys.device)
        scores[..., self.n_sink : self.n_sink + pruned] = 0
        return scores


@dataclass
class CURPress(ScorerPress):
    num_sinks: int = 4
    leverage_type: str = "kv_product"
    use_random_leverage: bool = False

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return {"kv_product": keys * values, "key": keys * 0 / 0}[self.leverage_type].sum(-1)


@dataclass
class KeyDiffPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.sum(-1)[..., 1:]


@dataclass
class OwnPress(ScorerPress):
    """A scorer that nobody has looked at."""


class TOVAPress(BasePress):
    """Not a scorer in this version."""


PRESSES = (
    BasePress, ScorerPress, KnormPress, SnapKVPress, RandomPress, StreamingLLMPress, CURPress,
    KeyDiffPress, OwnPress, TOVAPress,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _kvpress(monkeypatch):
    """Make `import kvpress` give the presses above."""
    module = ModuleType("kvpress")
    for press in PRESSES:
        setattr(module, press.__name__, press)
    module.not_a_class = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvpress", module)
    monkeypatch.setattr(kvpress_adapter, "version", lambda _: "0.5.5")
    calls.clear()


def refused(spec, budget=512, kind=UsageError):
    """The line a user sees."""
    with pytest.raises(kind) as caught:
        make_method(spec, budget)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- the text

BOTH = "kvpress:SnapKVPress(kernel_size=3, window_size=8)"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("SnapKVPress(window_size=32)", "kvpress:SnapKVPress(window_size=32)"),
        (" SnapKVPress( window_size = 0x20 ) ", "kvpress:SnapKVPress(window_size=32)"),
        ("SnapKVPress(kernel_size=3, window_size=8)", BOTH),
        ("SnapKVPress(window_size=8, kernel_size=3)", BOTH),
        ("SnapKVPress(window_size=64)", "kvpress:SnapKVPress()"),
        ("KnormPress()", "kvpress:KnormPress()"),
        ("KnormPress", "kvpress:KnormPress()"),
        ("RandomPress(seed=0)", "kvpress:RandomPress(seed=0)"),
        ("CURPress(leverage_type='kv_product')", "kvpress:CURPress()"),
    ],
)  # fmt: skip
def test_equal_presses_are_one_method_with_one_label(text, label):
    method = make_method(f"kvpress:{text}", 512)
    assert method.label == label
    assert method == make_method(label, 512, method.settings())
    assert load_method(label) is load_class(label) is type(method)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(",
        "3",
        "SnapKVPress(32)",
        "SnapKVPress(*[32])",
        "SnapKVPress(**{'window_size': 32})",
        "SnapKVPress(window_size=1, window_size=2)",
        "SnapKVPress(window_size=32)()",
        "SnapKVPress(window_size=32).score",
        "kvpress.SnapKVPress()",
        "SnapKVPress()@kvpress",
        "SnapKVPress() or KnormPress()",
        "__import__('os').system('true')",
        "[KnormPress()]",
        "KnormPress()\nKnormPress()",
        "KnormPress(\0)",
        "(" * 5000,
    ],
)
def test_other_text_is_refused_with_an_example(text):
    assert "kvpress:SnapKVPress(window_size=32)" in refused(f"kvpress:{text}")[-60:]


@pytest.mark.parametrize(
    "value", ["f()", "size", "[1]", "{}", "1j", "-size", "(lambda: 1)()", "..."]
)
def test_arguments_are_literals_and_nothing_is_evaluated(value):
    line = refused(f"kvpress:SnapKVPress(window_size={value})")
    assert "expected a number, a text, True, False or None" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SnapKVPress(window=3)", "did you mean 'window_size'?"),
        ("SnapKVPress(compression_ratio=0.5)", "--budget decides"),
        ("SnapKVPress(window_size=-1)", "window_size=-1: expected an integer >= 0"),
        ("SnapKVPress(window_size=3.0)", "window_size=3.0: expected an integer >= 0"),
        ("SnapKVPress(window_size=True)", "window_size=True: expected an integer >= 0"),
        ("SnapKVPress(window_size=None)", "window_size=None: expected an integer >= 0"),
        ("SnapKVPress(window_size='a')", "window_size='a': expected an integer >= 0"),
        ("CURPress(leverage_type=3)", "leverage_type=3: expected a text"),
        ("CURPress(use_random_leverage=1)", "use_random_leverage=1: expected True or False"),
        ("CURPress(leverage_type='kv')", "cannot score: KeyError: 'kv'"),
        ("KeyDiffPress()", "gave scores (1, 7), expected one each"),
        ("RandomPress()", "with seed=None draws other numbers in every run"),
        ("RandomPress(seed=-1)", "seed=-1: expected an integer >= 0"),
        ("CURPress(use_random_leverage=True)", "draws other numbers in every run"),
        ("KnormPres()", "unknown kvpress press 'KnormPres'; did you mean 'KnormPress'?"),
        ("not_a_class", "unknown kvpress press 'not_a_class'"),
        ("OwnPress()", "not known to need only keys, values and the last queries"),
        ("TOVAPress()", "it is no ScorerPress"),
        ("ScorerPress()", "it is a base class"),
        ("ExpectedAttentionPress()", "it needs the hidden states of every token"),
        ("ObservedAttentionPress()", "--method h2o@kvpress"),
        ("QFilterPress()", "it needs weights or statistics made for one model"),
        ("KVzipPress()", "it needs several passes over the prompt"),
        ("AdaKVPress()", "it wraps another press"),
        ("PyramidKVPress()", "it gives layers budgets of their own"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(text, message):
    assert message in refused(f"kvpress:{text}")


@pytest.mark.parametrize(
    ("spec", "budget", "message"),
    [
        ("kvpress:SnapKVPress()", 64, "budget 64 is not above the 64 tokens"),
        ("kvpress:StreamingLLMPress(n_sink=9)", 9, "budget 9 is not above the 9 tokens"),
        ("kvpress:KnormPress()", None, "kvpress:KnormPress() needs a budget: add --budget"),
    ],
)
def test_a_budget_without_room_is_refused(spec, budget, message):
    assert message in refused(spec, budget)


# -- kvpress itself


def test_without_kvpress_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    line = refused("kvpress:KnormPress()", kind=PrerequisiteError)
    assert "kvpress, which is not installed" in line
    assert "pip install kvpress==0.5.5" in line
    assert "transformers < 5.3" in line


def test_a_kvpress_that_does_not_import_says_why(monkeypatch, tmp_path):
    (tmp_path / "kvpress.py").write_text("from transformers import NoSuchCache")
    monkeypatch.delitem(sys.modules, "kvpress")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = refused("kvpress:KnormPress()", kind=PrerequisiteError)
    assert "does not import here: ImportError: cannot import name 'NoSuchCache'" in line


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(kvpress_adapter, "version", lambda _: "0.6.1")
    assert "kvpress 0.6.1 is installed" in refused("kvpress:KnormPress()", kind=PrerequisiteError)


def test_a_copy_without_a_version_is_taken(monkeypatch):
    def no_version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(kvpress_adapter, "version", no_version)
    assert make_method("kvpress:KnormPress()", 64).budget == 64


def test_unfit_presses_are_refused_without_importing_kvpress(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert "several passes" in refused("kvpress:KVzipPress()")


# -- what a press is handed, and what becomes of its scores


def window_scores(queries, keys, window):
    """SnapKV without pooling in float64: the window's mean attention to what came before it."""
    vectors, rows = queries.vectors.double().numpy()[:, -window:], keys.double().numpy()
    group, tokens = len(vectors) // len(rows), rows.shape[1]
    scores = np.zeros((len(rows), tokens - window))
    for head, own in enumerate(vectors):
        for place, query in enumerate(own):
            seen = tokens - window + place + 1
            logits = rows[head // group, :seen] @ query / math.sqrt(len(query))
            weights = np.exp(logits - logits.max())
            scores[head // group] += (weights / weights.sum())[: tokens - window]
    return scores / (window * group)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_stored_queries_are_the_queries_of_the_press(group):
    method = make_method("kvpress:SnapKVPress(window_size=5)", 24)
    scene = make_scene(method, 40, shape=CacheShape(group=group))
    found = scene.select(method).scores
    for layer, view in enumerate(scene.layers):
        rows = view.positions.argsort(-1)[..., None].expand_as(view.keys)
        expected = window_scores(scene.queries[layer], view.keys.gather(1, rows), 5)
        np.testing.assert_allclose(found[layer, :, :-5], expected, rtol=1e-5)
    assert found[..., -5:].isnan().all()


def test_a_press_that_needs_queries_gets_one_more_than_its_window():
    method = make_method("kvpress:SnapKVPress(window_size=5)", 24)
    assert method.query_plan() == QueryPlan(QueryKind.RECENT, 6)
    assert make_method("kvpress:KnormPress()", 24).query_plan() == QueryPlan()


def test_what_the_press_ranks_highest_is_its_own_score():
    """The window wins by its score, not because the base protects it."""
    method = make_method("kvpress:SnapKVPress(window_size=5)", 24)
    scene = make_scene(method, 40)
    view = scene.layers[0]
    order = view.positions.argsort(-1)
    keys, values = in_order(view.keys, order), in_order(view.values, order)
    scores = method.press.score(scene.queries[0].vectors, keys, values, 0, 24)
    assert (scores[:, -5:] > 1).all()
    assert (scores[:, :-5] < 1).all()


def test_every_layer_is_scored_with_its_number_and_no_attention():
    method = make_method("kvpress:KnormPress()", 24)
    calls.clear()
    make_scene(method, 40, shape=CacheShape(layers=3)).select(method)
    assert [call["layer"] for call in calls] == [0, 1, 2]
    assert all(call["attentions"] is None for call in calls)


def test_the_ratio_keeps_exactly_the_budget():
    method = make_method("kvpress:KnormPress()", 24)
    keys = torch.ones(1, 1, 1)
    for tokens in (*range(2, 300), 4097, 16385):
        for budget in {1, tokens // 3 + 1, tokens - 1}:
            calls.clear()
            rows = keys.expand(1, tokens, 1)
            method.press.score(keys, rows, rows, 0, budget)
            ratio = calls[0]["ratio"]
            assert 0 <= ratio < 1
            assert int(tokens * (1 - ratio)) == budget


def test_key_norms_rank_as_in_numpy():
    method = make_method("kvpress:KnormPress()", 24)
    scene = make_scene(method, 40)
    selection = scene.select(method)
    for view, heads in zip(scene.layers, selection.kept, strict=True):
        norms = np.linalg.norm(view.keys.double().numpy(), axis=-1)
        for own, rows in zip(norms, heads.tolist(), strict=True):
            assert rows == sorted(np.argsort(own)[:24])


def test_streaming_keeps_the_sinks_and_the_newest():
    method = make_method("kvpress:StreamingLLMPress(n_sink=3)", 10)
    scene = make_scene(method, 40)
    kept = scene.positions(scene.select(method))
    places = scene.places
    assert torch.equal(kept, torch.cat([places[..., :3], places[..., -7:]], -1))


def test_nan_ranks_first_as_in_topk():
    method = make_method("kvpress:CURPress(leverage_type='key')", 24)
    assert torch.isinf(make_scene(method, 40).select(method).scores).all()


def test_a_share_leaves_room_for_what_the_press_always_keeps():
    method = make_method("kvpress:StreamingLLMPress(n_sink=9)", "10%", {"keep_recent": "4"})
    assert [method.budget_at(now) for now in (20, 130, 200)] == [14, 14, 20]


@pytest.mark.parametrize(
    "text",
    ["SnapKVPress(window_size=8)", "KnormPress()", "RandomPress(seed=1)", "StreamingLLMPress()"],
)
def test_presses_have_the_properties_of_methods(text):
    results = check_method(f"kvpress:{text}")
    assert len(results) >= 15
    assert [result for result in results if not result.ok] == []


# -- on the command line


def kvbench(monkeypatch, capsys, *args):
    """Exit code, stdout and stderr of `kvbench ARGS` in this process."""
    monkeypatch.setattr(sys, "argv", ["kvbench", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_spellings_of_a_press_share_a_run(monkeypatch, capsys):
    plans = []
    for text in ("SnapKVPress(window_size=32)", " SnapKVPress( window_size=32,)"):
        args = ["--method", f"kvpress:{text}", "--budget", "512", "--dry-run", "--json"]
        code, out, _ = kvbench(monkeypatch, capsys, "run", *args)
        assert code == 0
        plans += json.loads(out)
    assert plans[0] == plans[1]
    assert plans[0]["spec"]["method"] == "kvpress:SnapKVPress(window_size=32)"
    assert "kvpress_SnapKVPress_window_size_32-b512" in plans[0]["run_id"]


def test_ls_methods_mentions_presses(monkeypatch, capsys):
    code, out, _ = kvbench(monkeypatch, capsys, "ls", "methods")
    assert code == 0
    assert "kvpress:SnapKVPress(window_size=32)" in out
    assert "LagKVPress" in out


def test_a_wrong_press_is_one_line_and_exit_code_two(monkeypatch, capsys):
    args = ["run", "--method", "kvpress:AdaKVPress(press=KnormPress())", "--budget", "64"]
    code, out, err = kvbench(monkeypatch, capsys, *args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "expected a number, a text, True, False or None" in err


@pytest.mark.slow
@pytest.mark.parametrize("text", ["KnormPress()", "SnapKVPress(window_size=32)"])
def test_a_run_with_a_press_is_valid(text, monkeypatch, capsys, tmp_path: Path):
    args = ["--task", "micro/recall-1k", "--limit", "1", "--budget", "512", "--json"]
    where = ["--out", str(tmp_path), "--method", f"kvpress:{text}"]
    code, out, _ = kvbench(monkeypatch, capsys, "run", *where, *args)
    assert code == 0
    (summary,) = json.loads(out)
    assert summary["method"] == f"kvpress:{text}"
    assert summary["validity"]["state"] == "valid"
    assert summary["kv"]["events"] > 0
    assert summary["kv"]["max_peak_live"] < summary["kv"]["median_logical"]


def test_the_code_of_a_press_is_its_file_beside_ours(monkeypatch):
    read, seen = Path.read_bytes, []
    provenance._method_code.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", lambda path: seen.append(path.name) or read(path))
    assert method_code(make_method("kvpress:KnormPress", 64))
    assert seen == ["kvpress.py", Path(__file__).name, Path(__file__).name, Path(__file__).name]
