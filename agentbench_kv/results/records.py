"""The two records of a run: one per trial, one per turn (`samples.jsonl`, `turns.jsonl`).

Token counts are per (layer, KV head); bytes are totals over layers and heads. A record is checked
by its annotations alone, whether it is decoded from a file or made here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, StructMeta, field

from agentbench_kv import accounting

T = TypeVar("T")
REFUSED = (msgspec.MsgspecError, ValueError, RecursionError)  # raised for bytes that are no record
# Columns of a table hold 64 bits; what does not fit is refused everywhere alike.
_LOWEST, _MOST = -(2**63), 2**63 - 1
_ROUNDED = 1 + 1e-9
_LARGEST = 2.0**53  # beyond it, adding to a sum of answers changes nothing
Whole = Annotated[int, Meta(ge=_LOWEST, le=_MOST)]
Count = Annotated[int, Meta(ge=0, le=_MOST)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Metric = Whole | float | str | None


def number_of(metrics: Mapping[str, Metric], name: str) -> float:
    """Return a metric that is a number; 0 if there is none of that name."""
    value = metrics.get(name)
    return value if isinstance(value, int | float) else 0.0


class TrialStatus(StrEnum):
    """How a trial ended; only `scored` carries a score, the two `LOST` are tried again."""

    SCORED = "scored"
    UNPARSABLE = "unparsable"
    CONTEXT_LIMIT = "context_limit"
    TURN_LIMIT = "turn_limit"
    TIMEOUT = "timeout"
    USER_ERROR = "user_error"
    ENGINE_ERROR = "engine_error"
    INFRA_ERROR = "infra_error"


# Neither the agent's doing nor the simulated user's: the trial is still to be played.
LOST = frozenset({TrialStatus.ENGINE_ERROR, TrialStatus.INFRA_ERROR})


def checked(data: Any, kind: type[T]) -> T:
    """Return plain data as records; raise ValueError if it is none."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(explained(error)) from None


def explained(error: Exception) -> str:
    """Return msgspec's message with the field before what is wrong with it."""
    message, _, place = str(error).partition(" - at `$.")
    return f"{place.rstrip('`')}: {message}" if place else message


class _Checked(StructMeta):
    """Makes `Record(...)` check its values; decoding, which msgspec checks itself, stays fast."""

    def __call__(cls: type[T], **values: Any) -> T:  # noqa: N805  cls: of a metaclass
        return checked({name: _plain(value) for name, value in values.items()}, cls)


def _plain(value: Any) -> Any:
    """Return numpy's numbers and booleans as Python's, and text and metrics as JSON has them."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(name): _metric(_plain(each)) for name, each in value.items()}
    return value


def _metric(value: Any) -> Any:
    """Replace the numbers that JSON cannot carry, and those beyond 64 bits."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not _LOWEST <= value <= _MOST:
        return float(value) if abs(value) < sys.float_info.max else None
    return value


class _Record(Struct, metaclass=_Checked, frozen=True, forbid_unknown_fields=True, gc=False):
    """No record can be part of a reference cycle, so the collector need not look at it."""


_CHECKS = {"int": Count, "float": Amount, "int | None": Count | None}
KVAccount = accounting.KVAccount
if not TYPE_CHECKING:  # the same fields as a checked record
    KVAccount = _Checked(
        "KVAccount",
        (_Record,),
        {each.name: each.default for each in accounting.RECORDED}
        | {"__annotations__": {each.name: _CHECKS[each.type] for each in accounting.RECORDED}}
        | {"__doc__": accounting.KVAccount.__doc__},
        frozen=True,
        kw_only=True,
    )


class Timing(_Record, frozen=True, kw_only=True):
    """Serving figures of one trial: milliseconds per first and later token, seconds in all."""

    ttft_ms: Amount | None = None
    tpot_ms: Amount | None = None
    e2e_s: Amount | None = None


class Usage(_Record, frozen=True, kw_only=True):
    """Tokens and requests as an OpenAI-compatible client would be billed."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    requests: Count = 0


_NO_TIMING = Timing()


class _Keyed(_Record, frozen=True, kw_only=True):  # a record that belongs to a trial
    sample_id: Annotated[str, Meta(min_length=1)]
    trial: Count

    @property
    def key(self) -> tuple[str, int]:
        return self.sample_id, self.trial


class TrialRecord(_Keyed, frozen=True, kw_only=True):
    """One attempt at one sample; one line of `samples.jsonl`, where the last one of a key counts.

    A ValueError if a value is none of its field, a failed trial carries a score or a performance
    figure, or a scored one has no score.
    """

    seed: Whole
    status: TrialStatus
    score: Annotated[float, Meta(ge=0, le=1)] | None = None  # the checker's; None unless `scored`
    # Anything else the checker says. `x_right` and `x_asked` (ints) make the sub-score `x`,
    # `x_total` and `x_count` a mean that has no bounds.
    metrics: dict[str, Metric] = field(default_factory=dict)
    kv: KVAccount = field(default_factory=KVAccount)
    timing: Timing = field(default_factory=Timing)
    usage: Usage = field(default_factory=Usage)
    session_resets: Count = 0  # times the client broke the token log: the cache had to start over
    prompt_sha: str | None = None  # of the first rendered prompt; None if it never got that far
    transcript: str | None = None  # path inside the run directory
    error: str | None = None
    attempts: Annotated[int, Meta(ge=1, le=_MOST)] = 1  # infrastructure failures included
    cluster: str | None = None  # of dependent samples (the conversation of a LoCoMo question)

    def __post_init__(self) -> None:
        if self.status is TrialStatus.SCORED:
            if self.score is None:
                raise ValueError("a scored trial must carry a score")
        elif self.score is not None:
            raise ValueError(f"a trial with status {self.status} must not carry a score")
        elif self.timing != _NO_TIMING:
            raise ValueError(f"a trial with status {self.status} must not carry performance")

    @property
    def finished(self) -> bool:
        """Whether the trial need not be run again."""
        return self.status not in LOST

    @property
    def sub_scores(self) -> dict[str, tuple[float, float]]:
        """Right and asked of every sub-score: the metrics `x_right` and `x_asked`.

        A pair of which more is right than was asked is none.
        """
        found = {}
        for key, asked in self.metrics.items():
            name = key.removesuffix("_asked")
            right = self.metrics.get(f"{name}_right")
            if name == key or not isinstance(asked, int | float):
                continue
            if isinstance(right, int | float) and 0 <= right <= asked * _ROUNDED <= _LARGEST:
                found[name] = (float(right), float(asked))
        return found

    @property
    def means(self) -> dict[str, tuple[float, float]]:
        """Total and count of every mean without bounds: the metrics `x_total` and `x_count`."""
        found = {}
        for key, count in self.metrics.items():
            name = key.removesuffix("_count")
            total = self.metrics.get(f"{name}_total")
            if name != key and isinstance(count, int | float) and isinstance(total, int | float):
                found[name] = (float(total), float(count))
        return found

    @property
    def headline(self) -> float:
        """What the trial adds to the headline score: its score, 0 for every failure."""
        return 0.0 if self.score is None else self.score


class TurnRecord(_Keyed, frozen=True, kw_only=True):
    """One request of a trial; one line of `turns.jsonl`."""

    turn: Count  # index of the request within the trial
    prompt_tokens: Count = 0  # logical length of the prompt
    output_tokens: Count = 0  # generated
    phases: dict[str, Count] = field(default_factory=dict)  # tokens of this turn by phase name
    live_before: Count = 0  # live tokens when the turn began, and when it ended
    live_after: Count = 0
    events: Count = 0
    evicted: Count = 0
    restored: Count = 0
    prefill_tokens: Count = 0
    kv_bytes_read: Count = 0  # bytes of K and V read while decoding this turn
    ttft_ms: Amount | None = None  # milliseconds to the first token, and per later token
    tpot_ms: Amount | None = None


encode = msgspec.json.Encoder().encode
