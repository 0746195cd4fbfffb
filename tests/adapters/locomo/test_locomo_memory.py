"""LoCoMo's past sessions in a memory: what is read, what is brought back, what it is refused on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.locomo.scoring import find_spec
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.phases.tokens import load_tokenizer
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.summary import summarize
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = [
    pytest.mark.skipif(
        find_spec("nltk") is None, reason="nltk absent: pip install 'agentbench-kv[locomo]'"
    ),
    pytest.mark.usefixtures("folder"),
]
TASK = "probe/locomo"


def played(out: Path, method: str, settings: dict[str, str]) -> Any:
    settings = {"check": "off", **settings}
    spec = RunSpec("embedded", "micro", method, None, TASK, limit=1, max_tokens=12)
    spec = resolve(spec, settings)
    run_one(spec, out, lambda *_: None)
    (trial,) = RunReader(out / spec.id).trials()
    return trial


def test_questions_are_read_and_nothing_else(tmp_path: Path) -> None:
    """Past sessions are read once; a question's prefill is its own prompt."""
    whole = played(tmp_path, "memart", {"topk": "1000", "block": "8"})
    part = played(tmp_path, "memart", {"topk": "3", "block": "8"})
    full = played(tmp_path, "full", {})
    for trial, rows in ((whole, None), (part, 24)):
        assert trial.status.value == "scored"
        assert trial.metrics["ingest_calls"] == 3
        past = trial.metrics["ingest_tokens"]
        # All questions are on the ledger, though each has a session of its own.
        calls, prefilled = trial.metrics["answer_calls"], "answer_prefill_tokens_total"
        assert calls == trial.metrics["answer_prefill_tokens_count"] == trial.metrics["answered"]
        assert trial.metrics["answer_tokens"] >= trial.metrics[prefilled] + calls
        assert trial.metrics["answer_s"] > 0
        assert trial.kv.restored == (past if rows is None else rows)
        assert trial.kv.prefill_tokens < full.kv.prefill_tokens
        assert trial.kv.peak_live == trial.kv.restored + trial.kv.logical - 1
    # All of it came back, in every layer; a part of it is a part of the evidence.
    asked = whole.metrics["evidence_recall_asked"]
    assert whole.metrics["evidence_recall_right"] == pytest.approx(asked)
    assert whole.metrics["recalled_total"] == pytest.approx(6 * whole.metrics["recalled_count"])
    assert 0 <= part.metrics["evidence_recall_right"] < asked
    for name in ("evidence", "message"):
        right, told = (f"best_layer_{name}_{part}" for part in ("right", "asked"))
        assert whole.metrics[right] == pytest.approx(whole.metrics[told])
        assert 0 < part.metrics[right] < part.metrics[told] == whole.metrics[told]
    assert part.metrics["best_layer_evidence_right"] >= part.metrics["evidence_recall_right"]
    assert part.metrics["recalled_total"] < whole.metrics["recalled_total"]
    # Every question's own prompt is short, whatever came back.
    question = whole.metrics["answer_prefill_tokens_total"] / whole.metrics["questions"]
    assert question < full.kv.prefill_tokens
    assert whole.kv.prefill_tokens == part.kv.prefill_tokens
    # Other prompts than the whole conversation's are no drift.
    assert whole.prompt_sha is None


def test_a_question_prefills_its_own_prompt_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    chat = InProcessClient.chat

    def spy(self: InProcessClient, messages: Any, *rest: Any, **more: Any) -> Any:
        asked.append(messages)
        return chat(self, messages, *rest, **more)

    monkeypatch.setattr(InProcessClient, "chat", spy)
    trial = played(tmp_path, "memart", {"topk": "3", "block": "8"})
    assert len(asked) == trial.metrics["questions"] == 5
    assert all([each["role"] for each in messages] == ["system", "user"] for messages in asked)
    tokenizer = load_tokenizer(model_path("micro"))
    shapes = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompts = [len(tokenizer.apply_chat_template(each, **shapes)) for each in asked]
    assert trial.metrics["answer_prefill_tokens_total"] == sum(prompts)


def test_later_questions_find_earlier_ones_if_turns_are_appended(tmp_path: Path) -> None:
    plain = played(tmp_path, "memart", {"topk": "1000", "block": "8"})
    turns = played(tmp_path, "memart", {"topk": "1000", "block": "8", "append": "turns"})
    again = played(tmp_path / "again", "memart", {"topk": "1000", "block": "8", "append": "turns"})
    assert "append_tokens" not in plain.metrics
    # The last question finds all others, with their answers.
    before = turns.kv.restored - plain.kv.restored
    assert 0 < before < turns.metrics["append_tokens"]
    assert turns.metrics["append_s"] > 0
    assert turns.metrics["ingest_tokens"] == plain.metrics["ingest_tokens"]
    assert turns.kv.prefill_tokens == plain.kv.prefill_tokens
    timeless = (
        {
            name: value
            for name, value in each.metrics.items()
            if not name.endswith(("_s", "_ms_total"))
        }
        for each in (turns, again)
    )
    assert next(timeless) == next(timeless)


def test_a_memory_that_was_told_nothing_is_none(tmp_path: Path) -> None:
    """Nothing came back, so nothing of the method was measured: its run is not valid."""
    played(tmp_path, "memart", {"topk": "3", "context": "none"})
    (run,) = (each.parent for each in tmp_path.glob("*/run.json"))
    found = summarize(RunReader(run)).validity
    assert found.state.value == "budget_not_applied"
    assert "its memory brought nothing back" in str(found)
