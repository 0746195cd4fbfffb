"""The closed vocabulary of the depot world: names, separators and the codes that must be recalled.

A fact of an episode is a *handle*, `<name><separator><code>`, as in `bag/timu`. The separator says
where the fact was first stated, the code is two of 64 syllables, so it cannot be guessed.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

# Left out: syllables that would merge with the words of the chat template when tokenised.
CLASHING = {"ge", "gi", "me", "ne", "ra", "te"}
SYLLABLES = tuple(c + v for c in "bdfghklmnprstv" for v in "aeiou" if c + v not in CLASHING)

_WORDS = """
bag ban bar bat bay bed bet bib bin bog bow box bud bug bun bus dab dam day den dew
dig dip dog dot dug fan fat fax fig fin fir fog fox fun fur gag gap gas god gum gun
gut ham hat hay hen hip hog hop hub hug hut kid kin kit lab lad lap law leg lid lip
lot mat map mop mud mug nap nib nod nun nut pad pan paw peg pen pet pig pin pit pod
pot pub pup rib rim rod rot rug rum run sap saw sax set sip sob sod son sum sun tab
tan tap tar tax tin tip top tub tug van vat vet vow
"""
NAMES = tuple(_WORDS.split())

TOOL, ACT, THINK, RULE, MEMO = "/", "#", ":", "=", "@"
"""Separators by source: tool results, call arguments, conclusions, system rules, the user."""

HINT, READING = "~", "+"
"""Separators of passing facts: the user's job code of a turn, the readings of a tool result."""

HANDLE = re.compile(rf"([a-z]+)([/#:=@~+])((?:{'|'.join(SYLLABLES)}){{2}})(?![a-z])")
"""Matches one handle in any text: groups name, separator, code."""

Code = tuple[str, str]
"""Two syllables."""


@dataclass(frozen=True)
class Handle:
    """A named fact, as `str` writes it in texts."""

    name: str  # what the fact is about
    separator: str  # where it was first stated
    code: Code

    def __str__(self) -> str:
        return self.name + self.separator + "".join(self.code)


def draw_code(rng: random.Random) -> Code:
    return rng.choice(SYLLABLES), rng.choice(SYLLABLES)
