"""Sessions beside and after each other; and that the check finds state that leaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from agentbench_kv.conformance.driver import drive, short_turns
from agentbench_kv.conformance.kept_sets import check_sessions, compare_traces
from agentbench_kv.conformance.reference import tiny_model
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import make_method

CASES = [
    ("agentkv", 64, {}),
    ("agentkv", 64, {"positions": "cache"}),
    ("h2o", 64, {}),
    ("random", 64, {}),
    ("rkv", 64, {"trigger": "slack"}),
    ("snapkv@original", 64, {"trigger": "prefill+every"}),
    ("streamingllm@paper", 64, {}),
    ("triattention", 140, {}),
    ("h2o", "30%", {"positions": "cache"}),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=2)


@pytest.mark.parametrize(("spec", "budget", "settings"), CASES, ids=str)
def test_a_session_is_the_same_alone_in_company_and_after_others(model, spec, budget, settings):
    """Prompts of other lengths, one session that ends early; batched decode, reused slots."""
    results = check_sessions(make_method(spec, budget, settings), model)
    assert [result for result in results if not result.ok] == []
    assert len(results) == 3


_seen: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Leaky(Method):
    """Its scores depend on how many events there were in the whole process."""

    name: ClassVar[str] = "leaky"

    def score(self, queries, keys, context):  # noqa: ARG002
        _seen.append(1)
        generator = torch.Generator().manual_seed(len(_seen))
        return torch.rand(keys.shape[:2], generator=generator)


def test_state_kept_between_sessions_is_found(model):
    results = check_sessions(Leaky(budget=64), model)
    assert [result.ok for result in results] == [True, False, False]
    assert "a: " in results[1].detail


def test_compare_traces_names_the_first_difference(model):
    method = make_method("streamingllm", 64, {"interval": "16"})
    trace = drive(model, method, {"only": short_turns()})["only"]
    assert compare_traces(trace, trace) == ""
    tokens = [*trace.tokens]
    tokens[17] += 1
    assert compare_traces(trace, replace(trace, tokens=tokens)) == "token 17 differs"
    assert "other times" in compare_traces(trace, replace(trace, events=trace.events[1:]))
    moved = replace(trace.events[0], kept=trace.events[0].kept + 1)
    assert "event 0" in compare_traces(trace, replace(trace, events=[moved, *trace.events[1:]]))
    logits = {position: row + 1e-3 for position, row in trace.logits.items()}
    assert "logits differ by" in compare_traces(trace, replace(trace, logits=logits))
