"""What the workers share. Standard library only: they run where agentbench_kv is not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SESSION_HEADER = "X-KVBench-Session"
ANSWER_S = 3600.0  # a small machine may write for long; the trial has a time limit of its own


def is_models_doing(error: BaseException | None) -> bool:
    """Whether an error of the OpenAI client, or none, is the model's: no room for a prompt.

    A server that is gone, busy or at the end of its money has no part in what a memory can do.
    """
    from openai import APIStatusError, OpenAIError

    if isinstance(error, APIStatusError):
        return error.code == "context_length_exceeded"
    return not isinstance(error, OpenAIError)


def folder_of(bank: str) -> Path:
    """Return a bank's folder in the worker's scratch; a bank's name may hold anything."""
    return Path(os.environ["KVBENCH_MEMORY"]) / hashlib.sha256(bank.encode()).hexdigest()[:32]
