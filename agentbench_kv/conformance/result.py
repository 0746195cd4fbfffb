"""The outcome of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """One property, whether it holds, and the first counterexample (or a figure) in words.

    `skipped`: it could not be checked, `detail` says why; `ok` is True then.
    """

    name: str
    ok: bool
    detail: str = ""
    skipped: bool = False
