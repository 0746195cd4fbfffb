"""What a drop policy does to a session: what it sees, what it drops, what the messages become.

Messages are counted by the gateway's tokenizer, so that a policy sees the same figures under every
execution. Whoever holds the session calls this; nothing here is thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentbench_kv.adapters.base import LastUses
from agentbench_kv.engines.base import KVEvent, KVStats
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.messages import Message, name_and_arguments, text_of, tool_call
from agentbench_kv.methods.dropping.policy import Drop, DropMethod, History, Part, Role, What
from agentbench_kv.methods.spans import SpanRange

CLEARED = "[cleared]"
# What asks for a summary; the answer takes the place of what it is about.
SUMMARISE = (
    "Summarise the conversation so far for yourself: it will be replaced by your summary. Keep "
    "every fact, name, number and identifier that may still be needed, what was done and what "
    "came of it, and what is still to be done. Answer with the summary alone; call no functions."
)
SUMMARY = "Summary of the conversation so far:\n\n{}"

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


@dataclass(frozen=True)
class StandIn:
    """What stands where messages were."""

    at: int  # the first of them
    text: str


@dataclass
class Spot:
    """Where a message stands in a session's token log; None if nobody can tell."""

    content: SpanRange | None = None
    end: int | None = None  # behind all of it; where the next message begins
    answer: SpanRange | None = None  # of a message that was generated: all of it


@dataclass
class SessionDrops:
    """What a policy has dropped of one session so far.

    `tokens_of` returns the tokens of a text.
    """

    method: DropMethod
    context: int
    tokens_of: Callable[[str], int]
    key: str  # the session's, the same in every run of a task
    seed: int = 0  # of the request: the run's, for this sample and trial
    dropped: set[Drop] = field(default_factory=set)
    summary: StandIn | None = None
    seen: int = 0  # messages that the model has read or written
    requests: int = 0
    spots: list[Spot] = field(default_factory=list)  # of the messages seen, under `span`
    losses: int = 0  # how often the engine has lost the session's rows
    last_uses: LastUses | None = None  # of its tool results, where somebody foresees them
    aside: Aside | None = None  # the question which results are expired, not answered yet
    figures: dict[str, int] = field(default_factory=dict)  # what came of such questions
    written_off: int = 0  # tokens that left as the history was written anew
    longest: int = 0  # most tokens that a request added; what is read or told again is not new
    told: int = 0  # most tokens that the session came to before it began anew
    peak_beside: int = 0  # most tokens held at once with a request beside the session

    def copy(self) -> SessionDrops:
        """Return what a fork of the session goes on with."""
        twin = replace(self, aside=None, longest=0, peak_beside=0)
        twin.dropped, twin.spots = self.dropped.copy(), self.spots.copy()
        twin.figures = self.figures.copy()
        return twin

    def restart(self) -> None:
        """Forget what was dropped: the client told another story."""
        self.dropped, self.summary, self.seen, self.spots = set(), None, 0, []
        self.written_off = 0

    def account(self, stats: KVStats) -> KVStats:
        """Return an engine's account of the session with what only its history shows."""
        logical, method = stats.logical + self.written_off, self.method
        budget = method.budget_at(logical) if method.takes_budget else stats.budget
        peak = max(stats.peak_live, self.peak_beside)
        return replace(
            stats,
            logical=logical,
            budget=budget,
            longest_prefill=self.longest,
            peak_live=peak,
            # What is held beside the session is as large as its own rows.
            peak_bytes=stats.peak_bytes * peak // max(stats.peak_live, 1),
            peak_alone=stats.peak_live,
            figures=dict(self.figures),
        )

    def beside(self, live: int, tokens: int) -> None:
        """Take in that a request beside the session held tokens of its own on top of `live` ones.

        Those are the session's when the request was over, and so the most of that time: nothing
        leaves while one is under way.
        """
        self.peak_beside = max(self.peak_beside, live + tokens)

    def rewritten(self, before: KVStats, left: int, recomputed: int = 0) -> KVStats:
        """Return the account of writing the history anew: what it came to `before`, what is left.

        `left` are tokens of the history that are in the new prompt, `recomputed` are read again.
        Where no fewer are left, as behind a long summary, that is no event.
        """
        gone = max(0, before.live - left)
        event = KVEvent(before.decode_tokens, before.logical, before.live, left, 0)
        self.written_off += gone
        events = [event] if gone else []
        return KVStats(events=events, evicted=gone, recomputed=recomputed, rewrites=1)

    def decide(
        self, messages: Sequence[Message], stats: KVStats, new: int, *, anew: bool = False
    ) -> frozenset[Drop]:
        """Return what leaves before a request is answered that adds `new` tokens to a session.

        `stats` are of the session before it. Where it begins `anew`, all of the history is new to
        the model, and for the bound no more than what the session had never come to: a client that
        tells its history otherwise each time would set the bound of its own peak.
        """
        if self.method.foresees and self.last_uses is None:
            raise UsageError(
                f"method {self.method.label!r} must know which results are needed later, and of "
                "this session nobody does; use it in kvbench run, on a task that says it"
            )
        self.requests += 1
        live, logical = stats.live, stats.logical
        if anew:
            self.restart()
            self.told, live, logical = max(self.told, logical), 0, 0
        self.longest = max(self.longest, new - (self.told if anew else 0))
        history = self.history(messages, live + new, logical + new)
        drops = self.method.decide(history)
        return frozenset(d for d in drops if history.parts[d.message].may_go(d.what))

    def history(self, messages: Sequence[Message], tokens: int = 0, logical: int = 0) -> History:
        """Return what a policy sees of a session that comes to so many live tokens."""
        key = f"{self.key}/{self.seed}/{self.requests}"
        return History(self._parts(messages), tokens, self.context, logical, key)

    def count(self, figure: str, by: int = 1) -> None:
        """Count something that the method did or met."""
        self.figures[figure] = self.figures.get(figure, 0) + by

    def summarise(
        self,
        messages: Sequence[Message],
        wanted: frozenset[Drop],
        ask: Callable[[Sequence[Message], int], str],
    ) -> bool:
        """Have the model summarise what leaves, with what an earlier summary said of the rest.

        `ask` answers messages with at most so many tokens. False if there is no summary: the model
        had no room for it, was cut off, or said nothing but thoughts or calls; then nothing leaves.
        """
        old = messages[: max(drop.message for drop in wanted) + 1]
        asked = [*self.edited(old), {"role": "user", "content": SUMMARISE}]
        text = ask(asked, self.method.summary_tokens).strip()
        if not text:
            self.count("summaries_not_made")
            return False
        gone = [drop.message for drop in self.dropped | wanted if drop.what is What.MESSAGE]
        self.summary = StandIn(min(gone), text)
        return True

    def edited(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the model is shown them where they are written anew."""
        kept: list[Message] = []
        for number, message in enumerate(messages):
            if self.summary is not None and self.summary.at == number:
                kept.append({"role": "user", "content": SUMMARY.format(self.summary.text)})
            if Drop(number, What.MESSAGE) not in self.dropped:
                kept.append(self._edited(number, message))
        return kept

    def spans(
        self, drops: Iterable[Drop], phase_runs: Callable[[SpanRange, What], list[SpanRange]]
    ) -> list[SpanRange]:
        """Return the logical spans of drops, in order, joined where they touch.

        `phase_runs` returns where an answer's thoughts or calls stand.
        """
        found: list[SpanRange] = []
        for drop in sorted(drops):
            spot = self.spots[drop.message]
            if drop.what is What.MESSAGE:
                begin = self.spots[drop.message - 1].end if drop.message else 0
                found += [] if begin is None or spot.end is None else [(begin, spot.end)]
            elif drop.what is What.RESULT:
                found += [spot.content] if spot.content else []
            elif spot.answer is not None:
                found += phase_runs(spot.answer, drop.what)
        return joined(found)

    def _parts(self, messages: Sequence[Message]) -> list[Part]:
        tools, expired = _tool_names(messages), expired_results(messages, self.last_uses or ())
        dropped: dict[int, set[What]] = {}
        for drop in self.dropped:
            dropped.setdefault(drop.message, set()).add(drop.what)
        parts = []
        for number, message in enumerate(messages):
            gone = frozenset(dropped.get(number, ()))
            part = self._part(message, tools[number])
            unread = number >= self.seen or not self._placed(number, part.role)
            if not unread and self.method.exec != "text" and self.spots[number].answer is None:
                # Of what the client wrote, only contents and whole messages have a place.
                part = replace(part, inputs=0, thoughts=0)
            parts.append(replace(part, dropped=gone, fixed=unread, expired=number in expired))
        return parts

    def _placed(self, number: int, role: Role) -> bool:
        """Whether a message can be dropped: under `text` any, else one whose place is known.

        A result's content must be, too: it leaves alone.
        """
        if self.method.exec == "text":
            return True
        spot = self.spots[number]
        before = self.spots[number - 1].end is not None if number else True
        return (
            before and spot.end is not None and (spot.content is not None or role is not Role.TOOL)
        )

    def _part(self, message: Message, tools: tuple[str, ...]) -> Part:
        calls = message.get("tool_calls") or ()
        inputs = sum(self.tokens_of(json.dumps(name_and_arguments(call)[1])) for call in calls)
        names = sum(self.tokens_of(name) for name in tools) if calls else 0
        return Part(
            role=_ROLES.get(str(message.get("role")), Role.USER),
            tokens=self.tokens_of(text_of(message.get("content"))) + inputs + names,
            thoughts=self.tokens_of(str(message.get("reasoning_content") or "")),
            inputs=inputs,
            tools=tools,
            placeholder=self.tokens_of(CLEARED) if self.method.exec == "text" else 0,
        )

    def _edited(self, number: int, message: Message) -> Message:
        new = dict(message)
        if Drop(number, What.RESULT) in self.dropped:
            new["content"] = CLEARED
        if Drop(number, What.THOUGHTS) in self.dropped:
            new.pop("reasoning_content", None)
        if Drop(number, What.INPUTS) in self.dropped:
            new["tool_calls"] = [_without_arguments(call) for call in new.get("tool_calls") or ()]
        return new


def drop_key(session: str) -> str:
    """Return what stands for a session where lots are drawn: its name without its run's."""
    return session.partition("|")[2] or session


def as_text(message: Message) -> str:
    """Return what a message says, its calls included."""
    calls = [name_and_arguments(call) for call in message.get("tool_calls") or ()]
    return text_of(message.get("content")) + (json.dumps(calls) if calls else "")


def joined(spans: Iterable[SpanRange]) -> list[SpanRange]:
    """Return spans in order, those that touch or overlap as one, empty ones left out."""
    found: list[SpanRange] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def expired_results(messages: Sequence[Message], last_uses: LastUses) -> set[int]:
    """Return the messages with tool results that neither the next answer nor a later one needs."""
    turn, answers = -1, 0
    places: list[tuple[int, tuple[int, int]]] = []  # of results whose last use is known
    results = 0  # in this turn
    for number, message in enumerate(messages):
        role = message.get("role")
        if role == "user":
            turn, answers, results = turn + 1, 0, 0
        elif role == "assistant":
            answers += 1
        elif role == "tool":
            known = last_uses[turn] if 0 <= turn < len(last_uses) else ()
            places += [(number, known[results])] if results < len(known) else []
            results += 1
    return {number for number, last in places if last < (turn, answers)}


def _tool_names(messages: Sequence[Message]) -> list[tuple[str, ...]]:
    """Return for each message the tools it calls, or the one whose result it is."""
    by_id: dict[str, str] = {}
    waiting: list[str] = []  # of the last message with calls, those without a result, in order
    found: list[tuple[str, ...]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if calls:
            waiting = [name_and_arguments(call)[0] for call in calls]
            ids = (call.get("id") for call in calls)
            by_id |= {str(i): name for i, name in zip(ids, waiting, strict=True) if i}
            found.append(tuple(waiting))
        elif message.get("role") == "tool":
            default = waiting[0] if waiting else ""
            name = str(message.get("name") or by_id.get(str(message.get("tool_call_id")), default))
            waiting = waiting[1:]
            found.append((name,) if name else ())
        else:
            found.append(())
    return found


def _without_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    return tool_call(call.get("id", ""), name_and_arguments(call)[0], "{}")
