"""How well a network names expired cursors on sessions that it was not trained on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentbench_kv.gateway.cursors import named_cursors
from agentbench_kv.training.sidequest.rows import SideQuestRow
from agentbench_kv.training.sidequest.tune import inputs

_LONGEST = 512  # tokens of an answer


@dataclass
class CursorVerdict:
    """Answers to held-out questions, counted."""

    questions: int = 0
    exact: int = 0  # all expired cursors and no other
    unreadable: int = 0
    expired: int = 0  # cursors that were to be named
    named: int = 0
    right: int = 0  # named and expired

    @property
    def recall(self) -> float | None:
        return self.right / self.expired if self.expired else None

    @property
    def precision(self) -> float | None:
        return self.right / self.named if self.named else None

    def count(self, expired: Iterable[int], named: Sequence[int] | None) -> None:
        wanted, found = set(expired), set(named or ())
        self.questions += 1
        self.unreadable += named is None
        self.exact += named is not None and found == wanted
        self.expired += len(wanted)
        self.named += len(found)
        self.right += len(found & wanted)


def judge(
    network: Any,
    rows: Iterable[SideQuestRow],
    decode: Callable[[Sequence[int]], str],
    ends: Iterable[int],
) -> CursorVerdict:
    """Ask a network the questions of auxiliary rows and compare what it names."""
    asked, found = list(rows), CursorVerdict()
    for row, named in zip(asked, answers(network, asked, decode, ends), strict=True):
        found.count(row.expired, named)
    return found


def answers(
    network: Any,
    rows: Iterable[SideQuestRow],
    decode: Callable[[Sequence[int]], str],
    ends: Iterable[int],
) -> Iterator[list[int] | None]:
    """Yield the cursors that a network names for every auxiliary row, greedily; None if unread."""
    stops = frozenset(ends)
    for row in rows:
        begin = row.learnt.index(True)
        said = _greedy(network, row.ids[:begin], row.positions[:begin], stops)
        yield named_cursors(decode(said))


@torch.no_grad()
def _greedy(
    network: Any, ids: Sequence[int], positions: Sequence[int], stops: frozenset[int]
) -> list[int]:
    from transformers import DynamicCache

    answer: list[int] = []
    kept = {_cache_name(network): DynamicCache(config=network.config)}
    known, fed, at = 0, list(ids), list(positions)
    while len(answer) < _LONGEST:
        given = inputs(network, fed, at, known)
        out = network(**given, **kept, use_cache=True, logits_to_keep=1)
        known += len(fed)
        token = int(out.logits[0, -1].argmax())
        if token in stops:
            break
        answer.append(token)
        fed, at = [token], [at[-1] + 1]
    return answer


def _cache_name(network: Any) -> str:
    """Return what the network calls its cache: `past_key_values` before transformers 5.24."""
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    known = inspect.signature(type(base).forward).parameters
    return "cache" if "cache" in known else "past_key_values"
