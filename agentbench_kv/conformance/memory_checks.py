"""Methods with a memory: with all of it, a session equals one that sees every past session.

Past sessions do not see each other, and RoPE goes by distances. So the reference is the model over
all of them and the question in a row, under a mask that hides each from the others.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import TraceRecorder, in_memory_engine
from agentbench_kv.conformance.reference import TOLERANCE
from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.core.memory import memory_method
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.methods.base import Method, Phase

PAST, QUESTION, ANSWER = (61, 30), 9, 12
"""Tokens of past sessions, which fill no whole number of blocks, of a prompt, and of an answer."""


class _Others:
    def label(self, token: int) -> Phase:  # noqa: ARG002
        return Phase.OTHERS


def check_memory(method: Method, model: Any) -> list[CheckResult]:
    """Ask a question behind past sessions that a bank holds, on a tiny model of one family."""
    lots, vocabulary = random.Random(7), int(model.config.vocab_size)

    def drawn(count: int) -> list[int]:
        return [lots.randrange(1, vocabulary) for _ in range(count)]

    past, question, recorder = [drawn(count) for count in PAST], drawn(QUESTION), TraceRecorder()
    engine = in_memory_engine(model, method, recorder)
    try:
        answer, stats, again = _asked(engine, past, question)
    finally:
        engine.shutdown()
    passes = memory_method(method).passes
    found = [
        CheckResult(
            "prompts are read, and nothing else",
            (stats.prefill_tokens, stats.recomputed)
            == (passes * QUESTION, (passes - 1) * QUESTION),
            f"{stats.prefill_tokens} tokens, {stats.recomputed} of them again",
        ),
        CheckResult(
            "the account holds what came back",
            stats.live == stats.restored + stats.logical - 1,
            f"live {stats.live}, restored {stats.restored}, logical {stats.logical}",
        ),
        CheckResult("the same again", answer == again),
    ]
    if stats.restored < sum(PAST):
        return found
    whole = _all_seen(model, past, question + answer)
    differences = [
        float((logits - whole[fed - 1]).abs().max())
        for fed, logits in recorder.logits["asked"].items()
    ]
    detail = f"largest logit difference {max(differences):.2e} over {len(differences)} positions"
    same = max(differences) <= TOLERANCE
    return [*found, CheckResult("with all blocks it sees all of the past", same, detail)]


def _all_seen(model: Any, past: list[list[int]], session: list[int]) -> Tensor:
    """Return logits [tokens, vocabulary] of a session that sees every past one."""
    tokens = [*chain.from_iterable(past), *session]
    hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    end = 0
    for each in past:
        end += len(each)
        hidden[end : sum(map(len, past)), :end] = True
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]
    return logits[-len(session) :]


def _asked(
    engine: EmbeddedEngine, past: list[list[int]], question: list[int]
) -> tuple[list[int], KVStats, list[int]]:
    """Return an answer with its session's account, and the answer of another such session."""
    for tokens in past:
        engine.open("past", _Others())
        _feed(engine, "past", tokens, 1)
        engine.memorise("past", "bank", len(tokens))
        engine.close("past")
    answers = []
    for name in ("asked", "again"):
        engine.open(name, _Others())
        engine.attach(name, "bank")
        answers.append(_feed(engine, name, question, ANSWER))
    return answers[0], engine.close("asked"), answers[1]


def _feed(engine: EmbeddedEngine, session: str, tokens: list[int], answer: int) -> list[int]:
    engine.extend(session, tokens, [Phase.OTHERS] * len(tokens))
    return list(engine.generate(session, Sampling(max_tokens=answer)))
