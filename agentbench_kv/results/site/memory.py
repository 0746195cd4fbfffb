"""What the entries of a board hold: bytes, tokens, and their share of a full cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentbench_kv.results.ranking import Board, Entry
from agentbench_kv.results.runs import LOGICAL


@dataclass(frozen=True)
class Held:
    """What an entry's sessions held at most, as means over the board's samples."""

    bytes: float | None  # over all layers and heads; None unless every session recorded them
    tokens: float | None  # per layer and KV head
    # The achieved KV: of the bytes that all tokens of the same sessions take in a full cache, or of
    # the tokens where bytes are not known and cannot matter.
    share: float | None
    of_tokens: bool = False


def held(board: Board, entry: Entry) -> Held:
    found = {name: _mean(_own(entry, name)) for name in ("peak_bytes", "peak_live")}
    share, weight = _kept_tokens(entry), _weight(board, entry)
    if weight is not None and share is not None:
        return Held(found["peak_bytes"], found["peak_live"], share * weight)
    # Rows at a precision of their own say nothing of a share but by their bytes.
    share = None if entry.group.first.spec.get("kv_dtype") else share
    return Held(found["peak_bytes"], found["peak_live"], share, of_tokens=True)


def _kept_tokens(entry: Entry) -> float | None:
    """Return the mean of peak live / logical tokens, of the same sessions as the bytes."""
    live, logical = (_own(entry, name) for name in ("peak_live", LOGICAL))
    return _mean(
        {
            sample: [part / whole for part, whole in zip(live[sample], seen, strict=True)]
            for sample, seen in logical.items()
        }
    )


def _weight(board: Board, entry: Entry) -> float | None:
    """Return the bytes of a live token over those of one in a full cache; None if not known."""
    mine, full = (_per_token(each) if each else None for each in (entry, board.full))
    return mine / full if mine and full else None


def _per_token(entry: Entry) -> float | None:
    size, tokens = (_own(entry, name) for name in ("peak_bytes", "peak_live"))
    return _total(size) / _total(tokens) if size else None


def _own(entry: Entry, name: str) -> dict[str, list[int]]:
    sizes = entry.group.sizes(name)
    return {sample: own for sample, own in sizes.items() if sample in entry.scores.parts}


def _mean(sizes: Mapping[str, Sequence[float]]) -> float | None:
    return fmean(map(fmean, sizes.values())) if sizes else None


def _total(sizes: Mapping[str, Iterable[int]]) -> int:
    return sum(map(sum, sizes.values()))
