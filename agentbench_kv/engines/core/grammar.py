"""Holding what a model draws to a grammar: llguidance says which tokens may come next."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.errors import PrerequisiteError


class GrammarConstraint:
    """One generation's way through a grammar. Satisfies `engines.base.Constraint`.

    Where the grammar leads nowhere only the turn's end is allowed, and `problem` says why: the
    engine goes on for the others.
    """

    def __init__(self, grammar: str, matcher: Any, eos: Sequence[int]) -> None:
        self.grammar = grammar
        self.problem = ""
        self._matcher = matcher
        self._eos = list(eos)

    def allowed(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            self.problem = self.problem or _line(self._matcher.get_error())
            allowed[:] = False
            allowed[self._eos] = True
        return allowed

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)


class GrammarVocabulary:
    """A model's tokens as llguidance knows them, for grammars in its Lark. Thread-safe."""

    def __init__(self, tokenizer: str, eos: Sequence[int]) -> None:
        """`tokenizer` is the text of a `tokenizer.json`; `eos` are the ids that end a turn."""
        self._document = tokenizer
        self._eos = list(eos)
        self._lock = threading.Lock()

    def constraint(self, grammar: str) -> GrammarConstraint:
        """Return a grammar's beginning; its `problem` says what is wrong with it, once asked."""
        with self._lock:
            library, tokenizer = self._library, self._tokenizer
        limits = library.LLParserLimits(verbose_errors=False)
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        return GrammarConstraint(grammar, matcher, self._eos)

    @cached_property
    def _library(self) -> Any:
        if find_spec("llguidance") is None:
            raise PrerequisiteError(
                "response_format and a forced tool_choice need llguidance; "
                "install it with: pip install llguidance"
            )
        return import_module("llguidance")

    @cached_property
    def _tokenizer(self) -> Any:
        document: dict[str, Any] = json.loads(self._document)
        # Markers are never spelled out in text, and no text holds one.
        for token in document["added_tokens"]:
            token["special"] = True
        plain: Mapping[str, Any] = document | {"padding": None, "truncation": None}
        return self._library.LLTokenizer(json.dumps(plain), eos_token=self._eos)


def holds_grammars(tokenizer: Path, eos: Sequence[int]) -> bool:
    """Return whether llguidance takes the tokens of a `tokenizer.json`, and what ends a turn."""
    try:
        vocabulary = GrammarVocabulary(tokenizer.read_text("utf-8"), eos)
        return bool(vocabulary.constraint('start: ""').allowed().any())
    except (OSError, ValueError, KeyError):
        return False


def _line(text: str) -> str:
    """Return the first line of a message that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing can follow")
