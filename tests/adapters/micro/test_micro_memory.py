"""`micro/memory`: past sessions, the request that needs them, and what is proof of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentbench_kv.adapters.base import Recalled, Reply, Sample, TrialContext
from agentbench_kv.adapters.micro.episode import Episode
from agentbench_kv.adapters.micro.generate import PROFILES, generate, held_out_seed
from agentbench_kv.adapters.micro.memory import MicroMemory, asked, evidence_of, past_sessions
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.summary import summarize
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve


def episode(index: int) -> Episode:
    return generate(held_out_seed(index), PROFILES["memory"])


@pytest.mark.parametrize("index", range(20))
def test_what_is_needed_was_said_in_the_past_and_nowhere_else(index: int) -> None:
    drawn = episode(index)
    (turn,) = asked(drawn).turns
    said = {n: json.dumps(message) for session in past_sessions(drawn) for n, message in session}
    assert list(said) == [*range(1, len(said) + 1)]
    for call in turn.calls:
        numbers = evidence_of(drawn, call)
        assert numbers
        wanted = [s.handle for s in call.slots if s.kind in ("recurring", "one_shot")]
        outside = [handle for handle in wanted if handle not in drawn.system]
        assert all(any(handle in said[number] for number in numbers) for handle in outside)
        # The request itself says none of it.
        assert not any(handle in turn.text for handle in wanted)


def test_the_shipped_item_is_one_of_many() -> None:
    """Where it stands among the past sessions tells nothing."""
    places = []
    for index in range(40):
        drawn = episode(index)
        (turn,) = asked(drawn).turns
        texts = [session[0][1]["content"] for session in past_sessions(drawn)]
        (place,) = [n for n, text in enumerate(texts) if f'store "{turn.subject}"' in text]
        places.append(place / len(texts))
        assert len(texts) >= 13
    assert min(places) < 0.2
    assert max(places) > 0.7


def played(out: Path, method: str, settings: dict[str, str], limit: int = 4) -> list[TrialRecord]:
    spec = RunSpec("embedded", "micro", method, None, "micro/memory", limit=limit)
    spec = resolve(spec, settings)
    run_one(spec, out, lambda *_: None)
    return list(RunReader(out / spec.id).trials())


def total(trials: list[TrialRecord], name: str, part: int = 0) -> float:
    return sum(trial.sub_scores[name][part] for trial in trials)


def share(trials: list[TrialRecord], name: str) -> float:
    return total(trials, name) / total(trials, name, 1)


def test_a_memory_is_as_good_as_its_blocks(tmp_path: Path) -> None:
    """All blocks: all of the evidence, and answers as with everything read; none: nothing right."""
    full = played(tmp_path, "full", {})
    nothing = played(tmp_path, "full", {"context": "none"})
    every = played(tmp_path, "memart", {"topk": "10000"})
    few = played(tmp_path, "memart", {"topk": "48"})
    chance = played(tmp_path, "memart", {"topk": "48", "pick": "random"})
    assert total(every, "evidence_recall") == pytest.approx(total(every, "evidence_recall", 1))
    assert sum(trial.score or 0.0 for trial in full) >= 3
    assert sum(trial.score or 0.0 for trial in every) >= 3
    assert total(nothing, "tool") == 0
    rows = {trial.kv.restored for trials in (few, chance) for trial in trials}
    assert len(rows) <= 3  # as many rows, but for answers that end the session early
    assert total(few, "evidence_recall") > total(chance, "evidence_recall")
    # One of the layers looks for what is needed; of all messages it brings back no more.
    assert share(few, "best_layer_evidence") > 1.5 * share(few, "best_layer_message")
    assert share(every, "best_layer_message") == pytest.approx(1.0)
    # The control's layers bring back the same, so its best layer is any.
    assert total(chance, "best_layer_evidence") == pytest.approx(total(chance, "evidence_recall"))
    assert total(few, "tool") + total(few, "think") > total(chance, "tool") + total(chance, "think")


def test_the_last_blocks_are_the_last(tmp_path: Path) -> None:
    (trial,) = played(tmp_path, "memart", {"topk": "8", "pick": "last"}, limit=1)
    drawn = episode(0)
    last = past_sessions(drawn)[-1]
    assert trial.sub_scores["evidence_recall"][0] <= len(last)
    assert summarize(RunReader(next(tmp_path.glob("*/run.json")).parent)).validity.state.value == (
        "valid"
    )


@pytest.mark.parametrize("settings", [{"context": "sessions"}, {"last": 3}])
def test_half_a_setting_is_one_line(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="go together"):
        MicroMemory.create(settings)


def test_a_failed_trial_counts_what_it_was_asked() -> None:
    sample = Sample("memory-3")
    parts = MicroMemory().nothing_right(sample)
    assert parts["messages_right"] == 0
    assert parts["tool_asked"] == 2
    assert parts["tool_right"] == 0


class Recalling:
    """Ships as it should, `together` or call by call, with all evidence there while it does."""

    def __init__(self, drawn: Episode, together: bool) -> None:
        self.turn = asked(drawn).turns[0]
        calls = self.turn.calls
        self.evidence = {n: 1.0 for call in calls for n in evidence_of(drawn, call)}
        self.parts = [list(calls)] if together else [[call] for call in calls]

    def chat(self, *_: object, **__: object) -> Reply:
        part = self.parts.pop(0) if self.parts else []
        calls = [
            {"id": call.name, "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for call in part
        ]  # fmt: skip
        text = "" if part else self.turn.reply.text
        there = self.evidence if part else {}
        recalled = Recalled((), there, {n: [share] for n, share in there.items()})
        message = {"role": "assistant", "content": text, "tool_calls": calls}
        reason = "tool_calls" if part else "stop"
        return Reply(text, "", calls, reason, False, text, message, recalled)


@pytest.mark.parametrize("together", [False, True])
def test_evidence_is_that_before_the_message_with_the_call(together: bool) -> None:
    client = Recalling(episode(0), together)
    sample = MicroMemory.create({}).samples(1, 0)[0]
    context = TrialContext(0, 7, client, None, "s", max_tokens=64)  # type: ignore[arg-type]
    outcome = MicroMemory.create({}).run_trial(sample, context)
    assert outcome.score == 1.0
    for name in ("evidence_recall", "best_layer_evidence"):
        assert outcome.metrics[f"{name}_right"] == outcome.metrics[f"{name}_asked"] > 0


def test_a_failed_trial_is_asked_for_its_evidence(tmp_path: Path) -> None:
    """Whose past fits, and its question does not: it has no answer, and all that it was told."""
    one = RunSpec("embedded", "micro", "memart", None, "micro/memory", limit=1, context_limit=500)
    spec = resolve(one, {"topk": "24"})
    run_one(spec, tmp_path, lambda *_: None)
    (record,) = RunReader(tmp_path / spec.id).trials()
    assert record.status is TrialStatus.CONTEXT_LIMIT
    assert record.metrics["ingest_calls"] > 10
    drawn = episode(int(record.sample_id.rpartition("-")[2]))
    needed = sum(len(evidence_of(drawn, call)) for call in asked(drawn).calls)
    said = record.metrics["evidence_recall_right"], record.metrics["evidence_recall_asked"]
    assert said == (0, needed)
    # Without a memory nobody asks for it.
    spec = resolve(replace(one, method="full", context_limit=500), {})
    run_one(spec, tmp_path, lambda *_: None)
    (record,) = RunReader(tmp_path / spec.id).trials()
    assert record.status is TrialStatus.CONTEXT_LIMIT
    assert "evidence_recall_asked" not in record.metrics


def test_what_answers_took_is_on_record(tmp_path: Path) -> None:
    (told,) = played(tmp_path, "memart", {"topk": "10000"}, limit=1)
    (full,) = played(tmp_path, "full", {}, limit=1)
    for trial in (told, full):
        read, answers = trial.means["answer_prefill_tokens"]
        assert read == trial.kv.prefill_tokens
        assert answers == trial.usage.requests
        assert "answer_ttft_ms" in trial.means
    assert told.means["answer_prefill_tokens"] < full.means["answer_prefill_tokens"]
