"""Questions about a session, made by rule: each asks for one value that stands in it.

A value is asked for if the question's key names it and no other like it, if it is neither too short
nor too long, if nothing in the question gives it away, and if it is no word of the questions' own.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from agentbench_kv.adapters.base import Message
from agentbench_kv.adapters.probe.session import (
    ChatSession,
    ToolUse,
    text_of,
    thoughts_of,
    tool_uses,
)
from agentbench_kv.adapters.probe.values import has_length, normalise, words

_MARK = re.compile(r"@[0-9a-f]{8}$")
PHASES = ("tool", "act", "others", "think")
OF_RESULT = (
    "Look back at the call of {call}{which}. In its result, what is the value of {key}? "
    "Answer with the value only."
)
OF_ARGUMENT = (
    "Look back at the call of {call}{which}. What value did its argument {key} have? "
    "Answer with the value only."
)
OF_WORDS = (
    "Look back at {place}. What comes directly after the words “{key}”? "
    "Answer with that value only."
)
_OWN_WORDS = frozenset(
    word
    for text in (
        *(OF_RESULT, OF_ARGUMENT, OF_WORDS, "system message message number of the user thought"),
        *("true false null none undefined yes no ok success error assistant tool removed"),
    )
    for word in words(text)
)
_LONGEST_CALL = 300  # characters of a call in a question
_CONTEXT = 6  # words before a value in plain text that are its key
_FEWEST_WORDS = 3
# In plain text: what is quoted, and words with a digit or a sign that plain words lack.
_FACT = re.compile(r"(?<!\w)[\"']([^\"'\n]{2,32})[\"'](?!\w)|([\w#$@][\w.\-@:/#$%+]*)")
_MARKED = re.compile(r"[\d@_#]")
_SPACED = re.compile(r"[\w:]$")  # not in brackets or code


@dataclass(frozen=True)
class Probe:
    """A question about a session, and its answer."""

    question: str
    value: str
    phase: str  # of what states the value
    key: str  # what the question calls it
    message: int  # that states it


@dataclass(frozen=True)
class _Candidate:
    probe: Probe
    group: str  # values in the same place of calls of the same function


def make_probes(session: ChatSession, count: int, seed: str) -> list[Probe]:
    """Return at most `count` questions about a session, every phase in its turn.

    No two ask for the same value; fewer are the first of more.
    """
    rng, found = random.Random(f"{seed}/{session.id}"), candidates(session)
    by_phase = [[probe for probe in found if probe.phase == phase] for phase in PHASES]
    for probes in by_phase:
        rng.shuffle(probes)
    chosen: dict[str, Probe] = {}
    for probe in chain.from_iterable(zip_longest(*by_phase)):
        if probe is not None:
            chosen.setdefault(normalise(probe.value), probe)
    return list(chosen.values())[:count]


def sample_of(session: str, probes: Sequence[Probe]) -> str:
    """Return the name of a sample: its session's, with the mark of the questions asked in it."""
    return f"{session}@{probes_sha(probes)[:8]}"


def session_of(sample: str) -> str:
    """Return the name of a sample's session; of any but a probe's, the sample's own."""
    return _MARK.sub("", sample)


def probes_sha(probes: Sequence[Probe]) -> str:
    """Return the hash by which a session's questions are known."""
    text = json.dumps([asdict(probe) for probe in probes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def candidates(session: ChatSession) -> list[Probe]:
    """Return every question that may be asked about a session, in the session's order."""
    uses = tool_uses(session.messages)
    found = [*_of_results(session, uses), *_of_arguments(uses), *_of_words(session)]
    times = Counter((each.group, normalise(each.probe.value)) for each in found)
    asked = Counter(each.probe.question for each in found)
    chosen = [
        each.probe
        for each in found
        if times[each.group, normalise(each.probe.value)] == asked[each.probe.question] == 1
        and is_askable(each.probe)
    ]
    return sorted(chosen, key=lambda probe: probe.message)


def is_askable(probe: Probe) -> bool:
    """Whether a value has the right length, and neither question nor template gives it away."""
    value, asked = words(probe.value), words(probe.question)
    hidden = "".join(value) not in "".join(asked) and not set(value) <= set(asked)
    own = set(value) <= _OWN_WORDS
    return bool(value) and has_length(probe.value) and hidden and not own


def _of_results(session: ChatSession, uses: Sequence[ToolUse]) -> Iterator[_Candidate]:
    for use, number, times in _numbered(uses, lambda use: use.arguments):
        if use.result is None:
            continue
        call = _written(use.name, use.arguments)
        for path, value in _leaves(_parsed(text_of(session.messages[use.result]))):
            question = OF_RESULT.format(call=call, which=_which(number, times), key=path)
            probe = Probe(question, value, "tool", path, use.result)
            if len(call) <= _LONGEST_CALL:
                yield _Candidate(probe, f"result {use.name} {_pattern(path)}")


def _of_arguments(uses: Sequence[ToolUse]) -> Iterator[_Candidate]:
    for hidden in sorted({name for use in uses for name in use.arguments}):
        having = [use for use in uses if hidden in use.arguments]
        for use, number, times in _numbered(having, partial(_without, hidden=hidden)):
            call = _written(use.name, _without(use, hidden), "other ")
            for path, value in _leaves({hidden: use.arguments[hidden]}):
                question = OF_ARGUMENT.format(call=call, which=_which(number, times), key=path)
                probe = Probe(question, value, "act", path, use.message)
                if len(call) <= _LONGEST_CALL:
                    yield _Candidate(probe, f"argument {use.name} {_pattern(path)}")


def _of_words(session: ChatSession) -> Iterator[_Candidate]:
    """Ask for what stands behind words that the session holds once."""
    whole = " ".join(chain.from_iterable(map(_all_words, session.messages)))
    for place, phase, at, text in _texts(session.messages):
        for found in _FACT.finditer(text):
            value = (found[1] or found[2]).rstrip(".:/-")
            before = text[: found.start()].rsplit("\n", 1)[-1].split()[-_CONTEXT:]
            key = " ".join(before)
            if not _MARKED.search(value) and not found[1]:
                continue
            if len(words(key)) < _FEWEST_WORDS or not _SPACED.search(key):
                continue
            if whole.count(" ".join(words(key))) != 1:
                continue
            question = OF_WORDS.format(place=place, key=key)
            yield _Candidate(Probe(question, value, phase, key, at), f"words {key}")


def _texts(messages: Sequence[Message]) -> Iterator[tuple[str, str, int, str]]:
    """Yield plain texts: what a question calls them, their phase, message and text."""
    users = thoughts = 0
    for at, message in enumerate(messages):
        if message["role"] == "system":
            yield "the system message", "others", at, text_of(message)
        elif message["role"] == "user":
            users += 1
            yield f"message number {users} of the user", "others", at, text_of(message)
        elif thoughts_of(message):
            thoughts += 1
            yield f"your thought number {thoughts}", "think", at, thoughts_of(message)


def _all_words(message: Message) -> list[str]:
    calls = json.dumps(message.get("tool_calls") or "", ensure_ascii=False)
    return words(f"{thoughts_of(message)} {text_of(message)} {calls}")


def _numbered(
    uses: Iterable[ToolUse], shown: Callable[[ToolUse], Mapping[str, Any]]
) -> Iterator[tuple[ToolUse, int, int]]:
    """Yield calls, each with its number among those that a question names alike, and how many."""
    uses = list(uses)
    names = [_written(use.name, shown(use)) for use in uses]
    times, seen = Counter(names), Counter[str]()
    for use, name in zip(uses, names, strict=True):
        seen[name] += 1
        yield use, seen[name], times[name]


def _which(number: int, times: int) -> str:
    return "" if times == 1 else f", number {number} of {times} such calls"


def _written(name: str, arguments: Mapping[str, Any], other: str = "") -> str:
    given = json.dumps(arguments, ensure_ascii=False) if arguments else f"no {other}arguments"
    return f"{name} with {given}"


def _without(use: ToolUse, hidden: str) -> dict[str, Any]:
    return {name: value for name, value in use.arguments.items() if name != hidden}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield key path and text of every string and number inside JSON; its top alone is none."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{at}]")
    elif path and isinstance(value, str):
        yield path, value
    elif path and isinstance(value, int | float) and not isinstance(value, bool):
        yield path, json.dumps(value)


def _pattern(path: str) -> str:
    """Return a key path without the numbers in lists."""
    return re.sub(r"\[\d+\]", "[]", path)
