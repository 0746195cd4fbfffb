"""Numbers in words and in digits, brought to one form for comparing answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    if start + 1 < len(words) and words[start + 1] in _SCALES:
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
