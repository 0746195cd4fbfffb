"""How far a compressed cache's predictions are from the full cache's, token by token.

Every figure is a sum over tokens and their number, so that sessions can be weighed as any sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.results.fidelity import MEANS, diverges

_OF_TOKENS = (*MEANS, "top1", "right")
SURE = 0.1  # how far the full cache's best is ahead of the second where a change is a flip
DISTANCES = (1, 8, 32, 128)  # tokens since the last event, upper ends; beyond: `later`
_BLOCK = 64  # tokens whose distributions exist at the same time


@dataclass(frozen=True)
class TokenFigures:
    """Of neighbouring tokens, [tokens] each."""

    kl: Tensor  # Σ p log(p/q), nats
    dnll: Tensor  # -log q(x) + log p(x) of the token x that comes
    top1: Tensor  # bool: both have the same best
    flips: Tensor  # bool: another best, though p's is well ahead
    right: Tensor  # bool: the token is q's best
    right_full: Tensor  # bool: it is p's


def compare(full: Tensor, other: Tensor | None, tokens: Tensor) -> TokenFigures:
    """Compare logits [n, vocab] with the full cache's, for the n tokens that come.

    No logits stand for the same ones.
    """
    blocks = [slice(at, at + _BLOCK) for at in range(0, len(tokens), _BLOCK)]
    parts = [
        _compare(full[part], None if other is None else other[part], tokens[part])
        for part in blocks
    ]
    names = TokenFigures.__dataclass_fields__
    return TokenFigures(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _compare(full: Tensor, other: Tensor | None, tokens: Tensor) -> TokenFigures:
    _refuse_no_numbers(full)
    best = full.argmax(-1)
    right_full = best == tokens
    if other is None:
        zeros, never = torch.zeros(len(tokens)), torch.zeros(len(tokens), dtype=torch.bool)
        return TokenFigures(zeros, zeros, ~never, never, right_full, right_full)
    _refuse_no_numbers(other)
    p, q = full.float().log_softmax(-1), other.float().log_softmax(-1)
    chances = p.exp()
    two = chances.topk(2, -1).values
    own = other.argmax(-1)
    same = own == best
    nats = torch.where(chances > 0, chances * (p - q), 0.0)  # what both rule out is no distance
    kl = nats.sum(-1).clamp(min=0)  # by rounding a sum may be below
    chosen = tokens[:, None]
    dnll = (p.gather(-1, chosen) - q.gather(-1, chosen))[:, 0]
    return TokenFigures(
        kl, dnll, same, ~same & (two[:, 0] - two[:, 1] > SURE), own == tokens, right_full
    )


def _refuse_no_numbers(logits: Tensor) -> None:
    """Refuse NaN and +inf: their best tokens would be the same, and no mean would have them."""
    if not bool((logits < torch.inf).all()):
        raise UsageError(
            "the model's logits are no numbers, as where its dtype overflows; use --dtype float32 "
            "or bfloat16"
        )


@dataclass
class FidelityCounts:
    """Sums over a session's tokens: of all, and by phase, kind, turn and distance."""

    sums: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(_zeros))
    _call: list[tuple[bool, bool]] = field(default_factory=list)  # the call that is being read

    def add(
        self, figures: TokenFigures, groups: Sequence[Sequence[str]], in_call: Sequence[bool]
    ) -> None:
        """Add neighbouring tokens; `groups` are the names of every token's parts."""
        columns = [getattr(figures, name).tolist() for name in _OF_TOKENS]
        for token, values in enumerate(zip(*columns, strict=True)):
            for group in ("", *groups[token]):
                for name, value in zip(_OF_TOKENS, values, strict=True):
                    pair = self.sums[f"{name}{group}"]
                    pair[0] += float(value)
                    pair[1] += 1
        self.add_calls(figures.right.tolist(), figures.right_full.tolist(), in_call)

    def add_calls(
        self, right: Sequence[bool], right_full: Sequence[bool], in_call: Sequence[bool]
    ) -> None:
        """Add neighbouring tokens to the calls they are in: whether each is the caches' best."""
        for own, full, inside in zip(right, right_full, in_call, strict=True):
            if inside:
                self._call.append((own, full))
            else:
                self.end_call()

    def end_call(self) -> None:
        """Count the call that has been read, if there is one."""
        if not self._call:
            return
        for name, which in (("calls_exact", 0), ("calls_exact_full", 1)):
            self.sums[name][0] += all(token[which] for token in self._call)
            self.sums[name][1] += 1
        self._call = []

    def metrics(self) -> dict[str, float]:
        """Return the sums as a trial's metrics: means as `x_total`, `x_count`, shares as pairs."""
        found: dict[str, float] = {}
        for name, (total, count) in sorted(self.sums.items()):
            mean = diverges(name)
            found[f"{name}_total" if mean else f"{name}_right"] = total
            found[f"{name}_count" if mean else f"{name}_asked"] = count
        return found


@dataclass
class TokenLog:
    """Every answered token's figures in their order, for those who want more than sums."""

    columns: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def add(self, figures: TokenFigures, labels: Mapping[str, Sequence[Any]]) -> None:
        """Add neighbouring tokens; `labels` are further columns."""
        for name in ("kl", "dnll", "top1", "right"):
            values = getattr(figures, name).tolist()
            exact = isinstance(values[0], float) if values else False
            self.columns[name] += [float(f"{v:.6g}") for v in values] if exact else values
        for name, column in labels.items():
            self.columns[name] += column


def _zeros() -> list[float]:
    return [0.0, 0.0]


def distance_group(since: int | None) -> str:
    """Name the stretch behind an event that a token is in; None: no event so far."""
    if since is None:
        return "_before"
    return next((f"_to{end}" for end in DISTANCES if since <= end), "_later")
