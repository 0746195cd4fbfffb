"""Conversations of clients that name no session: which request goes on from which answer."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass

from agentbench_kv.gateway.session import Known

# A conversation of so many requests without a session is worth a word.
HINT_AFTER = 3
HINT = (
    f"{HINT_AFTER} requests in a row extended one another without naming a session, and the cache "
    "was thrown away each time. Send one id per conversation in the header X-KVBench-Session, or "
    "start kvbench serve with --sessions auto"
)
_MOST_COUNTED = 1024


@dataclass(frozen=True)
class Opening:
    """What a request without a session goes on from."""

    session: str | None = None  # its session, from now on this request's alone
    requests: int = 0  # that came before it in the conversation


class Conversations:
    """Finds the answer that a request's messages go on from, up to the last assistant message.

    With `keep`, the sessions of that many conversations live on, the oldest are given up first.
    Two clients may have had the same messages and answers, and their caches still differ: thoughts
    are not in the messages. So a state that was ever answered twice belongs to nobody, and both
    sessions are given up. Without `keep` requests are only counted.
    """

    def __init__(self, keep: int = 0) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._ends: OrderedDict[bytes, Opening] = OrderedDict()  # by what was said so far
        self._reached = SeenKeys()

    def claim(self, asked: Known) -> Opening:
        """Return what a request goes on from; the next one to ask for it gets nothing."""
        said = [number for number, (role, *_) in enumerate(asked.messages) if role == "assistant"]
        if not said or said[-1] + 1 == len(asked.messages):
            return Opening()
        state = _key(asked, said[-1] + 1)
        with self._lock:
            return self._ends.pop(state, Opening())

    def answered(self, known: Known, opening: Opening) -> list[str]:
        """Remember what a client knows now; return the sessions that have become nobody's.

        `opening` names the session that answered, if it lives on, and the requests so far.
        """
        state = _key(known, len(known.messages))
        with self._lock:
            if self._keep and self._reached.add(state):
                given_up = [opening, self._ends.pop(state, Opening())]
            else:
                self._ends[state] = opening
                over = len(self._ends) - (self._keep or _MOST_COUNTED)
                given_up = [self._ends.popitem(last=False)[1] for _ in range(over)]
        return [each.session for each in given_up if each.session is not None]


class SeenKeys:
    """Remembers digests in constant memory: may say yes wrongly, never no (a Bloom filter).

    After a million keys one in fifty is taken for a known one: that conversation is answered from
    a fresh cache.
    """

    _BITS = 2**23
    _SPOTS = 7

    def __init__(self) -> None:
        self._bits = bytearray(self._BITS // 8)

    def add(self, key: bytes) -> bool:
        """Remember a digest of 32 bytes; return whether it was there, or seems so."""
        seen = True
        for spot in range(self._SPOTS):
            place = int.from_bytes(key[4 * spot : 4 * spot + 4], "big") % self._BITS
            byte, bit = place // 8, 1 << place % 8
            seen = seen and bool(self._bits[byte] & bit)
            self._bits[byte] |= bit
        return seen


def _key(known: Known, messages: int) -> bytes:
    said = json.dumps([known.tools, known.messages[:messages]], ensure_ascii=True)
    return hashlib.sha256(said.encode()).digest()
