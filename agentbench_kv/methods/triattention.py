"""TriAttention: keys scored by calibrated query statistics and distance (Mao et al.)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from agentbench_kv.budget import Budget
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.base import (
    KEPT_SETS,
    PROTECTS,
    TRIGGERS,
    Method,
    Queries,
    ScoreContext,
)
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.params import param

logger = logging.getLogger(__name__)

OFF_ON = ("off", "on")
_KEEP_PROMPT = {"off": "none", "on": "prompt"}  # what `protect` was before there was one


@dataclass(frozen=True, kw_only=True)
class TriAttention(Method):
    """Score a key by the attention that the model's mean query would pay it in times to come.

    `S_j = mean_o Σ_f Re(μ_f e^{i w_f (t+o)} conj(k_jf)) + Σ_f (v_f - |μ_f|)·|k_jf|` over offsets
    o = 1, 2, 4, …, 65536; then z-scores, the group's maximum, and one set per KV head index or
    another `kept_set`. Presets are what the authors' Hugging
    Face, vLLM and SGLang code do; `per_layer` and `global` are variants of the first.

    `normalise=generated` takes mean and deviation over tokens after the prompt and leaves the
    prompt out of the ranking under `protect=prompt`, the default. If the prompt then fills the
    budget, its first `budget` tokens are all that is kept, as in the authors' code.
    """

    name: ClassVar[str] = "triattention"
    summary: ClassVar[str] = "trigonometric score of calibrated query statistics"
    source: ClassVar[str] = "Mao et al., TriAttention"
    needs_calibration: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "hf": {},
        "vllm": {"protect": "none", "keep_recent": 128, "normalise": "query_head"},
        "sglang": {"protect": "none", "normalise": "kv_head", "aggregate": "max"},
        "per_layer": {"kept_set": "per_head"},
        "global": {"kept_set": "shared", "aggregate": "max"},
    }
    default_preset: ClassVar[str] = "hf"

    trigger: str = param("slack", "when an event fires", choices=TRIGGERS)
    kept_set: str = param("per_kv_head", "who shares a kept set", choices=KEPT_SETS)
    protect: str = param(
        "prompt",
        "first tokens always kept, counted in the budget: the system message with its tools, all "
        "before the first generated token, or so many",
        choices=PROTECTS,
        counts=True,
    )
    normalise: str = param(
        "generated",
        "z-scores per query head over tokens after the prompt or over all, or per KV head over all",
        choices=("generated", "query_head", "kv_head", "none"),
    )
    aggregate: str = param("mean", "merging layers that share a set", choices=("mean", "max"))
    offset_max: int = param(65536, "largest distance ahead; offsets are powers of two", low=1)
    offset_merge: str = param("mean", "merging offsets", choices=("mean", "max"))
    norm_term: str = param(
        "excess",
        "norm of the key times v - |μ|, times v, or no such term",
        choices=("excess", "mean", "off"),
    )
    trig_term: str = param("on", "the term that depends on distance", choices=OFF_ON)
    calibration: Calibration | None = field(default=None, compare=False, repr=False)

    @classmethod
    def create(
        cls,
        preset: str,
        budget: Budget | int | str | None,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build it as `Method.create` does; `keep_prompt` is what `protect` was in older runs."""
        given = dict(settings or {})
        if (old := given.pop("keep_prompt", None)) is not None:
            if old not in OFF_ON:
                raise UsageError(f"keep_prompt={old}: expected one of {', '.join(OFF_ON)}")
            given.setdefault("protect", _KEEP_PROMPT[old])
        return super().create(preset, budget, given)

    def settings(self) -> dict[str, Any]:
        """Return the parameters; what older runs could set under their name, to keep their ids."""
        found = super().settings()
        for old, new in _KEEP_PROMPT.items():
            if found["protect"] == new:
                del found["protect"]
                return {**found, "keep_prompt": old}
        return found

    def has_room(self, budget: int, protected: int) -> bool:
        """Return True with a protected prompt whatever its length, as in the authors' code."""
        if self.protect == "prompt" and protected:
            return True
        return super().has_room(budget, protected)

    def with_calibration(self, calibration: Calibration) -> Self:
        return replace(self, calibration=calibration.without_covariance())

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        """Score every key under every query head, normalise, take the group's maximum."""
        if self.calibration is None:
            raise PrerequisiteError(
                "triattention has no calibration for this model; make one with kvbench calibrate"
            )
        # In float64, so that equal keys get equal scores however a matrix product is split up.
        raw = self._raw(self.calibration.on(keys.device), keys.double(), context)
        return self._normalised(raw.float(), context)

    def _raw(self, statistics: Calibration, keys: Tensor, context: ScoreContext) -> Tensor:
        """Score keys [kv_heads, tokens, d] before normalising, [kv_heads, group, tokens]."""
        kv_heads, tokens, _ = keys.shape
        mean = statistics.mean[context.layer].to(torch.complex128)
        size = statistics.abs_mean[context.layer].double()
        score = keys.new_zeros(kv_heads, len(mean) // kv_heads, tokens)
        if self.trig_term == "on":
            turned = mean * self._turns(statistics.frequencies, context.next_position)[:, None]
            score = self._best_offset(turned, keys)
        if self.norm_term != "off":
            weight = size - mean.abs() if self.norm_term == "excess" else size
            sizes = torch.hypot(*keys.chunk(2, -1)).transpose(1, 2)  # |k_f| of every pair
            score = score + weight.reshape(kv_heads, -1, size.shape[-1]) @ sizes
        return score * statistics.scale

    def _best_offset(self, turned: Tensor, keys: Tensor) -> Tensor:
        """Merge Σ_f Re(c_f conj(k_f)) over offsets; c is `turned`, [offsets, q_heads, d / 2]."""
        if self.offset_merge == "mean":
            turned = turned.mean(0, keepdim=True)
        # Re(c conj(k)) is the dot product of the pairs, which is how keys lie in memory.
        plain = torch.cat((turned.real, turned.imag), -1)
        grouped = plain.reshape(len(plain), keys.shape[0], -1, keys.shape[2])
        products = (part @ keys.transpose(1, 2) for part in grouped)
        best: Tensor = reduce(torch.maximum, products)
        return best

    def _turns(self, frequencies: Tensor, now: int) -> Tensor:
        """e^{i w (t + o)} for every offset, [offsets, d / 2]; angles in float64."""
        count = self.offset_max.bit_length()
        ahead = now + 2 ** torch.arange(count, device=frequencies.device)
        angles = ahead[:, None].double() * frequencies.double()
        return torch.polar(torch.ones_like(angles), angles)

    def _normalised(self, raw: Tensor, context: ScoreContext) -> Tensor:
        """Merge [kv_heads, group, tokens] to [kv_heads, tokens]."""
        if self.normalise == "kv_head":
            return _z_scores(raw.amax(1))
        if self.normalise == "query_head":
            return _z_scores(raw).amax(1)
        if self.normalise == "generated":
            counted = context.positions[:, None] >= context.prompt
            return _z_scores_over(raw, counted).amax(1)
        return raw.amax(1)

    def _merge(self, scores: Tensor) -> Tensor:
        if self.aggregate == "mean" or self.kept_set == "per_head":
            return super()._merge(scores)
        over = {"per_layer": (1,), "per_kv_head": (0,), "shared": (0, 1)}[self.kept_set]
        return scores.amax(over, keepdim=True).expand_as(scores)

    def _always(self, positions: Tensor, now: int, protected: int) -> Tensor:
        budget = self.budget_at(now)
        first = max(protected, self.sinks)
        if self.protect != "prompt" or first + self.recent_kept(budget) < budget:
            return super()._always(positions, now, protected)
        if first >= budget:
            _warn_of_prompt(self.label)
            return positions < budget
        return (positions < first) | (positions >= now - (budget - first))


@cache
def _warn_of_prompt(label: str) -> None:
    """Say once what the authors' code does with a prompt that fills the budget."""
    logger.warning(
        "%s: a session's prompt is as long as the budget, so only its beginning is kept and every "
        "later token is evicted, as in the authors' code; raise --budget or --set protect=none",
        label,
    )


def _z_scores(raw: Tensor) -> Tensor:
    """Over the last axis, sample deviation, constant rows unchanged in scale."""
    deviation, mean = torch.std_mean(raw, -1, keepdim=True)
    return (raw - mean) / torch.where(deviation < 1e-8, torch.ones_like(deviation), deviation)


def _z_scores_over(raw: Tensor, counted: Tensor) -> Tensor:
    """Over the counted entries of the last axis, population deviation of at least 1e-6."""
    number = counted.sum(-1, keepdim=True).clamp(min=1)
    mean = (raw * counted).sum(-1, keepdim=True) / number
    variance = ((raw - mean).square() * counted).sum(-1, keepdim=True) / number
    return (raw - mean) / variance.sqrt().clamp(min=1e-6)
