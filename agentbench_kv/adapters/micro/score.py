"""The score of a session: one if every message was right, and where the facts got lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from agentbench_kv.adapters.base import Fact
from agentbench_kv.adapters.micro.environment import Environment

__all__ = ["Score", "Tally", "score"]

Tally = tuple[int, int]
"""How many were right, how many were asked for."""

EVIDENCE = ("recurring", "one_shot")


@dataclass(frozen=True)
class Score:
    """Result of one session.

    Parameters
    ----------
    success : bool
        Whether every call and every reply was exactly as expected.
    messages : Tally
        Exact assistant messages.
    by_source : dict of str to Tally
        Recalled facts by the phase that stated them: think, act, tool, others.
    by_kind : dict of str to Tally
        All facts by kind: recurring, one_shot, derived, local.
    by_both : dict of str to Tally
        Recalled facts by `source/kind`.
    facts : tuple of Fact
        The recalled facts, in the order they were needed.
    """

    success: bool
    messages: Tally
    by_source: dict[str, Tally]
    by_kind: dict[str, Tally]
    by_both: dict[str, Tally]
    facts: tuple[Fact, ...]


def score(environment: Environment) -> Score:
    """Score a session that is over.

    Parameters
    ----------
    environment : Environment
        After its last user turn.
    """
    judged = environment.judged
    facts = [entry for entry in judged if entry.slot.kind in EVIDENCE]
    exact = environment.exact
    return Score(
        success=environment.done and all(exact),
        messages=(sum(exact), len(exact)),
        by_source=_tallies([(entry.slot.source, entry.right) for entry in facts]),
        by_kind=_tallies([(entry.slot.kind, entry.right) for entry in judged]),
        by_both=_tallies(
            [(f"{entry.slot.source}/{entry.slot.kind}", entry.right) for entry in facts]
        ),
        facts=tuple(
            Fact(entry.slot.handle, entry.slot.source, entry.slot.kind, entry.right)
            for entry in facts
        ),
    )


def _tallies(answers: list[tuple[str, bool]]) -> dict[str, Tally]:
    asked = Counter(name for name, _ in answers)
    right = Counter(name for name, is_right in answers if is_right)
    return {name: (right[name], count) for name, count in sorted(asked.items())}
