"""The score of a session: one if every message was right, and where the facts got lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentbench_kv.adapters.base import Fact
from agentbench_kv.adapters.micro.environment import Environment, Judged

Tally = tuple[int, int]
"""How many were right, how many were asked for."""

EVIDENCE = ("recurring", "one_shot")


@dataclass(frozen=True)
class Score:
    """Result of one session; recalled facts are those of the kinds in `EVIDENCE`."""

    success: bool  # every call and every reply was exactly as expected
    messages: Tally  # exact assistant messages
    by_source: dict[str, Tally]  # recalled facts by the phase that stated them
    by_kind: dict[str, Tally]  # all facts: recurring, one_shot, derived, local
    by_both: dict[str, Tally]  # recalled facts by `source/kind`
    facts: tuple[Fact, ...]  # the recalled facts, in the order they were needed


def score(environment: Environment) -> Score:
    """Score a session after its last user turn."""
    recalled = [entry for entry in environment.judged if entry.slot.kind in EVIDENCE]
    exact = environment.exact
    return Score(
        success=environment.done and all(exact),
        messages=(sum(exact), len(exact)),
        by_source=_tallies(recalled, lambda entry: entry.slot.source),
        by_kind=_tallies(environment.judged, lambda entry: entry.slot.kind),
        by_both=_tallies(recalled, lambda entry: f"{entry.slot.source}/{entry.slot.kind}"),
        facts=tuple(
            Fact(entry.slot.handle, entry.slot.source, entry.slot.kind, entry.right)
            for entry in recalled
        ),
    )


def _tallies(entries: Iterable[Judged], name: Callable[[Judged], str]) -> dict[str, Tally]:
    asked, right = Counter[str](), Counter[str]()
    for entry in entries:
        asked[name(entry)] += 1
        right[name(entry)] += entry.right
    return {key: (right[key], count) for key, count in sorted(asked.items())}
