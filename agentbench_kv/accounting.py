"""KV accounting of a session: one definition, from the engine that counts to the tables.

It imports nothing of kvbench, as it also runs inside the interpreters of serving engines. Token
counts are per (layer, KV head), bytes are totals over layers and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import add
from typing import Any


def _last(before: Any, now: Any) -> Any:  # noqa: ARG001
    return now


def _last_known(before: Any, now: Any) -> Any:
    return before if now is None else now


def _last_read(before: Any, now: Any) -> Any:
    """Keep the session that was read, if the one that followed was refused before it was."""
    return now or before


Merge = Callable[[Any, Any], Any]


def _figure(meaning: str, merge: Merge, default: Any = 0) -> Any:
    """Declare a figure: what it is, and what two accounts of one session come to together."""
    return field(default=default, metadata={"meaning": meaning, "merge": merge})


@dataclass(frozen=True)
class KVEvent:
    """One compression of one session; live counts are per (layer, KV head)."""

    decoded: int  # tokens generated, and ever seen, at the event
    logical: int
    live_before: int
    live_after: int
    rows_moved: int


@dataclass
class KVFigures:
    """What engines count and records keep."""

    # What a method asks the model beside the session is held on top of it.
    peak_live: int = _figure("most tokens held at once", max)
    logical: int = _figure("tokens ever seen", _last_read)
    events: int | list[KVEvent] = _figure("compressions, evictions and restores", add)  # noqa: RUF009
    evicted: int = _figure("tokens evicted", add)
    restored: int = _figure("tokens brought back", add)
    bytes_read: int = _figure("bytes of K and V read while decoding, all layers and heads", add)
    prefill_tokens: int = _figure("prompt tokens in all, prefilled or cached", add)
    longest_prefill: int = _figure("most new tokens in one prefill", max)
    decode_tokens: int = _figure("tokens generated", add)
    rows_moved: int = _figure("cache rows moved by compaction", add)
    recomputed: int = _figure("tokens whose KV was computed a second time", add)
    # A budget given as a share grows with the session.
    budget: int | None = _figure("the budget in tokens at the session's end", _last, None)
    window_bytes_read: int = _figure("of the bytes read, those of layers that see a window", add)
    protected: int = _figure("first tokens that no event may evict", max)
    refused: int = _figure("events for which protected and recent tokens left no room", add)
    refused_recent: int = _figure("last tokens that the last of them would have kept", max)
    refused_budget: int | None = _figure("the budget of the last of them", _last_known, None)
    rewrites: int = _figure("times the history was written anew without what was dropped", add)
    auxiliary_calls: int = _figure("requests that a method made of the model by itself", add)
    auxiliary_tokens: int = _figure("tokens that those read and generated", add)
    auxiliary_s: float = _figure("seconds that those took", add, 0.0)
    peak_bytes: int = _figure("most bytes held at once: K and V, all layers and heads", max)
    peak_alone: int = _figure("most tokens of a session that has such requests, without them", max)
    cached_tokens: int = _figure(
        "prompt tokens that a shared prefix had, so that nobody prefilled them", add
    )
    shared: int = _figure("first tokens whose rows are held once for several sessions", max)
    auxiliary_bytes_read: int = _figure(
        "bytes of K and V that requests of a method's own read while decoding", add
    )


@dataclass
class KVAccount(KVFigures):
    """KV accounting of a session on record, the evidence that a budget was applied."""

    events: int = _figure("compressions, evictions and restores", add)
    mean_decode_kv: float = _figure("mean live tokens over the decode steps", _last, 0.0)


# In the order of a record's JSON, where the mean follows the tokens that it is taken over.
*_FIGURES, _MEAN = fields(KVAccount)
RECORDED = (*_FIGURES[:9], _MEAN, *_FIGURES[9:])
TOTALS = [each.name for each in RECORDED if each.metadata["merge"] is add]


@dataclass
class KVStats(KVFigures):
    """KV accounting of a session while an engine keeps it."""

    live: int = _figure("tokens held now", _last)
    decode_kv_sum: int = _figure("live tokens, summed over the decode steps", add)
    events: list[KVEvent] = field(default_factory=list, metadata={"merge": add})
    # Every time rows were lost: events before it, and tokens then computed again in one pass.
    restarts: list[tuple[int, int]] = field(default_factory=list, metadata={"merge": add})
    # A span-level method's own counts.
    figures: dict[str, int] = field(default_factory=dict, metadata={"merge": _last})

    @property
    def mean_decode_kv(self) -> float:
        """Mean live tokens over the decode steps; 0 before the first."""
        return self.decode_kv_sum / self.decode_tokens if self.decode_tokens else 0.0

    def recorded(self) -> dict[str, Any]:
        """Return the figures of `KVAccount`; events are counted, not listed."""
        known = {each.name: getattr(self, each.name) for each in RECORDED}
        return known | {"events": len(self.events)}

    def as_dict(self) -> dict[str, Any]:
        """Return the accounting as a JSON object."""
        return {"live": self.live, **self.recorded()}

    def followed_by(self, now: KVStats) -> KVStats:
        """Return the accounting of a session that was closed with this and goes on as `now`."""
        restarts = [(len(self.events) + events, tokens) for events, tokens in now.restarts]
        merged = {
            each.name: each.metadata["merge"](getattr(self, each.name), getattr(now, each.name))
            for each in fields(KVStats)
        }
        return KVStats(**merged | {"restarts": self.restarts + restarts})


@dataclass(frozen=True)
class LayerReach:
    """Layers whose rows a method reaches, and those that keep a window of the last rows."""

    full: int
    windowed: int
    window: int  # tokens

    @classmethod
    def read(cls, details: Mapping[str, str]) -> LayerReach | None:
        """Read what `document` wrote into an engine's details; None of a model without windows."""
        try:
            return cls(*(int(details[name]) for name in _REACH))
        except (KeyError, TypeError, ValueError):
            return None

    def document(self) -> dict[str, str]:
        """Return it for a run's record; nothing of a model without windows."""
        values = (self.full, self.windowed, self.window)
        return dict(zip(_REACH, map(str, values), strict=True)) if self.windowed else {}

    def share(self, tokens: int) -> float:
        """Return the share of a session's KV that a method reaches, before it evicts anything.

        All layers have equal rows.
        """
        reached = self.full * tokens
        return reached / (reached + self.windowed * min(tokens, self.window)) if tokens else 0.0

    def sentence(self, tokens: int) -> str:
        return (
            f"the method reaches {self.full} of {self.full + self.windowed} layers, "
            f"{self.share(tokens):.0%} of the KV of a session of {tokens:,} tokens; the others "
            f"keep windows of {self.window}"
        )


_REACH = ("full_layers", "window_layers", "window")
