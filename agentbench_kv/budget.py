"""How many tokens a method may keep: a number, or a share of the session's logical length."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from agentbench_kv.errors import UsageError

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)(k?)", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_MOST = 10**12  # tokens, far more than any session has
_LEAST_SHARE = 1e-6  # what a smaller one is spelled like is none again
_SHOWN = 40  # characters of a wrong text


@dataclass(frozen=True)
class Budget:
    """Tokens kept per (layer, KV head): exactly one of the two is given."""

    tokens: int | None = None
    share: float | None = None  # of the tokens ever seen, in (0, 1]

    @classmethod
    def parse(cls, value: Budget | int | str) -> Budget:
        """Read `3072`, `3k` (3,000), `1.5k` or `25%`; anything else is a UsageError."""
        if isinstance(value, Budget):
            return value
        text = str(value).strip()
        if match := _SHARE.fullmatch(text):
            share = float(match[1]) / 100
            if _LEAST_SHARE <= share <= 1:
                return cls(share=share)
        elif match := _TOKENS.fullmatch(text):
            tokens = float(match[1]) * (1000 if match[2] else 1)
            if 1 <= tokens <= _MOST and tokens == int(tokens):
                return cls(tokens=int(tokens))
        raise UsageError(
            f"budget {_short(text)!r}: expected a number of tokens >= 1, e.g. 3072 or 3k, "
            "or a share of the session's length, e.g. 25%"
        )

    def at(self, logical: int) -> int:
        """Return the budget in tokens of a session that has seen `logical` tokens."""
        if self.share is not None:
            # 7 % of 100 is 7.000000000000001 in floating point, and 7 in fact.
            return max(1, math.ceil(self.share * logical - 1e-9))
        return self.tokens or 0

    @property
    def spelled(self) -> int | str:
        """The shortest spelling that `parse` reads back: what records hold."""
        return f"{self.share * 100:.10g}%" if self.share is not None else self.tokens or 0

    def __str__(self) -> str:
        return str(self.spelled)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
