"""What the workers share. Standard library only: they run where agentbench_kv is not."""

from __future__ import annotations

from importlib.metadata import distributions
from typing import Any

SESSION_HEADER = "X-KVBench-Session"
ANSWER_S = 3600.0  # a small machine may write for long; the trial has a time limit of its own


def is_models_doing(error: BaseException | None) -> bool:
    """Whether an error, or none, is the model's: an answer of no use, or no room for a prompt.

    A server that is gone, busy or at the end of its money has no part in what a memory can do, nor
    has a disk or a memory that is full.
    """
    from openai import APIStatusError, OpenAIError

    if isinstance(error, APIStatusError):
        return error.code == "context_length_exceeded"
    return not isinstance(error, OpenAIError | OSError | MemoryError)


def versions(_: Any) -> dict[str, str]:
    """Return the version of every package in the environment."""
    return {each.metadata["Name"]: each.version for each in distributions()}
