"""EM-norm: exact match after case, punctuation, articles, numbers and dates are made alike.

It is not the metric of the FRAMES or BrowseComp-Plus papers, which ask an LLM judge: an answer in
other words counts as wrong here. It needs no model, and is never put in the judge's column.
"""

from __future__ import annotations

import re
import unicodedata

from agentbench_kv.adapters.browser.dates import plain_dates
from agentbench_kv.adapters.browser.numbers import spelled_numbers

_MARKER = re.compile(r"\b(?:final|exact)\s+answer\W*:\W*", re.IGNORECASE)
_ARTICLES = frozenset({"a", "an", "the"})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORD = re.compile(r"-?\d+(?:\.\d+)?(?:st|nd|rd|th)?(?!\w)|\w+")
_MINUS = re.compile(r"(?<![\w)])-(?=\d)")


def final_answer(text: str) -> tuple[str, bool]:
    """Return the answer in an agent's last message, and whether it was marked as asked.

    Without a line `Final answer: …` the whole message is the answer.
    """
    found = list(_MARKER.finditer(text))
    if not found:
        return text.strip(), False
    # From the colon on: signs and brackets that the marker took belong to the answer.
    answer = text[text.index(":", found[-1].start()) + 1 :].lstrip(" \t\n*_")
    first = re.split(r"\n\s*\n", answer, maxsplit=1)[0]
    return first.strip().strip("*").strip(), True


def normalized(text: str) -> list[str]:
    """Return the words of an answer in one form.

    Case, accents, punctuation, currency signs and articles go; `%` is the word percent; numbers
    are in digits without thousands separators; dates with a month's name or in ISO form are alike.
    An answer that is nothing but signs (`....-`) stays as it is.

    >>> normalized("The U.S. won twenty-one medals (July 4th, 1776)")
    ['us', 'won', '21', 'medals', 'date1776m7d4']
    """
    words = _WORD.findall(_plain(text))
    kept = [word for word in words if word not in _ARTICLES]
    return spelled_numbers(kept) or words or text.split()


def matches(answer: str, gold: str) -> bool:
    """Whether an answer equals the gold one after both are normalised; an empty one never does."""
    found = normalized(answer)
    return bool(found) and found == normalized(gold)


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(c for c in folded if not unicodedata.combining(c))
    plain = re.sub(r"[\u2010-\u2015\u2212]", "-", plain)
    plain = re.sub(r"per\s+cent\b", "percent", plain.replace("%", " percent "))
    plain = plain_dates(_THOUSANDS.sub("", plain))
    plain = re.sub(r"['\u2018\u2019`]", "", plain)
    # Abbreviations lose their points as a whole: U.S. is us, not u and s.
    plain = re.sub(r"\b(?:[a-z]\.){2,}", lambda found: found[0].replace(".", ""), plain)
    # A minus sign precedes a number and follows no word; every other dash is a space.
    plain = _MINUS.sub("\0", plain).replace("-", " ").replace("\0", " -").replace("_", " ")
    return plain.replace("&", " and ")
