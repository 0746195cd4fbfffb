"""Whose failure it is that a memory's package did not take in a part of the past."""

from __future__ import annotations

import openai
import pytest

from agentbench_kv.memories.files import is_models_doing


@pytest.mark.parametrize(
    ("error", "models"),
    [
        (ValueError("no JSON"), True),
        (KeyError("facts"), True),
        (OSError(28, "no space left"), False),
        (MemoryError(), False),
        (openai.OpenAIError("gone"), False),
    ],
)
def test_a_full_disk_is_not_the_models(error: Exception, models: bool) -> None:
    assert is_models_doing(error) is models
