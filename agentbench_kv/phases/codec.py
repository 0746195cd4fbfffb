"""Between text and ids: a thin, thread-safe codec over a Hugging Face tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentbench_kv.errors import PrerequisiteError


def load_tokenizer(path: Path) -> Any:
    """Return the Hugging Face tokenizer of a local model folder; the network is never asked."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PrerequisiteError(f"no usable tokenizer in {path}: {reason}") from error


def encodable(text: str) -> str:
    """Replace lone surrogates: JSON escapes smuggle them in; tokenizers and UTF-8 refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")


class TokenCodec:
    """Encodes and decodes for many threads, with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.added: dict[str, int] = dict(tokenizer.get_added_vocab())
        added = tokenizer.added_tokens_decoder.items()
        special = {index for index, token in added if getattr(token, "special", False)}
        self.special: frozenset[int] = frozenset(special | set(tokenizer.all_special_ids))
        # A fast tokenizer changes its truncation state inside `encode`.
        self._lock = threading.Lock()
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; nothing is added in front or behind."""
        if not text:
            return []
        with self._lock:
            return list(self.tokenizer.encode(encodable(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> str:
        """Return the text of one id; bytes of an unfinished character become U+FFFD."""
        if token not in self._pieces:
            self._pieces[token] = self.decode([token])
        return self._pieces[token]
