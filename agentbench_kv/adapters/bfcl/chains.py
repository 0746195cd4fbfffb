"""Memory's prerequisite conversations: played once per scenario and trial, in order."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agentbench_kv.adapters.base import TrialContext
from agentbench_kv.adapters.bfcl.task import Played
from agentbench_kv.adapters.worker import WorkerError
from agentbench_kv.results.records import Metric, TrialStatus

# Plays the conversation of an id in the context's session, from a snapshot of the memory.
Talk = Callable[[str, TrialContext, Any], Played]


@dataclass
class Chain:
    """Conversations of one backend, scenario and trial index, and the memory they leave."""

    conversations: list[str]  # official ids
    snapshot: dict[str, Any] | None = None  # after the last one played, as in the official file
    incomplete: int = 0  # ended early: too many steps, or past the model's last position
    peak_live: int = 0  # most tokens of a session, by the server's account; 0 without one
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def play(self, context: TrialContext, talk: Talk) -> list[dict[str, Any]]:
        """Play what is still missing; return records of what was played here.

        WorkerError if a conversation failed through no fault of the agent; the next trial goes on
        from there. TimeoutError if another trial was busy with it until this one's time was up.
        """
        deadline = time.monotonic() + context.timeout_s
        if not self._lock.acquire(timeout=context.timeout_s):
            raise TimeoutError(f"prerequisite conversations took over {context.timeout_s:g} s")
        try:
            return [self._next(context, talk, deadline) for _ in self.conversations[self._done :]]
        finally:
            self._lock.release()

    def metrics(self, played: int) -> dict[str, Metric]:
        """Return what a question's record says about its snapshot."""
        content = json.dumps(self.snapshot, sort_keys=True).encode()
        return {
            "snapshot_sha": hashlib.sha256(content).hexdigest()[:12],
            "prerequisites_played": played,
            "prerequisites_incomplete": self.incomplete,
            "prerequisites_peak_live": self.peak_live,
        }

    def _next(self, context: TrialContext, talk: Talk, deadline: float) -> dict[str, Any]:
        conversation = self.conversations[self._done]
        asked = replace(
            context,
            session=session_of(context.session, self._done),
            seed=seed_of(conversation, context.trial),
            timeout_s=max(0.0, deadline - time.monotonic()),
        )
        try:
            told = talk(conversation, asked, self.snapshot)
        except WorkerError as error:
            error.args = (f"{conversation}: {error}",)
            raise
        # As in the official loop: a conversation that broke off in an error saves nothing.
        self.snapshot = told.get("snapshot", self.snapshot)
        self.incomplete += told["status"] != TrialStatus.SCORED
        self.peak_live = max(self.peak_live, int(told["account"].get("peak_live") or 0))
        self._done += 1
        kept = ("status", "text", "steps", "account")
        return {"id": conversation, **{key: told[key] for key in kept}}


def session_of(session: str, number: int) -> str:
    """Name a conversation's session after its trial's; the sample stays the last part."""
    head, mark, sample = session.rpartition("|")
    return f"{head}.memory{number}{mark}{sample}"


def seed_of(conversation: str, trial: int) -> int:
    """Return a sampling seed that depends neither on the method nor on which trial comes first."""
    digest = hashlib.sha256(f"{conversation}:{trial}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
