"""How long a text is in tokens, without a tokenizer.

An adapter never sees tokens, and views must be the same for every model, so their cap is counted in
estimated tokens: word pieces of at most four letters, every digit and every mark on its own. On
English prose that is more than a byte-level BPE tokenizer of 100k entries or more makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

TokenCount = Callable[[str], int]
"""Counts the tokens of a text; a real tokenizer's `len(encode(text))` is one too."""

_LETTERS_A_TOKEN = 4
_WORD = re.compile(r"[A-Za-z]+")
_WIDE = re.compile(r"[\u0800-\U0010ffff]")
_SINGLE = re.compile(r"[^A-Za-z \t]")


def estimate_tokens(text: str) -> int:
    """Return the estimated number of tokens of a text.

    >>> estimate_tokens("L12: The capital is Paris.")
    11
    """
    words = sum(-(-len(word) // _LETTERS_A_TOKEN) for word in _WORD.findall(text))
    # Scripts beyond the two-byte range cost about two tokens a character.
    return words + len(_SINGLE.findall(text)) + len(_WIDE.findall(text))
