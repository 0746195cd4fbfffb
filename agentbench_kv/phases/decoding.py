"""From ids back to text while they are generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from agentbench_kv.phases.codec import TokenCodec

_REPLACEMENT = "\ufffd"
# UTF-8 characters have at most four bytes, so a longer undecodable run is not an unfinished one.
_MOST_PENDING = 4


class IncrementalDecoder:
    """Turns a stream of ids into a stream of text that never splits a character.

    `hidden` are ids that have no text (turn ends and other special tokens).
    """

    def __init__(self, codec: TokenCodec, hidden: Iterable[int] = ()) -> None:
        self.hidden = frozenset(hidden)
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
        """Make the matcher of a document, in another process."""
        return cls(IncrementalDecoder(codec, document["hidden"]), document["strings"])

    def __call__(self, token: int) -> bool:
        """Take the next id; True when the text now holds a stop string."""
        text = self._tail + self._decoder.feed(token)
        self._tail = text[-self._reach :] if self._reach else ""
        return any(stop in text for stop in self._stops)
