"""The two records of a run: one per trial, one per turn (`samples.jsonl`, `turns.jsonl`).

Token counts are per (layer, KV head); bytes are totals over layers and heads.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

__all__ = ["KVAccount", "Metric", "Timing", "TrialRecord", "TrialStatus", "TurnRecord", "Usage"]


def _writable(value: Any) -> Any:
    """Replace what JSON cannot carry: lone surrogates in model text, NaN and infinity."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


Text = Annotated[str, BeforeValidator(_writable)]
Metric = Annotated[float | int | str | None, BeforeValidator(_writable)]


class TrialStatus(StrEnum):
    """How a trial ended; only `scored` carries a score, `infra_error` is tried again."""

    SCORED = "scored"
    UNPARSABLE = "unparsable"
    CONTEXT_LIMIT = "context_limit"
    TURN_LIMIT = "turn_limit"
    TIMEOUT = "timeout"
    USER_ERROR = "user_error"
    ENGINE_ERROR = "engine_error"
    INFRA_ERROR = "infra_error"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class KVAccount(_Record):
    """KV accounting of one session, the evidence that a budget was applied.

    Attributes
    ----------
    peak_live, logical : int
        Most tokens held at once (max over layers and KV heads); tokens ever seen.
    events, evicted, restored : int
        Compressions, evictions and restores; tokens evicted; tokens brought back.
    bytes_read : int
        Bytes of K and V read while decoding.
    prefill_tokens, longest_prefill : int
        Tokens prefilled in all; most in a single prefill.
    decode_tokens : int
        Tokens generated.
    mean_decode_kv : float
        Mean live tokens over the decode steps.
    rows_moved, recomputed : int
        Cache rows moved by compaction; tokens whose KV was computed a second time.
    budget : int or None
        The budget in tokens at the session's end; for a budget given as a share it grew on the way.
    """

    peak_live: NonNegativeInt = 0
    logical: NonNegativeInt = 0
    events: NonNegativeInt = 0
    evicted: NonNegativeInt = 0
    restored: NonNegativeInt = 0
    bytes_read: NonNegativeInt = 0
    prefill_tokens: NonNegativeInt = 0
    longest_prefill: NonNegativeInt = 0
    decode_tokens: NonNegativeInt = 0
    mean_decode_kv: NonNegativeFloat = 0.0
    rows_moved: NonNegativeInt = 0
    recomputed: NonNegativeInt = 0
    budget: NonNegativeInt | None = None


class Timing(_Record):
    """Serving figures of one trial: milliseconds per first and later token, seconds in all."""

    ttft_ms: NonNegativeFloat | None = None
    tpot_ms: NonNegativeFloat | None = None
    e2e_s: NonNegativeFloat | None = None


class Usage(_Record):
    """Tokens and requests as an OpenAI-compatible client would be billed."""

    prompt_tokens: NonNegativeInt = 0
    completion_tokens: NonNegativeInt = 0
    requests: NonNegativeInt = 0


class TrialRecord(_Record):
    """One attempt at one sample; one line of `samples.jsonl`.

    Attributes
    ----------
    sample_id, trial : str, int
        The key; the last record of a key counts.
    cluster : str or None
        Group of dependent samples (the conversation of a LoCoMo question).
    score : float or None
        In [0, 1], from the benchmark's own checker; None unless `status` is `scored`.
    metrics : dict
        Anything else the checker says. `x_right` and `x_asked` (ints) make the sub-score `x`.
    session_resets : int
        Times the client broke the token log, so that the cache had to start over.
    prompt_sha : str or None
        Hash of the first rendered prompt; None if the trial never got that far.
    transcript : str or None
        Path inside the run directory.
    attempts : int
        Times the trial was started, infrastructure failures included.

    Raises
    ------
    pydantic.ValidationError
        If a failed trial carries a score or a performance figure, or a scored one has no score.
    """

    sample_id: Annotated[Text, Field(min_length=1)]
    trial: NonNegativeInt
    seed: int
    status: TrialStatus
    score: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    metrics: dict[str, Metric] = Field(default_factory=dict)
    kv: KVAccount = Field(default_factory=KVAccount)
    timing: Timing = Field(default_factory=Timing)
    usage: Usage = Field(default_factory=Usage)
    session_resets: NonNegativeInt = 0
    prompt_sha: str | None = None
    transcript: str | None = None
    error: Text | None = None
    attempts: PositiveInt = 1
    cluster: Text | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The sample id and the trial index."""
        return self.sample_id, self.trial

    @property
    def finished(self) -> bool:
        """Whether the trial need not be run again."""
        return self.status is not TrialStatus.INFRA_ERROR

    @property
    def headline(self) -> float:
        """What the trial adds to the headline score: its score, 0 for every failure."""
        return 0.0 if self.score is None else self.score

    @model_validator(mode="after")
    def _only_scored_trials_carry_figures(self) -> Self:
        if self.status is TrialStatus.SCORED:
            if self.score is None:
                raise ValueError("a scored trial must carry a score")
            return self
        if self.score is not None:
            raise ValueError(f"a trial with status {self.status} must not carry a score")
        if self.timing != Timing():
            raise ValueError(f"a trial with status {self.status} must not carry performance")
        return self


class TurnRecord(_Record):
    """One request of a trial; one line of `turns.jsonl`.

    Attributes
    ----------
    turn : int
        Index of the request within the trial.
    prompt_tokens, output_tokens : int
        Logical length of the prompt; tokens generated.
    phases : dict
        Tokens of this turn by phase name.
    live_before, live_after : int
        Live tokens when the turn began and when it ended.
    kv_bytes_read : int
        Bytes of K and V read while decoding this turn.
    ttft_ms, tpot_ms : float or None
        Time to the first token; time per later token.
    """

    sample_id: Annotated[Text, Field(min_length=1)]
    trial: NonNegativeInt
    turn: NonNegativeInt
    prompt_tokens: NonNegativeInt = 0
    output_tokens: NonNegativeInt = 0
    phases: dict[str, NonNegativeInt] = Field(default_factory=dict)
    live_before: NonNegativeInt = 0
    live_after: NonNegativeInt = 0
    events: NonNegativeInt = 0
    evicted: NonNegativeInt = 0
    restored: NonNegativeInt = 0
    prefill_tokens: NonNegativeInt = 0
    kv_bytes_read: NonNegativeInt = 0
    ttft_ms: NonNegativeFloat | None = None
    tpot_ms: NonNegativeFloat | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The trial this turn belongs to: sample id and trial index."""
        return self.sample_id, self.trial
