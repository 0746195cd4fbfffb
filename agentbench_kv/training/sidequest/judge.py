"""How well a network names expired cursors on sessions that it was not trained on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs

from agentbench_kv.gateway.cursors import named_cursors
from agentbench_kv.training.sidequest.layout import Layout, lay_out
from agentbench_kv.training.sidequest.rows import SideQuestFork, SideQuestRow

_LONGEST = 512  # tokens of an answer


@dataclass
class CursorVerdict:
    """Answers to held-out questions, counted."""

    questions: int = 0
    exact: int = 0  # all that can be told to be expired and no other
    unreadable: int = 0
    expired: int = 0  # cursors that nothing used from then on
    told: int = 0  # those of them that can be told
    told_named: int = 0
    named: int = 0
    right: int = 0  # named and expired

    @property
    def recall(self) -> float | None:
        return self.right / self.expired if self.expired else None

    @property
    def precision(self) -> float | None:
        return self.right / self.named if self.named else None

    @property
    def told_recall(self) -> float | None:
        return self.told_named / self.told if self.told else None

    def count(self, fork: SideQuestFork, named: Sequence[int] | None) -> None:
        found, told = set(named or ()), set(fork.told)
        self.questions += 1
        self.unreadable += named is None
        self.exact += named is not None and found == told
        self.expired += len(fork.expired)
        self.told += len(told)
        self.told_named += len(found & told)
        self.named += len(found)
        self.right += len(found.intersection(fork.expired))


def judge(
    network: Any,
    rows: Iterable[SideQuestRow],
    decode: Callable[[Sequence[int]], str],
    ends: Iterable[int],
) -> CursorVerdict:
    """Ask a network the questions of rows and compare what it names."""
    asked, found = list(rows), CursorVerdict()
    forks = (fork for row in asked for fork in row.forks)
    for fork, named in zip(forks, answers(network, asked, decode, ends), strict=True):
        found.count(fork, named)
    return found


def answers(
    network: Any,
    rows: Iterable[SideQuestRow],
    decode: Callable[[Sequence[int]], str],
    ends: Iterable[int],
) -> Iterator[list[int] | None]:
    """Yield the cursors that a network names at every question, greedily; None if unread."""
    stops = frozenset(ends)
    for row in rows:
        for fork in row.forks:
            asked = structs.replace(fork, ids=fork.ids[: fork.answer])
            said = _greedy(network, lay_out(row, [asked], fork.at), stops)
            yield named_cursors(decode(said))


@torch.no_grad()
def _greedy(network: Any, layout: Layout, stops: frozenset[int]) -> list[int]:
    from transformers import DynamicCache

    answer: list[int] = []
    kept = {_cache_name(network): DynamicCache(config=network.config)}
    known = 0
    while len(answer) < _LONGEST:
        given = layout.inputs(network, known)
        out = network(**given, **kept, use_cache=True, logits_to_keep=1)
        known = len(layout.ids)
        token = int(out.logits[0, -1].argmax())
        if token in stops:
            break
        answer.append(token)
        layout = layout.then(token)
    return answer


def _cache_name(network: Any) -> str:
    """Return what the network calls its cache: `past_key_values` before transformers 5.24."""
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    known = inspect.signature(type(base).forward).parameters
    return "cache" if "cache" in known else "past_key_values"
