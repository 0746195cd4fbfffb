"""Between text and ids: a thin, thread-safe codec over a Hugging Face tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentbench_kv.errors import PrerequisiteError

__all__ = ["IncrementalDecoder", "StopMatcher", "TokenCodec", "load_tokenizer"]

_REPLACEMENT = "\ufffd"
# UTF-8 characters have at most four bytes, so a longer undecodable run is not an unfinished one.
_MOST_PENDING = 4


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


class IncrementalDecoder:
    """Turns a stream of ids into a stream of text that never splits a character.

    Parameters
    ----------
    codec : TokenCodec
        Where the ids come from.
    hidden : iterable of int
        Ids that have no text (turn ends and other special tokens).
    """

    def __init__(self, codec: TokenCodec, hidden: Iterable[int] = ()) -> None:
        self._codec = codec
        self._hidden = frozenset(hidden)
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """Take the next id, return the text that is certain now."""
        if token in self._hidden:
            return ""
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MOST_PENDING:
            return ""
        return self._commit(text)

    def finish(self) -> str:
        """Return what is left; bytes of an unfinished character become U+FFFD."""
        return self._commit(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        # Decoded behind the ids before it, because some decoders strip a leading space.
        before = self._codec.decode(self._context) if self._context else ""
        return self._codec.decode([*self._context, *self._pending])[len(before) :]

    def _commit(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text


class StopMatcher:
    """Says at which token a stop string is complete; for `Sampling.stop`.

    Parameters
    ----------
    decoder : IncrementalDecoder
        A decoder of its own: the engine calls from another thread than the reader's.
    stops : sequence of str
        Strings that end the text.
    """

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._reach = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def __call__(self, token: int) -> bool:
        """Take the next id; True when the text now holds a stop string."""
        text = self._tail + self._decoder.feed(token)
        self._tail = text[-self._reach :] if self._reach else ""
        return any(stop in text for stop in self._stops)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    special = {index for index, token in added if getattr(token, "special", False)}
    return frozenset(special | set(tokenizer.all_special_ids))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
