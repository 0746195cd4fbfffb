"""Episodes as text with a label on every character: what a training row is cut from."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentbench_kv.adapters.micro.episode import Call, Episode, Reply, Slot
from agentbench_kv.adapters.micro.memory import TRIGGER, auxiliary_reply, cursors
from agentbench_kv.adapters.micro.words import HANDLE, NAMES

LABELS = (
    "prompt", "noise", "template", "name", "memory", "copied",
    "think/derived", "act/derived", "tool/local",
    "think/recurring", "act/recurring", "tool/recurring", "others/recurring",
    "think/one_shot", "act/one_shot", "tool/one_shot", "others/one_shot",
)  # fmt: skip
"""What a token is: given, given and random, the agent's format, a name it picks, the auxiliary
answer, a code it repeats, or a code it recalls, by source and kind."""

PROMPT, NOISE, TEMPLATE, NAME, MEMORY, COPIED = range(6)
PAD = len(LABELS)
EVIDENCE = range(COPIED + 1, len(LABELS))
"""Labels of codes that have to be found in the context."""

NAMED = re.compile(rf"\b({'|'.join(NAMES)})[/#:=@~+\"]")

Labels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Part:
    """A stretch of text, its default label, and the calls whose tokens it belongs to."""

    text: str
    label: int
    slots: Sequence[Slot] = ()
    cursor: int = -1


@dataclass(frozen=True)
class Conversation:
    """A whole session; arrays have one entry per character."""

    text: str  # as the chat template renders it
    labels: Labels
    # Of the call or response it is part of; -1 outside of both.
    cursor: npt.NDArray[np.int16]


def main(episode: Episode) -> Conversation:
    """Render an episode with everything the agent should say."""
    return _join(_session(episode, len(episode.turns)))


def auxiliary(episode: Episode, turns: int, gone: Collection[int]) -> Conversation:
    """Render the first `turns` user turns and the auxiliary one, where alone tokens count.

    The answer does not name the cursors in `gone`, which were evicted before.
    """
    listed = [cursor for cursor in cursors(episode, turns) if cursor.number not in gone]
    session = _join(_session(episode, turns))
    session.labels[:] = PROMPT
    tail = [
        _Part(f"<|im_start|>user\n{TRIGGER}<|im_end|>\n<|im_start|>assistant\n", PROMPT),
        _Part(f"{auxiliary_reply(listed)}<|im_end|>", MEMORY),
        _Part("\n", PROMPT),
    ]
    end = _join(tail, handles=False)
    return Conversation(
        session.text + end.text,
        np.concatenate([session.labels, end.labels]),
        np.concatenate([session.cursor, end.cursor]),
    )


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


def _assistant(message: Call | Reply, cursor: int) -> Iterator[_Part]:
    thought, opening, call = message.raw.partition("<tool_call>")
    before = len(HANDLE.findall(thought))
    yield _Part("<|im_start|>assistant\n", PROMPT)
    yield _Part(thought, TEMPLATE, message.slots[:before])
    yield _Part(opening + call, TEMPLATE, message.slots[before:], cursor)
    yield _Part("<|im_end|>", TEMPLATE)
    yield _Part("\n", PROMPT)


def _join(parts: Iterable[_Part], handles: bool = True) -> Conversation:
    listed = list(parts)
    labels = [_labels(part, handles) for part in listed]
    owners = [np.full(len(part.text), part.cursor, np.int16) for part in listed]
    text = "".join(part.text for part in listed)
    return Conversation(text, np.concatenate(labels), np.concatenate(owners))


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
