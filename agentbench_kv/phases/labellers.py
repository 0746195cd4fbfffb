"""How a labeller is named, so that a backend in another process can make the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.phases import Phase
from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.machine import PhaseMachine, PhaseTable

MARKERS = "markers"  # the recipe of `PhaseMachine` over the model's own tokenizer


class Labeller(Protocol):
    """Labels a session's tokens one by one."""

    def label(self, token: int) -> Phase:
        """Return the phase of the next token of the session."""
        ...


class TokenPhases:
    """Labels a token by its id, so that all four phases occur in random ids. For tests."""

    recipe = "token-id"

    def label(self, token: int) -> Phase:
        return Phase(token % len(Phase))


def recipe_of(labeller: Any) -> str:
    """Return the name under which `make_labeller` makes another one of the kind.

    UsageError for a labeller that only exists in this process.
    """
    if isinstance(labeller, PhaseMachine):
        return MARKERS
    if getattr(labeller, "recipe", None) == TokenPhases.recipe:
        return TokenPhases.recipe
    raise UsageError(
        f"{type(labeller).__name__} cannot label tokens in another process; use --engine embedded"
    )


def make_labeller(recipe: str, model_path: Path) -> Callable[[], Labeller]:
    """Return what makes labellers that start before a session's first token."""
    if recipe == TokenPhases.recipe:
        return TokenPhases
    table = PhaseTable.for_tokenizer(TokenCodec(load_tokenizer(model_path)))
    return lambda: PhaseMachine(table)
