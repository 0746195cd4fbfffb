"""SideQuest: the model itself says, beside the session, which tool results it needs no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from agentbench_kv.methods.dropping.policy import EXECUTIONS, Drop, DropMethod, History, Role, What
from agentbench_kv.params import param

TRIGGER = "** Memory management mode **"  # begins the question (SideQuest, section 3.2)
TRAINED = "sidequest.json"  # in a model's folder: it was trained to answer the bare trigger


@dataclass(frozen=True, kw_only=True)
class SideQuestPrompted(DropMethod):
    """Every few requests a fork of the session is asked which tool results are expired.

    Results carry cursors. The session goes on meanwhile; when the fork has answered, at the next
    request, the named results leave with the calls that asked for nothing else. An answer that
    names no cursors, or none that exists, drops nothing and is counted. The model is any that was
    not trained for it, so this is not the paper's SideQuest.
    """

    name: ClassVar[str] = "sidequest-prompted"
    summary: ClassVar[str] = "the model says in a fork which tool results it needs no more"
    source: ClassVar[str] = "SideQuest, section 3, with a model that was not trained for it"

    asks: ClassVar[bool] = True
    trained: ClassVar[bool] = False  # whether the model knows what the trigger asks for

    trigger: str = "turns"  # no `param`: there is no limit on tokens

    exec: str = param("span", "how what is dropped leaves", choices=EXECUTIONS)
    fork_every: int = param(4, "requests from one question to the next", low=1)
    fork_tokens: int = param(256, "most tokens of an answer", low=1)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"fork"} if self.exec != "text" else frozenset())

    def due(self, history: History) -> bool:  # noqa: ARG002
        return False

    def decide(self, history: History) -> frozenset[Drop]:  # noqa: ARG002
        return frozenset()

    def expired(self, history: History, results: Iterable[int]) -> frozenset[Drop]:
        """Return what leaves with results, by message: they, and calls without another one."""
        parts, gone = history.parts, set(results)
        drops = {Drop(number, What.RESULT) for number in gone}
        for number, part in enumerate(parts):
            if part.role is Role.ASSISTANT and part.inputs:
                own = number + 1
                while own < len(parts) and parts[own].role is Role.TOOL:
                    own += 1
                answered = range(number + 1, own)
                left = [n for n in answered if n not in gone and not parts[n].dropped]
                if not left and any(n in gone for n in answered):
                    drops.add(Drop(number, What.INPUTS))
        return frozenset(drops)


@dataclass(frozen=True, kw_only=True)
class SideQuest(SideQuestPrompted):
    """The paper's method: the model was trained to answer the bare trigger phrase.

    Otherwise as `sidequest-prompted`. A model without the mark of such a training is refused.
    """

    name: ClassVar[str] = "sidequest"
    summary: ClassVar[str] = "a model trained for it says in a fork which tool results leave"
    source: ClassVar[str] = "SideQuest, sections 3.1 to 3.3"
    trained: ClassVar[bool] = True
