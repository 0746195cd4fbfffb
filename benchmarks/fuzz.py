"""Random inputs for what reads text, requests, records and captures: no traceback, no hang.

    python benchmarks/fuzz.py [--inputs 1000000] [--only parser,phases,...] [--seed 0] [--from N]

Input number N of a target depends on the seed and N alone, so a finding is repeated by `--from N
--inputs 1`. What a target may raise is listed beside it; anything else, a broken promise among
them, is a finding, as is an input that takes more than `PATIENCE_S` of the processor.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import faulthandler
import io
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from agentbench_kv.analysis.captures import Capture
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import KVBenchError
from agentbench_kv.gateway.api_errors import ApiError
from agentbench_kv.gateway.messages import canonical, for_template, tools_key
from agentbench_kv.gateway.parsing import Delta
from agentbench_kv.gateway.readers import reader_for, unread_syntax
from agentbench_kv.gateway.requests import ChatRequest, CompletionRequest, parse_request
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.machine import FAMILIES, PhaseMachine, PhaseTable
from agentbench_kv.phases.syntax import SYNTAXES
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.results.files import append_lines
from agentbench_kv.results.lines import parse_lines, read_lines
from agentbench_kv.results.records import TrialRecord, TurnRecord, encode
from agentbench_kv.results.run_reader import latest_trials, latest_turns

PATIENCE_S = 10.0
Rng = random.Random
MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<|im_start|>",
    "<|im_end|>", "<tool_response>", "</tool_response>", "{", "}", "[", "]", '"name"',
    '"arguments"', "assistant\n", "user\n", "tool\n", "\n", " ", ",", ";",
)  # fmt: skip
WORDS = (
    "", "a", "name", "Ünïcödé", "\ud800", "\x00", "\u2063", "🦜", "NaN", "-Infinity", "1e999",
    "null", "\\u0000", "x" * 300, "\r\n", "../..", "%s", "\ufeff",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324)


class Hang(Exception):  # noqa: N818  it is what was found, not an error
    """An input took too long."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed: `run` makes an input from a generator and works it off."""

    run: Callable[[Rng], None]
    allowed: tuple[type[Exception], ...] = ()


# Random material.


def text(rng: Rng, pieces: int = 12) -> str:
    """Return markers, words and characters in any order."""
    kinds = (MARKERS, MARKERS, WORDS, "abc 0123'\"\\/:<|>")
    return "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(pieces)))


def value(rng: Rng, depth: int = 3) -> Any:
    """Return anything that JSON can say, and a little more."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 2:
        return text(rng, 4)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind < 6:
        return rng.choice(NUMBERS) if kind < 5 else rng.choice((float("nan"), float("inf")))
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {text(rng, 2): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def nested(rng: Rng) -> Any:
    """Return lists or objects in one another, up to beyond what Python can go down."""
    depth = rng.choice((10, 200, 900, 3000))
    made: Any = 1
    for _ in range(depth):
        made = [made] if depth % 3 else {"a": made}
    return made


def deep_text(rng: Rng) -> str:
    """Return JSON that no parser can go down."""
    depth = rng.choice((500, 1500, 100_000))
    return "[" * depth + "]" * rng.choice((0, depth))


def disturbed(rng: Rng, data: Any) -> Any:
    """Change a few places of a valid JSON value."""
    made = copy.deepcopy(data)
    for _ in range(rng.randrange(4)):
        place, parent = made, None
        key: Any = None
        while isinstance(place, dict | list) and place and rng.random() < 0.8:
            parent = place
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            place = place[key]
        new = rng.choice((nested, deep_text))(rng) if rng.random() < 0.02 else value(rng)
        if parent is None:
            made = new if rng.random() < 0.1 else made
        elif rng.random() < 0.2:
            del parent[key]
        elif rng.random() < 0.2 and isinstance(parent, dict):
            parent[text(rng, 2)] = new
        else:
            parent[key] = new
    return made


def damaged(rng: Rng, data: bytes) -> bytes:
    """Change bytes: flipped, cut out, doubled, cut off, replaced by zeros."""
    made = bytearray(data)
    for _ in range(1 + rng.randrange(4)):
        if not made:
            break
        start = rng.randrange(len(made))
        end = min(len(made), start + 1 + rng.randrange(rng.choice((2, 16, 64))))
        match rng.randrange(6):
            case 0:
                made[start] ^= 1 << rng.randrange(8)
            case 1:
                del made[start:end]
            case 2:
                made[start:start] = made[start:end]
            case 3:
                del made[start:]
            case 4:
                made[start:end] = bytes(end - start)
            case _:
                made[start:end] = rng.randbytes(end - start)
    return bytes(made)


# Parsers of generated text.


def _joined(deltas: Sequence[Delta]) -> tuple[str, str, list[Any]]:
    content = "".join(each.text for each in deltas if each.kind == "content")
    reasoning = "".join(each.text for each in deltas if each.kind == "reasoning")
    return content, reasoning, [each.call for each in deltas if each.kind == "tool_call"]


def _call_text(rng: Rng) -> str:
    call = {"name": "f", "arguments": {"x": value(rng, 2)}}
    try:
        written = json.dumps(disturbed(rng, rng.choice((call, [call], [call, call]))))
    except RecursionError:
        written = deep_text(rng)
    form = rng.choice(("<tool_call>{}</tool_call>", "{}", "<|python_tag|>{}", "[f(x={}, s='')]"))
    return form.replace("{}", written)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]


def parser(rng: Rng) -> None:
    """Check that a text in any chunks is one message, which can come back in a history."""
    syntax = SYNTAXES[rng.choice(list(SYNTAXES))]
    parts = []
    for _ in range(rng.randrange(5)):
        parts += [_call_text(rng) if rng.random() < 0.4 else text(rng, 8)]
        parts += rng.choices(syntax.markers, k=rng.randrange(3))
    whole = "".join(parts)
    thinking = rng.random() < 0.3
    messages = []
    for cuts in ([], sorted(rng.choices(range(len(whole) + 1), k=rng.randrange(9)))):
        reader = reader_for(syntax, lambda: "id", thinking=thinking, tools=TOOLS)
        deltas = []
        for start, end in pairwise([0, *cuts, len(whole)]):
            deltas += reader.feed(whole[start:end])
        deltas += reader.finish()
        assert _joined(deltas) == (reader.content, reader.reasoning, reader.tool_calls)
        messages.append((*_joined(deltas), reader.unparsable))
    assert messages[0] == messages[1], "the chunks decide what the message is"
    content, _, calls, _ = messages[0]
    for call in calls:
        given = json.loads(call["function"]["arguments"], parse_constant=_no_constant)
        assert isinstance(given, dict)
    # What was said comes back in the history of the next request.
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    canonical(message)
    json.dumps(for_template(message)).encode()
    unread_syntax(whole, syntax, thinking=thinking, tools=TOOLS)


def _no_constant(name: str) -> object:
    raise AssertionError(f"{name} is not JSON")


# Phases.


class Letters:
    """A tokenizer of markers, single characters and odd pieces, for the families' tables."""

    all_special_ids = (0,)
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012  what Hugging Face calls it

    def __init__(self, added: Sequence[str], pieces: Sequence[str]) -> None:
        self._texts = [*added, *pieces]
        self._added = {name: number for number, name in enumerate(added)}

    def __len__(self) -> int:
        return len(self._texts)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._added)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self._texts[each] if each < len(self._texts) else "" for each in ids)


@cache
def tables() -> list[tuple[PhaseTable, int]]:
    """Return tables of all families, some with markers of several tokens, and their sizes."""
    made = []
    letters = ["assistant", "user", "tool", "\n", "<", "th", "ink>", "</", "\ufffd", "", *MARKERS]
    for family, syntax in product(FAMILIES, SYNTAXES.values()):
        spans = [text for span in family.spans for text in (span.open, span.close) if text]
        always = [*family.detect, *family.opens, *family.closes, family.header_close]
        for added in (always, [*always, *spans, *syntax.markers]):
            tokenizer = Letters(list(dict.fromkeys(filter(None, added))), [*letters, *"{[`"])
            made.append((PhaseTable(family, TokenCodec(tokenizer), syntax), len(tokenizer)))
    real = load_tokenizer(model_path("micro"))
    return [*made, (PhaseTable.for_tokenizer(real), len(real))]


def phases(rng: Rng) -> None:
    """Check that tokens get the same labels at once and one by one, in another process too."""
    table, size = rng.choice(tables())
    few = sorted(table.atomic) or [0]
    tokens = [
        rng.choice(few) if rng.random() < 0.4 else rng.randrange(size + 2)
        for _ in range(rng.randrange(40))
    ]
    at_once = PhaseMachine(table).label_many(tokens)
    machine = PhaseMachine(table)
    singly = []
    for token in tokens:
        if rng.random() < 0.3:
            document = json.loads(json.dumps(machine.document()))
            machine = PhaseMachine.from_document(table, document)
        singly.append(machine.label(token))
    assert at_once == singly, "labels depend on the chunks"
    assert all(isinstance(each, Phase) for each in singly)


# Requests.

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_COMMON = {
    "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1,
    "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "session_id": "s",
    "kvbench": {"session": "s"}, "tool_choice": "auto", "n": 1, "logit_bias": {},
    "response_format": {"type": "text"}, "evoke_priority": 2.0, "evoke_pinned": True,
}  # fmt: skip
_CHAT = {
    **_COMMON,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ],
    "tools": [_TOOL],
}
_PROMPTS = ("text", [1, 2, 3], ["text"], [[1, 2]])


def requests(rng: Rng) -> None:
    """Check that a body is refused with words, or can be made the turn of a session."""
    if rng.random() < 0.7:
        body = disturbed(rng, _CHAT)
        request = parse_request(ChatRequest, _as_sent(body))
        request.options()
        for message in request.messages:
            canonical(message)
            for_template(message)
        tools_key(request.tools)
    else:
        body = disturbed(rng, {**_COMMON, "prompt": rng.choice(_PROMPTS), "ignore_eos": True})
        raw = parse_request(CompletionRequest, _as_sent(body))
        raw.options()
        raw.one_prompt()


def _as_sent(body: Any) -> Any:
    """Return the body as the server reads it; text that is no JSON is refused before."""
    try:
        return json.loads(json.dumps(body))
    except (RecursionError, ValueError) as error:
        raise ApiError(400, "not JSON") from error


# Records.


@cache
def record_lines() -> tuple[list[bytes], list[bytes]]:
    """Return lines of both kinds as runs hold them."""
    full = {
        "sample_id": "a-1", "trial": 0, "seed": 7, "status": "scored", "score": 0.5,
        "metrics": {"x_right": 1, "x_asked": 2, "why": "text"},
        "kv": {"peak_live": 9, "logical": 20, "events": 1, "mean_decode_kv": 3.5},
        "timing": {"ttft_ms": 1.5, "e2e_s": 2.0}, "usage": {"prompt_tokens": 3},
        "transcript": "transcripts/a.json", "prompt_sha": "0" * 64, "cluster": "c",
    }  # fmt: skip
    failed = {"sample_id": "b", "trial": 3, "seed": 1, "status": "timeout", "error": "slow"}
    turn = {"sample_id": "a-1", "trial": 0, "turn": 2, "phases": {"think": 3}, "ttft_ms": 1.0}
    trials = [encode(TrialRecord(**each)) for each in (full, failed)]
    return trials, [encode(TurnRecord(**turn))]


def records(rng: Rng) -> None:
    """Check that a damaged line costs nothing else, and what was read can be written again."""
    trials, turns = record_lines()
    kind, lines = rng.choice(((TrialRecord, trials), (TurnRecord, turns)))
    line = rng.choice(lines)
    if rng.random() < 0.5:
        with contextlib.suppress(RecursionError, ValueError):
            line = json.dumps(disturbed(rng, json.loads(line))).encode()
    else:
        line = damaged(rng, line)
    found = parse_lines(io.BytesIO(lines[0] + b"\n" + line + b"\n" + lines[0]), kind)
    assert found.records[0] == found.records[-1], "a damaged line cost its neighbours"
    for record in found.records:
        assert not parse_lines([encode(record) + b"\n"], kind).unreadable
    latest = latest_trials if kind is TrialRecord else latest_turns
    latest(found.records)  # type: ignore[arg-type]  # of one kind


def torn_files(rng: Rng) -> None:
    """Check that a torn end costs neither what is before it nor what is appended."""
    lines = record_lines()[0]
    path = _folder() / "samples.jsonl"
    tail = damaged(rng, lines[0])
    path.write_bytes(lines[0] + b"\n" + tail.replace(b"\n", b" "))
    append_lines(path, [lines[1]])
    found = read_lines(path, TrialRecord)
    ids = [record.sample_id for record in found.records]
    assert (ids[0], ids[-1], found.torn) == ("a-1", "b", False)


# Captures.


@cache
def _folder() -> Path:
    # In memory where there is such a place: a disk takes milliseconds for each file.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = tempfile.TemporaryDirectory(prefix="kvbench-fuzz-", dir=memory)
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _arrays(rng: Rng) -> dict[str, Any]:
    layers, heads, kv_heads, length, dim = 2, 4, 2, 6, 4
    made: dict[str, Any] = {
        "q": np.zeros((layers, heads, length, dim), np.float32),
        "k": np.ones((layers, kv_heads, length, dim), np.float16),
        "v": np.ones((layers, kv_heads, length, dim), np.float16),
        "positions": np.arange(length), "phase": np.arange(length) % 4, "now": np.array(5),
        "prompt": np.array(2), "tokens": np.arange(length), "decoded": np.arange(length) > 2,
    }  # fmt: skip
    for _ in range(rng.randrange(3)):
        name = rng.choice([*made, "positionss", "q_mean_real", "inv_freq", "extra"])
        shape = [rng.choice((0, 1, 2, 4, 6, 7)) for _ in range(rng.randrange(5))]
        dtype = rng.choice(("f2", "f4", "f8", "i8", "u1", "u8", "?", "c8", "U3", "M8[s]", ">f4"))
        made[name] = np.zeros(shape, dtype)
        if made[name].size and made[name].dtype.kind in "fiu":
            made[name].flat[0] = rng.choice((0, 1, 5, 250))
    return made


@cache
def _archive(number: int) -> tuple[str, bytes]:
    """Return the suffix and the content of one of the archives that are damaged."""
    rng = Rng(f"archive {number}")
    arrays = _arrays(rng)
    note = json.dumps(value(rng)) if rng.random() < 0.3 else "{}"
    if rng.random() < 0.5:
        buffer = io.BytesIO()
        write = np.savez_compressed if rng.random() < 0.3 else np.savez
        write(buffer, **arrays, **({"meta": np.array(note)} if rng.random() < 0.5 else {}))
        return ".npz", buffer.getvalue()
    plain = {
        name: torch.from_numpy(each.copy())
        for name, each in arrays.items()
        if each.dtype.kind in "biuf" and each.dtype.isnative
    }
    return ".safetensors", save(plain, {"meta": note})


def captures(rng: Rng) -> None:
    """Check that a damaged capture is refused in one line, and what is read fits together."""
    suffix, data = _archive(rng.randrange(2000))
    path = _folder() / f"capture{suffix}"
    path.write_bytes(damaged(rng, data) if rng.random() < 0.9 else data)
    found = Capture.load(path)
    assert found.q.shape[2] == len(found.positions)
    assert found.candidates >= 1


TARGETS: dict[str, Target] = {
    "parser": Target(parser),
    "phases": Target(phases),
    "requests": Target(requests, (ApiError, KVBenchError)),
    "records": Target(records),
    "torn_files": Target(torn_files),
    "captures": Target(captures, (KVBenchError,)),
}


@dataclass(frozen=True)
class Finding:
    """An input that broke a target."""

    target: str
    number: int
    what: str


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raise `Hang` where an input takes too long; end the process where even that is not heard."""

    def ring(*_: object) -> None:
        raise Hang(f"no end after {PATIENCE_S:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)


def fuzz(name: str, inputs: int, seed: int = 0, first: int = 0, most: int = 10) -> list[Finding]:
    """Work off inputs and return what was found, at most so much of it."""
    target, found = TARGETS[name], list[Finding]()
    with watched():
        for number in range(first, first + inputs):
            if number % 256 == 0 or number == first:
                faulthandler.dump_traceback_later(256 * PATIENCE_S, exit=True)
            rng = Rng(f"{seed}/{name}/{number}")
            # Of the processor's time: a busy machine makes anything late.
            signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
            try:
                target.run(rng)
            except target.allowed as error:
                if "\n" in str(error).strip():
                    found.append(Finding(name, number, f"more than a line: {error}"))
            except Exception:  # noqa: BLE001  whatever it is, it is what we look for
                found.append(Finding(name, number, traceback.format_exc(limit=-4)))
            if len(found) >= most:
                break
    return found


def main() -> int:
    """Fuzz what was asked for."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--inputs", type=int, default=1_000_000, help="of each target")
    options.add_argument("--only", default=",".join(TARGETS))
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--from", dest="first", type=int, default=0, help="number of the first")
    given = options.parse_args()
    wrong = 0
    print("| target | inputs | findings | seconds |\n|---|--:|--:|--:|", flush=True)
    for name in given.only.split(","):
        began = time.monotonic()
        found = fuzz(name, given.inputs, given.seed, given.first)
        wrong += len(found)
        print(f"| {name} | {given.inputs:,} | {len(found)} | {time.monotonic() - began:.0f} |")
        for each in found:
            again = f"--only {name} --seed {given.seed} --from {each.number} --inputs 1"
            print(f"\npython benchmarks/fuzz.py {again}\n{each.what}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
