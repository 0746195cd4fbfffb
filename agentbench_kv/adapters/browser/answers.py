"""EM-norm: exact match after case, punctuation, articles, numbers and dates are made alike.

It is not the metric of the FRAMES or BrowseComp-Plus papers, which ask an LLM judge: an answer in
other words counts as wrong here. It needs no model, and is never put in the judge's column.

`seal` hides transcripts from crawlers and reports, it does not protect: whoever has this file can
open them. It is what the authors of BrowseComp ask for, so that their questions do not end up in
training data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_MONTHS = [
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
]  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(_MONTHS, start=1)}

_NUMBERS |= {name[:3]: number for name, number in _NUMBERS.items()} | {"sept": 9}

_MONTH = rf"(?P<month>{'|'.join(sorted(_NUMBERS, key=len, reverse=True))})\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_FORMS = tuple(
    re.compile(rf"(?<![\w-]){form}(?![\w-])")
    for form in (
        rf"{_DAY}\s+(?:of\s+)?{_MONTH}(?:\s*,?\s*(?:of\s+)?{_YEAR})?",
        rf"{_MONTH}\s+(?:the\s+)?{_DAY}(?:\s*,?\s*{_YEAR})?",
        rf"{_MONTH}\s*,?\s*(?:of\s+)?{_YEAR}",
        r"(?P<year>\d{4})-(?P<number>\d{1,2})-(?P<day>\d{1,2})",
    )
)


def plain_dates(text: str) -> str:
    """Return a case-folded text with its dates as `date<year>m<month>d<day>`.

    Parts not given are left out. Days and months in digits alone (`4/7/1776`) stay, because their
    order is not known.

    >>> plain_dates("on 4th of july, 1776")
    'on date1776m7d4'
    """
    for form in _FORMS:
        text = form.sub(_written, text)
    return text


def _written(match: re.Match[str]) -> str:
    found = match.groupdict()
    month = int(found["number"]) if found.get("number") else _NUMBERS[found["month"]]
    day = int(found["day"]) if found.get("day") else 0
    if not (1 <= month <= 12 and day <= 31):
        return match[0]
    year = found.get("year") or ""
    return f"date{year}m{month}" + (f"d{day}" if day else "")


_UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {word: value for value, word in enumerate(_UNITS)}

_VALUES |= {word: 10 * value for value, word in enumerate(_TENS, start=2)}

_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_IRREGULAR = {
    "first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12,
}  # fmt: skip
_ORDINALS = {f"{word}th": value for word, value in _VALUES.items()} | _IRREGULAR

_ORDINALS |= {word[:-1] + "ieth": _VALUES[word] for word in _TENS}

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_LONGEST_NUMBER = 1000  # digits that are worth computing with; `int` refuses 4,300


def digits(text: str) -> str:
    """Return a number in digits without leading and trailing zeros: `-007.50` is `-7.5`."""
    whole, _, fraction = text.removeprefix("-").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    sign = "-" if text.startswith("-") else ""
    return sign + (f"{whole}.{fraction}" if fraction else whole)


def spelled_numbers(words: Sequence[str]) -> list[str]:
    """Return the words with every run of number words as one number in digits.

    >>> spelled_numbers("two hundred and five of twenty first 3.5 million".split())
    ['205', 'of', '21st', '3500000']
    """
    result: list[str] = []
    position = 0
    while position < len(words):
        text, used = _run(words, position)
        result.append(text)
        position += used
    return result


def _run(words: Sequence[str], start: int) -> tuple[str, int]:
    """Return the number that begins at a word and how many words it takes; or the word itself."""
    total, part, used, last = 0, 0, 0, 0
    position = start
    while position < len(words):
        word = words[position]
        if word in _VALUES and _fits(_VALUES[word], part, last):
            part, last = part + _VALUES[word], _VALUES[word]
        elif word in _ORDINALS and _fits(_ORDINALS[word], part, last):
            return ordinal(total + part + _ORDINALS[word]), position + 1 - start
        elif word == "hundred" and 0 < part < 10:
            part, last = 100 * part, 100
        elif word in _SCALES and part:
            total, part, last = total + part * _SCALES[word], 0, 1000
        elif word == "and" and last >= 100 and _goes_on(words, position + 1):
            position += 1
            continue
        else:
            break
        position += 1
        used = position - start
    return (str(total + part), used) if used else _scaled(words, start)


def _fits(value: int, part: int, last: int) -> bool:
    """Whether a word may follow in the same number: units after tens, anything after hundreds."""
    if last == 0 or last >= 100:
        return True
    return part % 100 >= 20 and part % 10 == 0 and 0 < value < 10


def _goes_on(words: Sequence[str], position: int) -> bool:
    return position < len(words) and (words[position] in _VALUES or words[position] in _ORDINALS)


def _scaled(words: Sequence[str], start: int) -> tuple[str, int]:
    """Return digits followed by a scale word (`3.5 million`) as one number."""
    word = words[start]
    if not _NUMBER.fullmatch(word):
        return word, 1
    if start + 1 < len(words) and words[start + 1] in _SCALES and len(word) <= _LONGEST_NUMBER:
        whole, _, fraction = word.partition(".")
        scale = _SCALES[words[start + 1]]
        exact = int(whole + fraction) * scale
        if exact % 10 ** len(fraction) == 0:
            return str(exact // 10 ** len(fraction)), 2
    return digits(word), 1


def ordinal(value: int) -> str:
    """Return a number's ordinal: `21st`."""
    teen = 10 <= value % 100 <= 19
    return f"{value}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(value % 10, 'th')}"


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


SEALED = "sealed"
_PHRASE = b"kvbench: benchmark data, not to be published in plain text"


def seal(data: Any) -> dict[str, str]:
    """Return JSON data as an object whose text means nothing to a reader."""
    plain = json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return {SEALED: base64.b64encode(_mixed(plain)).decode()}


def unseal(data: Any) -> Any:
    """Return what `seal` was given; anything else comes back as it is."""
    if not (isinstance(data, dict) and set(data) == {SEALED}):
        return data
    return json.loads(_mixed(base64.b64decode(data[SEALED])))


def _mixed(data: bytes) -> bytes:
    stream = hashlib.shake_256(_PHRASE).digest(len(data))
    return bytes(a ^ b for a, b in zip(data, stream, strict=True))
