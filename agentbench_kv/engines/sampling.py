"""Picking the next token, and handing tokens from the thread that makes them to their reader."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from agentbench_kv.engines.base import (
    Constraint,
    FinishReason,
    Generation,
    Sampling,
    TokenLogprob,
)


class Sampler:
    """Draws the tokens of one generation from its own seeded stream."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._stream = torch.Generator().manual_seed(sampling.seed)
        self.logprobs: list[TokenLogprob] = []

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is the token, and nobody has to be told more."""
        plain = self._sampling.constraint is None and self._sampling.logprobs is None
        return plain and self._sampling.temperature == 0.0

    def draw(self, logits: Tensor) -> int:
        """Draw one token id from logits [vocab]; ties in greedy mode go to the lower id."""
        constraint, noted = self._sampling.constraint, self._sampling.logprobs
        token = self._pick(logits if constraint is None else _only_allowed(logits, constraint))
        if constraint is not None:
            constraint.accept(token)
        if noted is not None:
            self.logprobs.append(_note(logits, token, noted))
        return token

    def _pick(self, logits: Tensor) -> int:
        if self._sampling.temperature == 0.0:
            return int(logits.argmax())
        # Below 0, or a temperature near 0 would make two infinities of them.
        scores = logits.double().cpu()
        scores -= scores.max()
        probs = torch.softmax(scores / self._sampling.temperature, -1)
        ranked, ids = probs.sort(descending=True, stable=True)
        ranked = ranked * self._allowed(ranked)
        return int(ids[torch.multinomial(ranked, 1, generator=self._stream)])

    def _allowed(self, ranked: Tensor) -> Tensor:
        """Mask [vocab] of what top-k and top-p leave, over descending probabilities."""
        before = ranked.cumsum(-1) - ranked
        allowed = before < self._sampling.top_p
        if self._sampling.top_k:
            allowed[self._sampling.top_k :] = False
        allowed[0] = True
        return allowed


def _only_allowed(logits: Tensor, constraint: Constraint) -> Tensor:
    """Return logits [vocab] that are minus infinity where the constraint forbids."""
    known = torch.from_numpy(constraint.allowed())[: len(logits)]
    allowed = torch.zeros(len(logits), dtype=torch.bool)
    allowed[: len(known)] = known
    return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


def _note(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Return a drawn token's log probability, and the `count` likeliest ids with theirs."""
    logprobs = torch.log_softmax(logits.double().cpu(), -1)
    values, ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


_PATIENCE_S = 30.0  # between two looks whether a reader that fell behind has cancelled


class StreamedGeneration(Generation):
    """Tokens in a queue, at most `ahead` of the reader if not 0, with the times they came at."""

    def __init__(self, sampling: Sampling, *, ahead: int = 0) -> None:
        self.sampling = sampling
        self.produced = 0
        self.cancelled = False
        self._started = time.perf_counter()
        self._tokens: queue.Queue[int | BaseException | None] = queue.Queue(ahead)

    def __iter__(self) -> Iterator[int]:
        """Yield tokens as they come; re-raise what ended the generation early."""
        while (item := self._tokens.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled = True

    def push(self, token: int) -> None:
        now = time.perf_counter() - self._started
        if self.produced == 0:
            self.first_token_s = now
        self.last_token_s = now
        self.produced += 1
        self._hand_over(token)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._hand_over(None)

    def fail(self, error: BaseException) -> None:
        self._hand_over(error)

    def _hand_over(self, item: int | BaseException | None) -> None:
        """Queue a token, the end (None) or an error; who cancelled may never read it."""
        handed = False
        while not handed:
            with contextlib.suppress(queue.Full):
                self._tokens.put(item, timeout=_PATIENCE_S)
                handed = True
            handed = handed or self.cancelled
