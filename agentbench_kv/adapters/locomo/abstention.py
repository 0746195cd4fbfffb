"""Whether an answer says that the conversation does not tell.

For questions whose premise is false that is the right answer, for all others a wrong one. The same
rule reads both, so that an agent which always says so, or never, gains nothing over all.
"""

from __future__ import annotations

import re
import string

_LONGEST = 40  # words of an answer that abstains; more is no short phrase but a bet on everything
_TOLD = (
    "mentioned|stated|specified|said|discussed|provided|given|known|available|answerable|"
    "indicated|described|recorded|disclosed|shared|told|revealed|addressed|talked about|"
    "clear|applicable|sure"
)
_TELL = (
    "mention|say|state|specify|discuss|talk|tell|indicate|provide|reveal|share|contain|describe|"
    "give|include|address"
)
_NOTHING = "information|mention|record|indication|evidence|answer|details?|reference|such"
_NOT = r"(?:\bnot|\bnever|n't)"
_PHRASES = re.compile(
    "|".join(
        (
            rf"{_NOT} (?:\w+ ){{0,2}}(?:{_TOLD})\b",
            rf"(?:do|does|did)(?: not|n't) (?:\w+ ){{0,2}}(?:{_TELL}|know)\b",
            rf"never (?:{_TELL}|mentions|says|said)\b",
            r"\b(?:says?|said) nothing\b",
            r"(?:not|n't) (?:\w+ ){0,2}information\b",
            rf"\bno (?:\w+ )?(?:{_NOTHING})\b",
            r"\bcan(?: ?not|n't) (?:be )?(?:tell|say|answer|determined?|answered|known)\b",
            r"(?:^|\b(?:is|are|was|were|remains?) )(?:unknown|unanswerable|unspecified|unclear)\b",
            r"^(?:n/?a|none|nothing)$",
        )
    )
)
_QUOTES = str.maketrans("\u2018\u2019", "''")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LITTLE = frozenset(("a", "an", "the", "and", "of", "to", "in", "for", "is", "was", "it"))


def abstains(answer: str) -> bool:
    """Return whether a short answer says that the conversation does not tell."""
    plain = " ".join(answer.translate(_QUOTES).casefold().split()).rstrip(".!")
    return len(plain.split()) <= _LONGEST and _PHRASES.search(plain) is not None


def resists(answer: str, question: str, trap: str, right: str = "") -> bool:
    """Return whether an answer to a question with a false premise is right.

    It says that the conversation does not tell, or what else the file has as `right` (`No`), and
    does not give the trap's own words: an answer that says both bets on both.
    """
    # Two of the file's traps say themselves that nothing was told.
    lure = frozenset() if abstains(trap) else _words(trap) - _words(question)
    if lure and lure <= _words(answer):
        return False
    return abstains(answer) or (bool(right) and _begins(answer) == _begins(right))


def _begins(text: str) -> str:
    words = text.casefold().translate(_NO_PUNCTUATION).split()
    return words[0] if words else ""


def _words(text: str) -> frozenset[str]:
    plain = text.translate(_QUOTES).casefold().translate(_NO_PUNCTUATION)
    return frozenset(plain.split()) - _LITTLE
