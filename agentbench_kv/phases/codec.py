"""Between text and ids: a thin, thread-safe codec over a Hugging Face tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentbench_kv.errors import PrerequisiteError

__all__ = ["TokenCodec", "load_tokenizer"]


def load_tokenizer(path: Path) -> Any:
    """Return the Hugging Face tokenizer of a local model folder; the network is never asked."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise PrerequisiteError(f"no usable tokenizer in {path}: {_first_line(error)}") from error


class TokenCodec:
    """Encodes and decodes for many threads.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.added: dict[str, int] = dict(tokenizer.get_added_vocab())
        self.special: frozenset[int] = _special_ids(tokenizer)
        # A fast tokenizer changes its truncation state inside `encode`.
        self._lock = threading.Lock()
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; nothing is added in front or behind."""
        if not text:
            return []
        # A JSON escape can smuggle in half a character, which no tokenizer takes.
        text = text.encode("utf-8", "replace").decode("utf-8")
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> str:
        """Return the text of one id; bytes of an unfinished character become U+FFFD."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.decode([token])
        return piece


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    special = {index for index, token in added if getattr(token, "special", False)}
    return frozenset(special | set(tokenizer.all_special_ids))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
