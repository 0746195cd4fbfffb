"""The score of a session: one if every message was right, and where the facts got lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentbench_kv.adapters.base import Fact
from agentbench_kv.adapters.micro.environment import Environment
from agentbench_kv.adapters.micro.episode import Slot
from agentbench_kv.results.records import Metric

Tally = tuple[int, int]
"""How many were right, how many were asked for."""

EVIDENCE = ("recurring", "one_shot")
"""The kinds of facts that have to be recalled."""


@dataclass(frozen=True)
class Score:
    """Result of one session.

    `tallies` are of exact `messages` and of recalled facts by the phase that stated them (`tool`),
    by kind (`one_shot`) and by both (`tool_one_shot`).
    """

    success: bool  # every call and every reply was exactly as expected
    tallies: dict[str, Tally]
    facts: tuple[Fact, ...]  # the recalled facts, in the order they were needed

    @property
    def metrics(self) -> dict[str, Metric]:
        """The tallies as a trial's metrics, `x_right` of `x_asked`."""
        found: dict[str, Metric] = {}
        for name, (right, asked) in self.tallies.items():
            found |= {f"{name}_right": right, f"{name}_asked": asked}
        return found


def score(environment: Environment) -> Score:
    """Score a session after its last user turn."""
    exact = environment.exact
    recalled = [(j.slot, j.right) for j in environment.judged if j.slot.kind in EVIDENCE]
    kinds = _tallies(recalled, lambda slot: slot.kind)
    tallies = {
        "messages": (sum(exact), len(exact)),
        **_tallies(recalled, lambda slot: slot.source),
        **{kind: kinds[kind] for kind in EVIDENCE if kind in kinds},
        **_tallies(recalled, lambda slot: f"{slot.source}_{slot.kind}"),
    }
    facts = (Fact(slot.handle, slot.source, slot.kind, right) for slot, right in recalled)
    return Score(environment.done and all(exact), tallies, tuple(facts))


def _tallies(answers: Iterable[tuple[Slot, bool]], name: Callable[[Slot], str]) -> dict[str, Tally]:
    asked, right = Counter[str](), Counter[str]()
    for slot, is_right in answers:
        asked[name(slot)] += 1
        right[name(slot)] += is_right
    return {key: (right[key], count) for key, count in sorted(asked.items())}
