"""What counts as a value, and when an answer is one: case, quotes, spaces, number formats aside."""

from __future__ import annotations

import re
import unicodedata

FEWEST, MOST = 2, 12  # pieces of a value
LONGEST = 32  # bytes of a value: in no tokenizer more tokens than an answer has
_QUOTES = re.compile(r"[\"'`\u201c\u201d\u2018\u2019\u00ab\u00bb]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DECIMAL = re.compile(r"(?<![\w.])\+?(-?\d+\.\d*?)0*(?![\w]|\.\d)")
# About what tokenizers make of ids, numbers and words; the same whatever the model.
_PIECE = re.compile(r"\d|[^\W\d_]{1,5}|[^\w\s]|_")
_WORD = re.compile(r"[^\W_]+")
_MARKUP = re.compile(r"[<\[{`]")  # how every marker of thoughts and calls begins


def pieces(text: str) -> int:
    """Return how long a value is: digits and signs one by one, letters five by five."""
    return len(_PIECE.findall(text))


def has_length(text: str) -> bool:
    """Whether a text is neither too short nor too long to be asked for."""
    return FEWEST <= pieces(text) <= MOST and len(text.encode()) <= LONGEST


def times(text: str, value: str) -> int:
    """Return how often a value stands in a text, not inside a longer word or number."""
    before = r"(?<!\w)" if value[:1].isalnum() else ""
    behind = r"(?!\w)" if value[-1:].isalnum() else ""
    return len(re.findall(before + re.escape(value) + behind, text))


def words(text: str) -> list[str]:
    """Return the words and numbers of a text, in lower case."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _plainer(text: str) -> str:
    plain = _QUOTES.sub("", unicodedata.normalize("NFKC", text).casefold())
    plain = _THOUSANDS.sub("", plain)
    plain = _DECIMAL.sub(lambda found: found[1].rstrip("."), plain)
    return " ".join(plain.split()).rstrip(" .,;:!")


def normalise(text: str) -> str:
    """Return a text without what does not count: case, quotes, spaces, formats of numbers."""
    # What goes may join its neighbours to something that goes as well, as in "0. .".
    while (plain := _plainer(text)) != text:
        text = plain
    return text


def is_exact(answer: str, value: str) -> bool:
    return normalise(answer) == normalise(value)


def may_be_exact(raw: str, value: str) -> bool:
    """Whether what a user sees of an answer may be a value and nothing else.

    Which markup a model writes is its own affair: without any, all of an answer is seen.
    """
    return is_exact(raw, value) or (contains(raw, value) and bool(_MARKUP.search(raw)))


def contains(answer: str, value: str) -> bool:
    """Whether a value stands in an answer, not inside a longer word, number or path."""
    wanted = re.escape(normalise(value))
    around = rf"(?<![\w/-])(?<!\d\.){wanted}(?!\w)(?![-/]\w)(?!\.\d)"
    return re.search(around, normalise(answer)) is not None
