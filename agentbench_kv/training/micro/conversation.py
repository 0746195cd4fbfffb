"""Episodes as text with a label on every character: what a training row is cut from.

Drills are dense rows for the first stages: an episode's facts without its prose, asked again and
again. An induction circuit that binds a code to its name *and* separator is slow to appear in full
episodes, where few tokens recall anything. In a drill every fifth token does, under the same rules:
codes of `#` and `:` are first made from the last hint and reading, or invented, all others random.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentbench_kv.adapters.micro.episode import (
    TRIGGER,
    Episode,
    ExpectedCall,
    ExpectedReply,
    Slot,
    auxiliary_reply,
    cursors,
)
from agentbench_kv.adapters.micro.generate import (
    ACT,
    HANDLE,
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
from agentbench_kv.training.sidequest.annotation import reasoning, verdict

LABELS = (
    "prompt", "noise", "template", "name", "memory", "copied",
    "think/derived", "act/derived", "tool/local",
    "think/recurring", "act/recurring", "tool/recurring", "others/recurring",
    "think/one_shot", "act/one_shot", "tool/one_shot", "others/one_shot",
)  # fmt: skip
"""What a token is: given, given and random, the agent's format, a name it picks, the auxiliary
answer, a code it repeats, or a code it recalls, by source and kind."""
PROMPT, NOISE, TEMPLATE, NAME, MEMORY, COPIED = range(6)
EVIDENCE = range(COPIED + 1, len(LABELS))
"""Labels of codes that have to be found in the context."""
PAD = len(LABELS)
NAMED = re.compile(rf"\b({'|'.join(NAMES)})[/#:=@~+\"]")

FIELDS = {TOOL: "port", ACT: "tag", THINK: "plan", RULE: "gate", MEMO: "gate"}
SOURCES = {TOOL: "tool", ACT: "act", THINK: "think", RULE: "others", MEMO: "others"}
INVENTED = 0.35
"""Share of plans and tags drawn at random, so that making them anew is no way to recall them."""

Labels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Part:
    """A stretch of text, its default label, and the calls whose tokens it belongs to."""

    text: str
    label: int
    slots: Sequence[Slot] = ()
    cursor: int = -1


@dataclass(frozen=True)
class LabelledText:
    """A whole session; arrays have one entry per character."""

    text: str  # as the chat template renders it
    labels: Labels
    # Of the call or response it is part of; -1 outside of both.
    cursor: npt.NDArray[np.int16]

    def __add__(self, other: LabelledText) -> LabelledText:
        labels = np.concatenate([self.labels, other.labels])
        cursor = np.concatenate([self.cursor, other.cursor])
        return LabelledText(self.text + other.text, labels, cursor)


def whole_session(episode: Episode) -> LabelledText:
    """Render an episode with everything the agent should say."""
    return _join(_session(episode, len(episode.turns)))


def auxiliary(
    episode: Episode, turns: int, gone: Collection[int], *, reasoned: bool = False
) -> LabelledText:
    """Render the first `turns` user turns and the auxiliary one, where alone tokens count.

    The answer does not name the cursors in `gone`, which were evicted before. `reasoned` has it as
    SideQuest's training teaches it.
    """
    listed = [cursor for cursor in cursors(episode, turns) if cursor.number not in gone]
    session = _join(_session(episode, turns))
    session.labels[:] = PROMPT
    if not reasoned:
        return session + question(auxiliary_reply(listed))
    calls = [call for turn in episode.turns[:turns] for call in turn.calls]
    texts = {c.number: calls[c.number].result_json(c.number) for c in listed}
    kept = ~np.isin(session.cursor, list(gone))
    shown = "".join(np.array(list(session.text))[kept])
    return session + question(reasoned_reply(texts, [c.number for c in listed if c.stale], shown))


def reasoned_reply(results: Mapping[int, str], stale: Sequence[int], shown: str) -> str:
    """Write the answer to the trigger that SideQuest's training teaches."""
    return f"<think>\n{reasoning(results, stale, shown)}\n</think>\n\n{verdict(stale)}"


def question(reply: str) -> LabelledText:
    """Render the auxiliary turn alone, with its answer."""
    parts = [
        _Part(f"<|im_start|>user\n{TRIGGER}<|im_end|>\n<|im_start|>assistant\n", PROMPT),
        _Part(f"{reply}<|im_end|>", MEMORY),
        _Part("\n", PROMPT),
    ]
    return _join(parts, handles=False)


def _session(episode: Episode, turns: int) -> Iterator[_Part]:
    schemas = "".join(f"{json.dumps(tool)}\n" for tool in episode.tools)
    toolbox = f"\n\n<tools>\n{schemas}</tools>" if schemas else ""
    yield _Part(f"<|im_start|>system\n{episode.system}{toolbox}<|im_end|>\n", PROMPT)
    cursor = 0
    for turn in episode.turns[:turns]:
        yield _Part(f"<|im_start|>user\n{turn.text}<|im_end|>\n", PROMPT)
        for call in turn.calls:
            yield from _assistant(call, cursor)
            yield _Part("<|im_start|>user\n", PROMPT)
            response = f"<tool_response>\n{call.result_json(cursor)}\n</tool_response>"
            yield _Part(response, PROMPT, cursor=cursor)
            yield _Part("<|im_end|>\n", PROMPT)
            cursor += 1
        yield from _assistant(turn.reply, -1)


def _assistant(message: ExpectedCall | ExpectedReply, cursor: int) -> Iterator[_Part]:
    thought, opening, call = message.raw.partition("<tool_call>")
    before = len(HANDLE.findall(thought))
    yield _Part("<|im_start|>assistant\n", PROMPT)
    yield _Part(thought, TEMPLATE, message.slots[:before])
    yield _Part(opening + call, TEMPLATE, message.slots[before:], cursor)
    yield _Part("<|im_end|>", TEMPLATE)
    yield _Part("\n", PROMPT)


def _join(parts: Iterable[_Part], handles: bool = True) -> LabelledText:
    listed = list(parts)
    labels = [_labels(part, handles) for part in listed]
    owners = [np.full(len(part.text), part.cursor, np.int16) for part in listed]
    text = "".join(part.text for part in listed)
    return LabelledText(text, np.concatenate(labels), np.concatenate(owners))


def _labels(part: _Part, handles: bool) -> Labels:
    labels = np.full(len(part.text), part.label, np.uint8)
    if part.label == TEMPLATE:
        for match in NAMED.finditer(part.text):
            labels[match.start(1) : match.end(1)] = NAME
    if handles:
        for index, match in enumerate(HANDLE.finditer(part.text)):
            label = _slot_label(part.slots[index]) if part.label == TEMPLATE else NOISE
            labels[match.start(3) : match.end(3)] = label
    return labels


def _slot_label(slot: Slot) -> int:
    if slot.kind == "invented":
        return NOISE
    return COPIED if slot.copied else LABELS.index(f"{slot.source}/{slot.kind}")


def drill(seed: int, length: int) -> LabelledText:
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

    def write(self, length: int) -> LabelledText:
        novelty = self.rng.uniform(0.1, 0.5)
        self._say("<|im_start|>user", PROMPT)
        self._pass(HINT)
        self._pass(READING)
        for _ in range(length // 6):
            if self.rng.random() < self.passing:
                self._pass(self.rng.choice((HINT, READING)))
            self._fact(novelty)
        text = "".join(self.pieces)
        return LabelledText(text, np.concatenate(self.labels), np.full(len(text), -1, np.int16))

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
