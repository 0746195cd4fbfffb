"""Offline scoring of a capture: the code the engines run, on a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentbench_kv import __version__
from agentbench_kv.analysis.archives import write_archive
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.analysis.replay import moment_at, ready
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method


@dataclass(frozen=True)
class CaptureSelection:
    """What a method keeps of a capture; the layer axis is there if the capture has one.

    Query heads take the place of KV heads for a method with a cache per query head.
    """

    kept: Tensor  # tokens of the capture, ascending, int32 [.., kv_heads, budget]
    # float32 [.., kv_heads, tokens]; NaN where always kept, -inf for tokens after the event.
    score: Tensor
    meta: dict[str, Any]

    def save(self, path: Path) -> None:
        write_archive(path, {"kept": self.kept, "score": self.score}, self.meta)


def select_capture(capture: Capture, method: Method) -> CaptureSelection:
    """Run one event at the capture's `now`.

    UsageError if the budget is over the candidates, or the capture lacks what the method needs.
    """
    method = ready(method, capture, capture.now)
    budget = method.budget_at(capture.now)
    if budget > capture.candidates:
        raise UsageError(
            f"budget {budget} is over the {capture.candidates} tokens of the capture before "
            f"position {capture.now}; lower --budget"
        )
    with torch.inference_mode():
        selection = moment_at(capture, method, capture.now).select(method)
    after = capture.length - capture.candidates
    score = torch.nn.functional.pad(selection.scores, (0, after), value=-torch.inf)
    layers = slice(None) if capture.layered else 0
    meta = {
        "method": method.name,
        "preset": method.preset or None,
        "settings": method.settings(),
        "budget": budget,
        "budget_share": method.share,
        "version": __version__,
        "T": capture.length,
        "candidates": capture.candidates,
        "now": capture.now,
        "prompt": capture.prompt,
        "layers": capture.layers,
        "q_heads": capture.q_heads,
        "kv_heads": capture.kv_heads,
        "head_dim": capture.q.shape[-1],
        "kept_per": "query_head" if method.per_query_head else "kv_head",
        "capture": capture.meta,
    }
    return CaptureSelection(selection.kept[layers].int(), score[layers].float(), meta)
