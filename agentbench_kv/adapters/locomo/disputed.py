"""Questions of the published file whose gold answer, or whose evidence, has been disputed.

The list is `disputed.csv`: ids and kinds from a public audit, reasons in our own words. It says
nothing about another file than the published one.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

CITATION = "citation"  # the answer stands, what is named as its evidence does not hold it
SOURCE = "https://github.com/dial481/locomo-audit"


@dataclass(frozen=True)
class Disputed:
    """Why a question is disputed."""

    kind: str
    reason: str

    @property
    def answer(self) -> bool:
        """Whether the gold answer is, not its evidence alone."""
        return self.kind != CITATION


@cache
def all_disputed() -> Mapping[str, Mapping[int, Disputed]]:
    """Return the list: conversation, index in the file's questions, what is said against it."""
    found: dict[str, dict[int, Disputed]] = {}
    text = (files(__package__) / "disputed.csv").read_text("utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        kept = found.setdefault(row["conversation"], {})
        kept[int(row["index"])] = Disputed(row["kind"], row["reason"])
    return found
