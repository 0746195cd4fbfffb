"""Agent sessions of a given shape, made of words by rule: a trace for `bench serving --trace`.

Most of a session is tool results, so that a policy that clears them has something to clear. The
first prompt is a system message that all sessions have in common, a task, and tool uses that have
happened before (`"weight": 0`: they are read, nobody answers them again); every later turn brings
one more result. Lengths are counted by `kvbench`'s own reading of the file, in the model's tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import UsageError
from agentbench_kv.run.recordings import Recording, record_file

Message = dict[str, Any]

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_part",
        "description": "Read one part of a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "part": {"type": "integer"}},
            "required": ["path", "part"],
        },
    },
}
_THOUGHT = 12  # tokens of what the agent says before a call that has happened before
_LEAST = 8  # of any piece of text
_PASSES = 6  # in which lengths are corrected by what was counted


@dataclass(frozen=True)
class TraceShape:
    """Tokens of the first prompt and of every answer, and how many turns and sessions."""

    prompt: int
    output: int
    turns: int
    sessions: int
    system: int  # of the system message's own words, which all sessions have in common
    result: int  # of the words of a tool result
    seed: int = 0


@dataclass
class Sizes:
    """Tokens asked of the pieces that are corrected until a session has its lengths."""

    last_result: int  # of the last tool use that has happened before
    answers: list[int]


class Words:
    """Draws words of syllables; the same name says the same in every call."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed

    def text(self, name: str, tokens: int) -> str:
        """Return lines of words of about so many tokens, never more."""
        lines = self._lines(random.Random(f"{self._seed}/{name}"))
        said, held = [], 0
        while held < tokens:
            said.append(next(lines))
            held += len(self._tokenizer.encode(said[-1], add_special_tokens=False).ids)
        words = "".join(said).split(" ")
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._count(words[:middle]) <= tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return " ".join(words[:low]).strip()

    def _count(self, words: list[str]) -> int:
        text = " ".join(words).strip()
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _lines(self, rng: random.Random) -> Iterator[str]:
        number = 0
        while True:
            words = ["".join(_syllables(rng)) for _ in range(8)]
            yield f"{number}: {' '.join(words)}, {rng.randrange(1000)}\n"
            number += 1


def _syllables(rng: random.Random) -> Iterator[str]:
    for _ in range(rng.randrange(1, 4)):
        yield rng.choice("bdfgklmnprstvz") + rng.choice("aeiou")


def write_trace(path: Path, shape: TraceShape, model: str) -> list[Recording]:
    """Write a trace and return how `kvbench` reads it in the model's tokens.

    First prompts and answers have the lengths asked for to a token or so. UsageError where a first
    prompt has no room for the system message and a tool result.
    """
    tokenizer = Tokenizer.from_file(str(model_path(model) / "tokenizer.json"))
    words = Words(tokenizer, shape.seed)
    sizes = [Sizes(shape.result, [shape.output] * shape.turns) for _ in range(shape.sessions)]

    def written(count: int, uses: int) -> list[Recording]:
        lines = [session(words, shape, uses, n, sizes[n]) for n in range(count)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return record_file(path, model)

    one, two = (len(written(1, uses)[0].turns[0].prompt) for uses in (1, 2))
    uses = max(1, 1 + (shape.prompt - one) // (two - one))
    found: list[Recording] = []
    for _ in range(_PASSES):
        found = written(shape.sessions, uses)
        changed = [_correct(*pair, shape) for pair in zip(sizes, found, strict=True)]
        if not any(changed):
            break
    return found


def _correct(sizes: Sizes, found: Recording, shape: TraceShape) -> bool:
    """Ask for what was missing, or for less; return whether anything was far off."""
    missing = [shape.prompt - len(found.turns[0].prompt)]
    missing += [shape.output - len(turn.answer) for turn in found.turns]
    wanted = sizes.last_result + missing[0]
    if wanted < _LEAST:
        raise UsageError(
            f"a first prompt of {shape.prompt} tokens has no room for a system message of "
            f"{shape.system} and tool results of {shape.result}; make these smaller"
        )
    sizes.last_result = wanted
    asked = zip(sizes.answers, missing[1:], strict=True)
    sizes.answers = [max(_LEAST // 2, size + more) for size, more in asked]
    return any(abs(each) > 1 for each in missing)


def session(
    words: Words, shape: TraceShape, uses: int, number: int, sizes: Sizes
) -> dict[str, Any]:
    """Return one line of the trace."""
    said: list[Message] = [
        {"role": "system", "content": words.text("system", shape.system)},
        {"role": "user", "content": words.text(f"task {number}", 3 * _LEAST)},
    ]
    for use in range(uses):
        name = f"{number}, use {use}"
        size = sizes.last_result if use == uses - 1 else shape.result
        said.append({**_call(words, name, _THOUGHT, use), "weight": 0})
        said.append(_result(words, name, size, use))
    for turn, size in enumerate(sizes.answers):
        name, use = f"{number}, turn {turn}", uses + turn
        if turn == shape.turns - 1:
            said.append({"role": "assistant", "content": words.text(name, size)})
        else:
            said.append(_call(words, name, size, use))
            said.append(_result(words, name, shape.result, use))
    return {"id": f"session-{number}", "messages": said, "tools": [_TOOL]}


def _call(words: Words, name: str, thought: int, use: int) -> Message:
    arguments = json.dumps({"path": "notes.txt", "part": use})
    call = {
        "id": f"call-{use}",
        "type": "function",
        "function": {"name": "read_part", "arguments": arguments},
    }
    said = words.text(f"thought {name}", thought)
    return {"role": "assistant", "content": said, "tool_calls": [call]}


def _result(words: Words, name: str, tokens: int, use: int) -> Message:
    said = words.text(f"result {name}", tokens)
    return {"role": "tool", "tool_call_id": f"call-{use}", "content": said}
