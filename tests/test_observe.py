"""Captures, traces and audits of sessions on the shipped model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentbench_kv.adapters.base import Fact
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.agentkv import AgentKV
from agentbench_kv.run.observe import (
    AuditedFact,
    SessionAudit,
    audit_session,
    by_outcome,
    capture_session,
    find_text,
    ring_session,
    trace_session,
    watch,
)
from agentbench_kv.run.spec import RunSpec, resolve


def spec(method="full", budget=None, **settings):
    base = RunSpec(
        engine="embedded",
        model="micro",
        method=method,
        budget=budget,
        task="micro/recall-1k",
        limit=3,
    )
    return resolve(base, settings)


@pytest.fixture(scope="module")
def captured():
    return capture_session(spec(), "0", [], [], torch.float32)


def test_a_capture_holds_what_the_model_computes(captured):
    """Keys of the first layer and the next token from the last, against Hugging Face."""
    network = AutoModelForCausalLM.from_pretrained(model_path("micro"), dtype=torch.float32)
    with torch.no_grad():
        result = network(captured.tokens[None], use_cache=True)
    for layer in range(captured.layers):
        keys = result.past_key_values.layers[layer].keys[0]
        values = result.past_key_values.layers[layer].values[0]
        torch.testing.assert_close(captured.k[layer], keys, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(captured.v[layer], values, atol=2e-4, rtol=1e-4)
    guessed = result.logits[0].argmax(-1)
    spoken = captured.decoded.nonzero()[:, 0]
    assert torch.equal(guessed[spoken - 1], captured.tokens[spoken])
    # Every message ends with a token of the model's own, fed with the next prompt.
    ends = (captured.tokens == network.generation_config.eos_token_id).nonzero()[:, 0]
    spoken_ends = sum(bool(captured.decoded[end]) for end in ends)
    assert spoken_ends == len(watch(spec(), "0", Observer()).attempt.report.turns) - 1


def test_a_capture_reads_back(captured, tmp_path):
    captured.save(tmp_path / "c.safetensors")
    again = Capture.load(tmp_path / "c.safetensors")
    assert torch.equal(again.q, captured.q)
    assert torch.equal(again.tokens, captured.tokens)
    assert again.prompt == captured.prompt
    assert set(again.phases.tolist()) == {0, 1, 2, 3}


def test_chosen_layers_and_heads_are_those_of_the_whole(captured):
    part = capture_session(spec(), "0", [2], [1], torch.float16)
    torch.testing.assert_close(part.q[0], captured.q[2, 2:4].half())
    torch.testing.assert_close(part.k[0], captured.k[2, 1:2].half())


@pytest.mark.parametrize(
    ("layers", "heads", "sample", "message"),
    [
        ([4], [], "0", "layer 4: the model has 4"),
        ([], [2], "0", "KV head 2: the model has 2"),
        ([], [], "9", "sample 9: the task has samples 0 to 2"),
        ([], [], "recall-1k-x", "unknown sample"),
    ],
)
def test_wrong_choices_are_refused(layers, heads, sample, message):
    with pytest.raises(UsageError, match=message):
        capture_session(spec(), sample, layers, heads, torch.float16)


def test_a_trace_follows_the_accounting():
    trace, log, watched = trace_session(spec("snapkv", 256), "1")
    events = watched.attempt.report.stats.events
    assert [event.logical for event in trace.events] == [event.logical for event in events]
    assert [event.live for event in trace.events] == [event.live_before for event in events]
    assert all(event.budget == 256 for event in trace.events)
    assert len(log.tokens) == len(trace.phases)
    for before, after in zip(trace.events, trace.events[1:], strict=False):
        newer = after.positions >= before.logical
        kept = after.positions[~newer].view(*after.positions.shape[:2], -1)
        assert torch.equal(kept, before.kept.sort(-1).values)


def test_watching_changes_nothing():
    plain = watch(spec("agentkv", 256), "0", Observer())
    _, _, traced = trace_session(spec("agentkv", 256), "0")
    assert plain.attempt.outcome.metrics == traced.attempt.outcome.metrics
    assert plain.attempt.outcome.facts == traced.attempt.outcome.facts


def test_rings_are_where_the_method_was_given_them(monkeypatch):
    """At every event and for every phase, against the queries that `score` got."""
    given = {}

    def spy(self, queries, keys, context):
        ages = (context.now - queries.positions[queries.phases == phase] for phase in range(4))
        given[context.now] = tuple(tuple(age.flip(0).tolist()) for age in ages)
        return real(self, queries, keys, context)

    real = AgentKV.score
    monkeypatch.setattr(AgentKV, "score", spy)
    sample, events = ring_session(spec("agentkv", 256), "1")
    assert sample == "recall-1k-1"
    assert len(events) > 1
    assert {event.now: event.ages for event in events} == given


def test_an_audit_finds_the_evidence_where_it_was_stated():
    audited, trace = audit_session(spec("streamingllm", 300), "0")
    assert audited.events == len(trace.events) > 0
    for found in audited.facts:
        assert found.positions
        phases = {int(trace.phases[position]) for position in found.positions}
        expected = {"think": 0, "act": 1, "tool": 2, "others": 3}[found.fact.source]
        assert phases == {expected}
    groups = by_outcome([audited])
    assert sum(values["facts"] for values in groups.values()) == len(audited.facts)
    # A window forgets by age alone: all heads hold a token, or none does.
    assert {found.held for found in audited.facts if len(set(found.positions)) == 1} <= {0.0, 1.0}


@pytest.mark.parametrize("method", ["clear-tools", "evoke", "memart"])
def test_only_methods_that_rank_rows_are_followed(method):
    """What left in spans was in no selection, so everything was still held."""
    with pytest.raises(UsageError, match="ranks no rows"):
        audit_session(spec(method, 800), "0")


def test_a_sampled_run_cannot_be_audited():
    from dataclasses import replace

    with pytest.raises(UsageError, match="greedy"):
        audit_session(replace(spec("snapkv", 256), temperature=1.0), "0")


def test_text_is_found_across_tokens():
    pieces = ["ab", "cd", "", "ef", "gh"]
    assert find_text(pieces, "cd") == (1,)
    assert find_text(pieces, "de") == (1, 2, 3)
    assert find_text(pieces, "bcdefg") == (0, 1, 2, 3, 4)
    assert find_text(pieces, "x") == ()


def test_a_fact_that_was_never_stated_is_not_held():
    never = AuditedFact(Fact("tag#lopi", "act", "one_shot", False), (), [])
    groups = by_outcome([SessionAudit("recall-1k-0", 0.0, 3, [never])])
    assert groups["act", "one_shot", False]["held"] == 0.0
