"""Methods that drop messages: what they name may go, and goes exactly as their execution says.

Decisions are checked on random histories. Then the micro model's gateway plays a made-up session
of tool calls with given answers: under `span` the logits must be those of a plain model that is
blind to the rows that left, under `text` the log must be a fresh session's of the edited messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import SessionTrace, TraceRecorder
from agentbench_kv.conformance.reference import TOLERANCE, largest_difference, reference_error
from agentbench_kv.engines.base import EngineOptions, KVStats
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import load_model
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.cursors import places_of_cursors, with_cursors
from agentbench_kv.gateway.dropping import joined
from agentbench_kv.gateway.exchange import Options
from agentbench_kv.gateway.messages import Message, text_of
from agentbench_kv.gateway.session import Session
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.dropping.policy import Drop, DropMethod, History, Part, Role, What
from agentbench_kv.methods.dropping.sidequest import SideQuestPrompted
from agentbench_kv.methods.full import Full
from agentbench_kv.methods.spans import SpanRange

MODEL = "micro"
BUDGET = 500
"""Tokens under which the made-up session has to drop something, and keeps something."""

_SEEDS = range(200)
_TURNS = 7
# In the made-up session nothing needs a result but the answer behind it: two calls a turn, of one
# tool and of two.
_LAST_USES = [[(turn, 1), (turn, 2), (turn, 2)] for turn in range(_TURNS)]
_WORDS = ["alder", "birch", "cedar", "dogwood", "elm", "fir", "ginkgo", "hazel", "ivy", "juniper"]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look {name} up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
    for name in ("weather", "train")
]


def check_drops(method: DropMethod) -> list[CheckResult]:
    """Check a method's decisions, and a session in which it drops something."""
    if not isinstance(method, SideQuestPrompted):
        method = replace(method, budget=BUDGET, share=None, trigger="budget")
    decided = next(filter(None, (_decision_problem(method, seed) for seed in _SEEDS)), "")
    results = [CheckResult.unless(decided, "decisions", f"{len(_SEEDS)} random histories")]
    played = play(method)
    stats = played.stats
    results.append(CheckResult("something leaves", stats.evicted > 0, f"{stats.evicted} tokens"))
    results.append(CheckResult.unless(_account_problem(played), "accounting"))
    if method.exec == "text":
        results.append(CheckResult.unless(_rewrite_problem(played), "as a fresh session"))
    else:
        results.append(CheckResult.unless(_departed_problem(played), "the right tokens leave"))
    return [*results, _equality(method, played.trace)]


def random_history(seed: int) -> History:
    """Return a made-up history: calls and results in turns, some of them dropped or fixed."""
    draw = random.Random(seed)
    parts = [Part(Role.SYSTEM, draw.randrange(200), fixed=draw.random() < 0.5)]
    while len(parts) < 4 + draw.randrange(40):
        parts.append(Part(Role.USER, draw.randrange(1, 60)))
        for _ in range(draw.randrange(4)):
            names = tuple(draw.choice(_WORDS) for _ in range(draw.randrange(1, 4)))
            said = Part(Role.ASSISTANT, 40, draw.randrange(90), inputs=30, tools=names)
            parts += [said, *(Part(Role.TOOL, draw.randrange(300), tools=(n,)) for n in names)]
        parts.append(Part(Role.ASSISTANT, draw.randrange(1, 80), draw.randrange(50)))
    gone = [frozenset({What.RESULT}) if draw.random() < 0.2 else frozenset() for _ in parts]
    parts = [
        replace(part, dropped=left if part.role is Role.TOOL else frozenset())
        for part, left in zip(parts, gone, strict=True)
    ]
    read = len(parts) - draw.randrange(4)
    parts = [replace(part, fixed=part.fixed or n >= read) for n, part in enumerate(parts)]
    parts = [replace(p, expired=p.role is Role.TOOL and draw.random() < 0.5) for p in parts]
    tokens = sum(part.left(What.MESSAGE) for part in parts) + draw.randrange(200)
    return History(parts, tokens, 4096, key=f"seed {seed}")


def _decision_problem(method: DropMethod, seed: int) -> str:
    """Return what is wrong with the decision about one random history."""
    history = random_history(seed)
    drops = method.decide(history)
    if drops != method.decide(history):
        return f"seed {seed}: decides otherwise the second time"
    if not method.due(history) and drops:
        return f"seed {seed}: drops something although {history.tokens} tokens are within the limit"
    if any(not 0 <= drop.message < len(history.parts) for drop in drops):
        return f"seed {seed}: names a message that is not there"
    if method.foresees and not all(history.parts[drop.message].expired for drop in drops):
        return f"seed {seed}: drops a result that is still needed"
    if any(history.parts[drop.message].role is Role.SYSTEM for drop in drops):
        return f"seed {seed}: drops the system message"
    gone = [_without(part, n, drops) for n, part in enumerate(history.parts)]
    again = method.decide(replace(history, parts=gone))
    left = [drop for drop in drops & again if gone[drop.message].left(drop.what)]
    return f"seed {seed}: drops {left[0]} twice" if left else ""


def _without(part: Part, number: int, drops: frozenset[Drop]) -> Part:
    return replace(part, dropped=part.dropped | {d.what for d in drops if d.message == number})


@dataclass(frozen=True)
class Played:
    """The made-up session after its last answer."""

    trace: SessionTrace
    stats: KVStats
    # Of the last request whose history was written anew: its messages as they were left, and the
    # log's ids before its answer.
    rewritten: tuple[Sequence[Message], list[int]] | None
    dropped: list[tuple[What, str]]  # what was dropped, and the text of its message
    left: list[str]  # the text of every run of tokens that left the cache


def play(method: DropMethod) -> Played:
    """Play the session under a method on the micro model; the last answer is the model's own."""
    recorder, name = TraceRecorder(), "made-up"
    gateway = _gateway(method.below(), method, recorder)
    if method.foresees:
        gateway.foresee(name, _LAST_USES)
    last: tuple[Sequence[Message], list[int]] | None = None
    rewrites = 0

    def ask(messages: Sequence[Message], said: Message | None) -> None:
        nonlocal last, rewrites
        if said is None:
            result = gateway.chat(name, messages, _TOOLS, Options(max_tokens=24))
        else:
            result = gateway.force(name, messages, said, _TOOLS)
        drops = gateway.drops(name)
        if result.report.stats.rewrites > rewrites and drops is not None:
            rewrites = result.report.stats.rewrites
            answered = len(result.token_ids)
            last = (drops.edited(_shown(method, messages)), gateway.token_log(name)[0][:-answered])

    try:
        messages = _turns(ask)
        recorder.logits.clear()  # of logs that may have been written anew since
        ask(messages, None)
        trace = SessionTrace(tokens=gateway.token_log(name)[0], logits=recorder.logits[name])
        trace.events = recorder.events[name]
        drops = gateway.drops(name)
        gone = sorted(drops.dropped) if drops is not None else []
        shown = _shown(method, messages)
        dropped = [(drop.what, text_of(shown[drop.message].get("content"))) for drop in gone]
        left = [gateway.codec.decode(trace.tokens[a:b]) for a, b in _departed(trace)]
        return Played(trace, gateway.close_report(name).stats, last, dropped, left)
    finally:
        gateway.engine.shutdown()


def _shown(method: DropMethod, messages: Sequence[Message]) -> Sequence[Message]:
    return with_cursors(messages) if isinstance(method, SideQuestPrompted) else messages


def _departed(trace: SessionTrace) -> list[SpanRange]:
    """Return the runs of tokens that were not in the cache after the last event."""
    if not trace.events:
        return []
    event = trace.events[-1]
    kept = set(event.kept[0, 0].tolist())
    return joined((n, n + 1) for n in range(event.logical) if n not in kept)


def _turns(force: Callable[[Sequence[Message], Message], None]) -> list[Message]:
    """Play the given turns; return the messages with which the last, free one is asked."""
    draw = random.Random(7)
    messages: list[Message] = [
        {"role": "system", "content": "You look things up."},
        {"role": "user", "content": "Where does the first path lead?"},
    ]
    for turn in range(_TURNS):
        names = ["weather", "train"][: 1 + turn % 2]
        calls = [
            {
                "id": f"call_{turn}_{n}",
                "type": "function",
                "function": {"name": name, "arguments": f'{{"key": "{_WORDS[turn]} {n}"}}'},
            }
            for n, name in enumerate(names)
        ]
        said = {"role": "assistant", "content": f"I look for {_WORDS[turn]}.", "tool_calls": calls}
        force(messages, said)
        found = [" ".join(draw.choices(_WORDS, k=40)) for _ in calls]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, found, strict=True)
        ]
        messages += [said, *results]
        if turn % 2:
            told = {"role": "assistant", "content": f"It leads to {draw.choice(_WORDS)}."}
            force(messages, told)
            messages += [told, {"role": "user", "content": f"And from there, {_WORDS[turn]}?"}]
    told = {"role": "assistant", "content": "It ends here."}
    force(messages, told)
    # So much at once that the last request is above every limit.
    return [*messages, told, {"role": "user", "content": " ".join(draw.choices(_WORDS, k=150))}]


class _Answering(Gateway):
    """Answers what is asked beside a session as a trained model would: most results are expired."""

    def _aside(self, state: Session, messages: Sequence[Message], *rest: Any) -> Aside:
        if state.drops is None or not isinstance(state.drops.method, SideQuestPrompted):
            return super()._aside(state, messages, *rest)
        cursors = [*places_of_cursors(messages)][:-2]
        return Aside(lambda: f'{{"del_cursors": {cursors}}}')


def _gateway(below: Method, policy: DropMethod | None, recorder: TraceRecorder) -> Gateway:
    options = EngineOptions(MODEL, below, device="cpu", max_live_tokens=100_000)
    return _Answering(EmbeddedEngine.create(options, recorder=recorder), policy=policy)


def _account_problem(played: Played) -> str:
    """Check that what was seen, less what left, is what is held; the last id is never fed."""
    stats = played.stats
    held = len(played.trace.tokens) - 1
    live = held if stats.rewrites else held - stats.evicted
    if stats.live != live:
        return f"{stats.live} tokens live, expected {live}"
    # Under `text` what is written in place of messages is new.
    if not stats.rewrites and stats.logical != len(played.trace.tokens):
        return f"{stats.logical} tokens seen, expected {len(played.trace.tokens)}"
    if stats.peak_live > stats.logical:
        return f"at most {stats.peak_live} tokens live, of {stats.logical} ever seen"
    return ""


def _equality(method: DropMethod, trace: SessionTrace) -> CheckResult:
    """Compare the last answer's logits with a plain model's, blind to the rows that left."""
    network = load_model(MODEL, "float32", "cpu").network
    positions = "cache" if method.exec == "span+move" else "logical"
    largest = largest_difference(network, trace, positions)
    # Rotating keys costs the reference as many digits as the engine.
    tolerance = TOLERANCE + reference_error(network, trace.tokens, positions)
    detail = f"largest logit difference {largest:.2e} over {len(trace.logits)} positions"
    return CheckResult("masked-cache equality", largest <= tolerance, detail)


_EDGE = 8  # characters of a content that may share a token with the template


def _departed_problem(played: Played) -> str:
    """Check that the tokens which left are those of the dropped results and messages."""
    left = played.left
    for what, text in played.dropped:
        if what is What.RESULT and not any(
            run in text and len(run) >= len(text) - _EDGE for run in left
        ):
            return f"a result is not what left: {text[:40]!r}"
        if what is What.MESSAGE and not any(text in run for run in left):
            return f"a message has not left: {text[:40]!r}"
    parts = {what for what, _ in played.dropped}
    if parts == {What.RESULT} and len(left) != len(played.dropped):
        return f"{len(left)} runs of tokens left for {len(played.dropped)} results"
    return ""


def _rewrite_problem(played: Played) -> str:
    """Compare a log that was written anew with a fresh session's of the edited messages."""
    if played.rewritten is None:
        return "nothing was written anew"
    edited, log = played.rewritten
    plain = _gateway(Full(), None, TraceRecorder())
    try:
        fresh = plain.chat("fresh", edited, _TOOLS, Options(max_tokens=1))
        tokens, _ = plain.token_log("fresh")
    finally:
        plain.engine.shutdown()
    same = tokens[: -len(fresh.token_ids)] == log
    return "" if same else "the log is not that of the edited messages"
