"""Questions to be answered by browsing: their form, and some that are made by rule."""

from __future__ import annotations

import random
from dataclasses import dataclass

MADE = "made"  # in a run's provenance, where the benchmark's questions were not there
_MADE = 24
_PLACES = ("Lake", "Mill", "Harbour", "Orchard", "Quarry", "Lighthouse", "Station", "Bridge")
_NAMES = ("Aldern", "Brisk", "Corven", "Dunmere", "Eskholt", "Farrow", "Gildan", "Hexley")
_THINGS = ("boats", "lanterns", "steps", "windows", "benches", "apple trees")


@dataclass(frozen=True)
class BrowsingQuestion:
    """One item of a benchmark."""

    id: str
    question: str
    answer: str
    pages: tuple[str, ...] = ()  # URLs or ids of the documents the answer is known to need


def made_questions() -> list[BrowsingQuestion]:
    """Return the same questions at every call; nothing of a benchmark is in them."""
    rng = random.Random("kvbench's made questions")
    return [_made(number, rng) for number in range(_MADE)]


def _made(number: int, rng: random.Random) -> BrowsingQuestion:
    pages = [
        f"{name} {place}" for name in rng.sample(_NAMES, 2) for place in rng.sample(_PLACES, 1)
    ]
    thing, count = rng.choice(_THINGS), rng.randrange(3, 900)
    text = f"How many {thing} are there at {pages[0]}, says the page about {pages[1]}?"
    urls = tuple(f"https://made.invalid/{page.replace(' ', '_')}" for page in pages)
    return BrowsingQuestion(f"made-{number}", text, f"{count} {thing}", urls)
