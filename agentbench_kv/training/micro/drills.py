"""Dense rows for the first stages: an episode's facts without its prose, asked again and again.

An induction circuit that binds a code to its name *and* separator is slow to appear in full
episodes, where few tokens recall anything. In a drill every fifth token does, under the same rules:
codes of `#` and `:` are first made from the last hint and reading, or invented, all others random.
"""

from __future__ import annotations

import random

import numpy as np

from agentbench_kv.adapters.micro.words import (
    ACT,
    HINT,
    MEMO,
    NAMES,
    READING,
    RULE,
    THINK,
    TOOL,
    Code,
    draw_code,
)
from agentbench_kv.training.micro.conversation import LABELS, NOISE, PROMPT, Conversation, Labels

FIELDS = {TOOL: "port", ACT: "tag", THINK: "plan", RULE: "gate", MEMO: "gate"}
INVENTED = 0.35
"""Share of plans and tags drawn at random, so that making them anew is no way to recall them."""

SOURCES = {TOOL: "tool", ACT: "act", THINK: "think", RULE: "others", MEMO: "others"}


def drill(seed: int, length: int) -> Conversation:
    """Write the drill of a seed, of roughly `length` tokens."""
    return _Drill(random.Random(f"drill/{seed}")).write(length)


class _Drill:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        # Few separators and many names make binding by name pay, the slowest thing to learn.
        self.names = rng.sample(NAMES, rng.randint(2, 12))
        self.separators = rng.sample("/#:=@", rng.choice((1, 1, 2, 3, 5)))
        self.passing = rng.choice((0.05, 0.25))
        self.known: dict[tuple[str, str], Code] = {}
        self.hint = self.reading = ("", "")
        self.pieces: list[str] = []
        self.labels: list[Labels] = []

    def write(self, length: int) -> Conversation:
        novelty = self.rng.uniform(0.1, 0.5)
        self._say("<|im_start|>user", PROMPT)
        self._pass(HINT)
        self._pass(READING)
        for _ in range(length // 6):
            if self.rng.random() < self.passing:
                self._pass(self.rng.choice((HINT, READING)))
            self._fact(novelty)
        text = "".join(self.pieces)
        return Conversation(text, np.concatenate(self.labels), np.full(len(text), -1, np.int16))

    def _pass(self, separator: str) -> None:
        """State a new hint or reading; the old one is over."""
        code = draw_code(self.rng)
        if separator == HINT:
            name, self.hint = "job", code
        else:
            name, self.reading = "now", code
        self._handle(name, separator, code, NOISE)

    def _fact(self, novelty: float) -> None:
        if self.known and self.rng.random() > novelty:
            key = self.rng.choice(list(self.known))
        else:
            key = (self.rng.choice(self.names), self.rng.choice(self.separators))
        if key in self.known:
            label = LABELS.index(f"{SOURCES[key[1]]}/one_shot")
        else:
            self.known[key], label = self._new(key[1])
        self._handle(*key, self.known[key], label)

    def _new(self, separator: str) -> tuple[Code, int]:
        """Return a code and what it is: made of the passing facts, or random."""
        if separator not in (ACT, THINK) or self.rng.random() < INVENTED:
            return draw_code(self.rng), NOISE
        first, second = self.reading, self.hint
        if separator == THINK:
            first, second = second, first
        return (first[0], second[1]), LABELS.index(f"{SOURCES[separator]}/derived")

    def _handle(self, name: str, separator: str, code: Code, label: int) -> None:
        quoted = separator in FIELDS and self.rng.random() < 0.3
        before = f'\n{{"{FIELDS[separator]}": "' if quoted else self.rng.choice("\n\n,")
        self._say(f"{before}{name}{separator}", PROMPT)
        self._say("".join(code), label)
        if quoted:
            self._say('"}', PROMPT)

    def _say(self, text: str, label: int) -> None:
        self.pieces.append(text)
        self.labels.append(np.full(len(text), label, np.uint8))
