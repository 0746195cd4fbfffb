"""Dense rows for the auxiliary turn: results without the session around them, then the question.

Whether a scan is over depends on a later slip with its item's name, and a session asks that a few
times in a thousand tokens. Here every other result is a scan, its slip came later or did not, and
other names stand between.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from agentbench_kv.adapters.micro.generate import NAMES, READING, THINK, TOOL, draw_code
from agentbench_kv.training.micro.conversation import (
    PROMPT,
    LabelledText,
    question,
    reasoned_reply,
)

MOST_SCANS = 7
_DOOR = 0.3  # share of slips behind a door
_LOG = 0.4  # share of results with a log
_PLAN = 0.5  # share of scans after which a plan is made


def memory_drill(seed: int) -> LabelledText:
    """Write the drill of a seed, of some 80 to 600 tokens."""
    rng = random.Random(f"memory drill/{seed}")
    wrapped = rng.random() < 0.5  # as sessions have them
    items = rng.sample(NAMES, rng.randint(2, MOST_SCANS))
    others = [name for name in NAMES if name not in items]
    texts, stale, lines = {}, [], []
    for number, (field, name, over) in enumerate(_results(rng, items)):
        texts[number] = f'{{"cursor": {number}, {_field(rng, field, name)}{_log(rng, others)}}}'
        stale += [number] if over else []
        before, after = ("<tool_response>\n", "\n</tool_response>") if wrapped else ("", "")
        lines.append(f"{before}{texts[number]}{after}")
        if field == "port" and rng.random() < _PLAN:
            lines.append(_handle(rng, name, THINK))
    text = "<|im_start|>user\n" + "\n".join(lines) + "<|im_end|>\n"
    given = np.full(len(text), PROMPT, np.uint8)
    session = LabelledText(text, given, np.full(len(text), -1, np.int16))
    return session + question(reasoned_reply(texts, stale, text))


def _results(rng: random.Random, items: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield field, name and whether it is over, of each result: scans before their slips."""
    shipped = set(rng.sample(items, rng.randint(0, len(items))))
    left, waiting = list(items), list[str]()
    if rng.random() < 0.5:
        yield "session", "sess", False
    while left or any(name in shipped for name in waiting):
        ready = [name for name in waiting if name in shipped]
        if left and (not ready or rng.random() < 0.5):
            waiting.append(left.pop())
            yield "port", waiting[-1], waiting[-1] in shipped
            continue
        name = rng.choice(ready)
        waiting.remove(name)
        if rng.random() < _DOOR:
            yield "door", "door", True
        yield "slip", name, True


def _field(rng: random.Random, field: str, name: str) -> str:
    separator = TOOL if field in ("port", "session") else READING
    return f'"{field}": "{_handle(rng, name, separator)}"'


def _handle(rng: random.Random, name: str, separator: str) -> str:
    return f"{name}{separator}{''.join(draw_code(rng))}"


def _log(rng: random.Random, names: Sequence[str]) -> str:
    if rng.random() >= _LOG:
        return ""
    size = rng.randint(1, 3)
    entries = [_handle(rng, rng.choice(names), rng.choice((TOOL, READING))) for _ in range(size)]
    return f', "log": "{",".join(entries)}"'
