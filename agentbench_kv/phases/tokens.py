"""Between text and ids: a thread-safe codec over a Hugging Face tokenizer, decoding a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any, Self

from agentbench_kv.errors import PrerequisiteError


def load_tokenizer(path: Path) -> Any:
    """Return the Hugging Face tokenizer of a local model folder; the network is never asked."""
    from transformers import AutoTokenizer

    try:
        with quiet_library():
            made = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        made.decode(made.encode("a", add_special_tokens=False))  # settings are only read here
    except BaseException as error:
        # A damaged file fails the library in any way; a panic of its Rust part is no Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PrerequisiteError(f"no usable tokenizer in {path}: {reason}") from error
    return made


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep what transformers reports while it loads off the terminal: what matters, it raises."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def encodable(text: str) -> str:
    """Replace lone surrogates: JSON escapes smuggle them in; tokenizers and UTF-8 refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")


class TokenCodec:
    """Encodes and decodes for many threads, with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = str(getattr(tokenizer, "chat_template", None) or "")
        self.added: dict[str, int] = dict(tokenizer.get_added_vocab())
        added = tokenizer.added_tokens_decoder.items()
        special = {index for index, token in added if getattr(token, "special", False)}
        self.special: frozenset[int] = frozenset(special | set(tokenizer.all_special_ids))
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # whatever its file says
            self._fast.no_truncation()
            self._fast.no_padding()
        self._lock = threading.Lock()  # of a slow tokenizer
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; nothing is added in front or behind."""
        if not text:
            return []
        if self._fast is not None:
            # Its own `encode` sets truncation first, so that it would need a lock, under which one
            # huge prompt keeps all sessions waiting. A batch is encoded outside of the GIL.
            (found,) = self._fast.encode_batch([encodable(text)], add_special_tokens=False)
            return list(found.ids)
        with self._lock:
            # Not verbose: a text beyond the model's context is refused, not warned of.
            ids = self.tokenizer.encode(encodable(text), add_special_tokens=False, verbose=False)
            return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are added tokens."""
        return frozenset(self.added[text] for text in texts if text in self.added)

    def piece(self, token: int) -> str:
        """Return the text of one id; bytes of an unfinished character become U+FFFD."""
        if token not in self._pieces:
            self._pieces[token] = self.decode([token])
        return self._pieces[token]


_REPLACEMENT = "\ufffd"

# UTF-8 characters have at most four bytes, so a longer undecodable run is not an unfinished one.
_MOST_PENDING = 4


class IncrementalDecoder:
    """Turns a stream of ids into a stream of text that never splits a character."""

    def __init__(self, codec: TokenCodec, hidden: Iterable[int] = ()) -> None:
        self.hidden = frozenset(hidden)  # ids without text: turn ends, other special tokens
        self._codec = codec
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """Take the next id, return the text that is certain now."""
        if token in self.hidden:
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

    It needs a decoder of its own: the engine calls from another thread than the reader's.
    """

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._reach = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def document(self) -> dict[str, list[Any]]:
        """Return what `from_document` needs to make a fresh copy."""
        return {"strings": list(self._stops), "hidden": sorted(self._decoder.hidden)}

    @classmethod
    def from_document(cls, document: dict[str, list[Any]], codec: TokenCodec) -> Self:
        return cls(IncrementalDecoder(codec, document["hidden"]), document["strings"])

    def __call__(self, token: int) -> bool:
        """Take the next id; True when the text now holds a stop string."""
        text = self._tail + self._decoder.feed(token)
        self._tail = text[-self._reach :] if self._reach else ""
        return any(stop in text for stop in self._stops)
