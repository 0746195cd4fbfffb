"""Dates in the ways English writes them, brought to one form for comparing answers."""

from __future__ import annotations

import re

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
