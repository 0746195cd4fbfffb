"""When a session's cache is compressed: the trigger's state, one object per session."""

from __future__ import annotations

from agentbench_kv.methods.base import Method


class Schedule:
    """Counts decoded tokens of one session and says when an event fires."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._since_due = 0

    def after_decode(self, live: int, logical: int) -> bool:
        """Count one decoded token, with `live` tokens cached of `logical` ever seen."""
        self._since_due += 1
        trigger = self._method.trigger
        if trigger == "slack":
            return self._over(live, logical, self._method.interval)
        if trigger == "turn" or self._since_due < self._method.interval:
            return False
        self._since_due = 0
        return self._over(live, logical)

    def take_back(self) -> None:
        """Uncount the last decoded token, with which no event fired."""
        self._since_due = (self._since_due - 1) % self._method.interval

    def after_prefill(self, live: int, logical: int) -> bool:
        return self._method.trigger == "prefill+every" and self._over(live, logical)

    def after_turn(self, live: int, logical: int) -> bool:
        return self._method.trigger == "turn" and self._over(live, logical)

    def _over(self, live: int, logical: int, slack: int = 0) -> bool:
        if not self._method.compresses:
            return False
        budget = self._method.budget_at(logical)
        return live >= budget + slack if slack else live > budget
