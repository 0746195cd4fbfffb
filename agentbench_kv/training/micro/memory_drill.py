"""Dense rows for the auxiliary turn: results without the session around them, then the question.

Whether a scan is over depends on a later slip with its item's name, and a session asks that a few
times in a thousand tokens. Here every other result is a scan, a slip stands near it or does not,
and other names stand between.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from agentbench_kv.adapters.micro.episode import Cursor
from agentbench_kv.adapters.micro.generate import NAMES, READING, TOOL, draw_code
from agentbench_kv.training.micro.conversation import PROMPT, LabelledText, question

MOST_SCANS = 7
_DOOR = 0.3  # share of slips behind a door
_LOG = 0.4  # share of results with a log


def memory_drill(seed: int) -> LabelledText:
    """Write the drill of a seed, of some 60 to 400 tokens."""
    rng = random.Random(f"memory drill/{seed}")
    wrapped = rng.random() < 0.5  # as sessions have them
    listed, lines = [], []
    for number, (field, name, stale) in enumerate(_results(rng)):
        listed.append(Cursor(number, name, stale))
        result = f'{{"cursor": {number}, {_handle(rng, field, name)}{_log(rng)}}}'
        lines.append(f"<tool_response>\n{result}\n</tool_response>\n" if wrapped else f"{result}\n")
    text = "<|im_start|>user\n" + "".join(lines).rstrip("\n") + "<|im_end|>\n"
    session = LabelledText(
        text, np.full(len(text), PROMPT, np.uint8), np.full(len(text), -1, np.int16)
    )
    return session + question(listed)


def _results(rng: random.Random) -> Iterator[tuple[str, str, bool]]:
    """Yield field, name and whether it is over, of each result: scans before their slips."""
    names = rng.sample(NAMES, rng.randint(2, MOST_SCANS))
    shipped = set(rng.sample(names, rng.randint(0, len(names))))
    waiting: list[str] = []
    if rng.random() < 0.5:
        yield "session", "sess", False
    while names or any(name in shipped for name in waiting):
        ready = [name for name in waiting if name in shipped]
        if names and (not ready or rng.random() < 0.5):
            waiting.append(names.pop())
            yield "port", waiting[-1], waiting[-1] in shipped
            continue
        name = rng.choice(ready)
        waiting.remove(name)
        if rng.random() < _DOOR:
            yield "door", "door", True
        yield "slip", name, True


def _handle(rng: random.Random, field: str, name: str) -> str:
    separator = TOOL if field in ("port", "session") else READING
    return f'"{field}": "{name}{separator}{"".join(draw_code(rng))}"'


def _log(rng: random.Random) -> str:
    if rng.random() >= _LOG:
        return ""
    entries = [
        f"{rng.choice(NAMES)}{rng.choice((TOOL, READING))}{''.join(draw_code(rng))}"
        for _ in range(rng.randint(1, 3))
    ]
    return f', "log": "{",".join(entries)}"'
