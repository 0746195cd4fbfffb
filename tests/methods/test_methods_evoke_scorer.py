"""EVOKE's score against a plain formulation of its own, block by block."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.evoke.scoring import Focus, Scorer, cosine
from agentbench_kv.methods.spans import Source
from agentbench_kv.registry import make_method

WEIGHTS = st.floats(0.01, 2.0)
SHARE = st.floats(0.0, 1.0)


def formulation(
    age: float,
    cos: float,
    attention: float | None,
    priority: float,
    source: str,
    w: dict[str, float],
) -> float:
    """The specification's sentence, for one block."""
    signals = [(w["rec"], math.exp(-w["decay"] * age)), (w["coh"], (cos + 1) / 2)]
    if attention is not None:
        signals.append((w["att"], attention))
    s = sum(weight * value for weight, value in signals) / sum(weight for weight, _ in signals)
    floor = {"user": w["user"], "assistant": w["assistant"], "document": 0.0}[source]
    if w["clamp"]:
        return max(min(priority * s, 1.0), floor)
    return min(1.0, (floor + (1.0 - floor) * s) * priority)


BLOCK = st.tuples(
    st.floats(0, 1e5),
    st.floats(-1, 1),
    SHARE,
    st.floats(0.01, 10),
    st.sampled_from(["user", "assistant", "document"]),
)


@given(
    blocks=st.lists(BLOCK, min_size=1, max_size=8),
    weights=st.tuples(WEIGHTS, WEIGHTS, WEIGHTS, st.floats(0, 0.1), SHARE, SHARE, st.booleans()),
)
def test_scores_are_the_specifications(blocks: list, weights: tuple) -> None:
    w = dict(
        zip(("rec", "coh", "att", "decay", "user", "assistant", "clamp"), weights, strict=True)
    )
    scorer = Scorer(
        w["rec"],
        w["coh"],
        w["att"],
        w["decay"],
        "clamp" if w["clamp"] else "rescale",
        w["user"],
        w["assistant"],
    )
    ages, cosines, attention, priorities, sources = zip(*blocks, strict=True)
    before = np.array(ages), np.array(cosines)
    after = np.array(priorities), [Source(name) for name in sources]
    expected = [formulation(*block, w) for block in blocks]
    assert scorer.score(*before, np.array(attention), *after) == pytest.approx(expected, abs=1e-12)
    expected = [formulation(a, c, None, p, s, w) for a, c, _, p, s in blocks]
    assert scorer.score(*before, None, *after) == pytest.approx(expected, abs=1e-12)


def test_presets_differ_in_attention_and_floors() -> None:
    code, readme = make_method("evoke", 1024), make_method("evoke@readme", 1024)
    assert (code.label, readme.label) == ("evoke", "evoke@readme")
    assert (code.w_attention, code.floor) == (0.0, "rescale")
    assert readme.w_attention > max(readme.w_coherence, readme.w_recency)
    assert readme.floor == "clamp"
    assert "span_attention" in readme.needs - code.needs
    assert (code.block, code.sinks, code.high, code.low, code.topk) == (128, 4, 0.95, 0.75, 4)


def test_engines_are_asked_for_what_is_needed_only() -> None:
    discard = make_method("evoke", 1024, {"recovery": "discard", "encoder": "hash"})
    assert discard.needs == {"evict_spans"}
    assert discard.below().query_plan().size == 0
    readme = make_method("evoke@readme", 1024, {"window": "32"})
    assert readme.below().query_plan().size == 32
    assert make_method("evoke", 1024, {"positions": "compact"}).below().positions == "cache"


@pytest.mark.parametrize(
    ("budget", "settings", "message"),
    [
        (300, {}, "raise --budget to 342"),
        (1024, {"low": "0.96"}, "low=0.96 is above high=0.95"),
        (1024, {"sinks": "129"}, "do not fit into a block"),
        (1024, {"w_recency": "0", "w_coherence": "0"}, "give one of them a weight"),
        (1024, {"layers": "first"}, "expected all, or numbers"),
        (None, {}, "needs a budget"),
        (1024, {"interval": "7"}, "unknown evoke parameter"),
    ],
)
def test_settings_that_cannot_be_are_refused(budget, settings, message) -> None:
    with pytest.raises(UsageError, match=message):
        make_method("evoke", budget, settings)


def test_a_share_is_never_too_small_for_the_blocks() -> None:
    method = make_method("evoke", "25%")
    assert method.budget_at(100) == 342
    assert method.budget_at(4000) == 1000


def unit(angle: float) -> np.ndarray:
    return np.array([math.cos(angle), math.sin(angle)], np.float32)


def test_the_focus_follows_snaps_and_obeys() -> None:
    focus = Focus(keep=0.7, snap=0.3)
    focus.follow(unit(0))
    focus.follow(unit(1.2))
    assert focus.vector == pytest.approx(0.7 * unit(0) + 0.3 * unit(1.2))
    focus.follow(unit(0.1), boundary=True)
    assert focus.vector == pytest.approx(unit(0.1))
    focus.follow(unit(1.5))
    assert focus.vector == pytest.approx(unit(1.5))


def test_the_cosine_of_nothing_is_zero() -> None:
    assert cosine(np.zeros(3, np.float32), np.ones(3, np.float32)) == 0.0
    assert cosine(unit(0.3), unit(0.3)) == pytest.approx(1.0)
