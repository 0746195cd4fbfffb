"""Memories of plain text: a package keeps what a model wrote of the past, and finds it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentbench_kv.methods.base import PREFIXES, Method
from agentbench_kv.methods.full import Full
from agentbench_kv.methods.memory.base import Memory
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class PlainMemory(Memory):
    """What a package in an environment of its own finds stands before the user's new message.

    The run's own model writes what is kept; an encoder of this machine finds it.
    """

    environment: ClassVar[str]  # profile that has the package (`kvbench env create`)

    topk: int = param(100, "texts that are put before a message", low=1)
    batch: int = param(2, "messages that are told at a time; 0 for a whole session", low=0)
    encoder: str = param("wordllama", "what finds them: wordllama, or a local encoder's folder")
    write_tokens: int = param(2000, "most tokens that the model writes at a time", low=1, rare=True)
    # What a package tells the model first is the system message of all its requests.
    prefix: str = param(
        "own",
        "rows of the system message with its tools: each session's own, or cached once for all",
        choices=PREFIXES,
        rare=True,
    )

    def below(self) -> Method:
        """Return the method that the engine itself runs."""
        return Full(prefix=self.prefix)
