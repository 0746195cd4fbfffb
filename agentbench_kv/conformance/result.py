"""The outcome of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """One property, whether it holds, and the first counterexample (or a figure) in words."""

    name: str
    ok: bool
    detail: str = ""
