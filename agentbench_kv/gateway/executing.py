"""Carrying out what a drop policy decides, in the token log and in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import groupby

from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.gateway.cursors import with_cursors
from agentbench_kv.gateway.dropping import SessionDrops, Spot, drop_key
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.planning import Planner
from agentbench_kv.gateway.session import Known, Plan, Session
from agentbench_kv.gateway.sidequest import Ask, SideQuests, Tools
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.dropping.policy import Drop, DropMethod, What
from agentbench_kv.methods.dropping.sidequest import SideQuestPrompted
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.phases.tokens import TokenCodec

_PHASES = {What.THOUGHTS: Phase.THINK, What.INPUTS: Phase.ACT}


class Executor:
    """Drops messages from the sessions of a gateway, as its method's `exec` says."""

    def __init__(
        self, method: DropMethod, engine: Engine, planner: Planner, codec: TokenCodec, ask: Ask
    ) -> None:
        self._method = method
        self._engine = engine
        self._planner = planner
        self._ask = ask
        quests = isinstance(method, SideQuestPrompted)
        self._quests = SideQuests(method, ask) if quests else None  # type: ignore[arg-type]
        self._count = lru_cache(maxsize=4096)(lambda text: len(codec.encode(text)))

    def new_drops(self, session: str) -> SessionDrops:
        """Return the drops of a new session; its name without its run's decides what is a lot."""
        limit = self._engine.info.context_limit
        return SessionDrops(self._method, limit, self._count, drop_key(session))

    def shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the client's messages as the model is shown them, but for what is dropped."""
        return messages if self._quests is None else with_cursors(messages)

    def before(
        self, session: Session, plan: Plan, messages: Sequence[Message], tools: Tools, seed: int
    ) -> Plan:
        """Drop what the policy names before a chat request is answered; return the new plan."""
        drops = session.drops
        if drops is None:
            return plan
        drops.seed = seed
        anew = plan.reset or session.known is None
        if anew:
            session.abandon_aside()
        wanted = drops.decide(messages, session.stats(), len(plan.ids), anew=anew)
        if self._quests is not None:
            wanted |= self._quests.collect(session, drops, messages)
        plan = self._carry_out(session, drops, plan, messages, tools, wanted)
        if self._quests is not None and not plan.reset and plan.keep is None:
            self._quests.begin(session, drops, messages, tools)
        return plan

    def by_client(self, session: Session, prompt: str | Sequence[int], new: int | None) -> Plan:
        """Plan a raw prompt of a client that drops messages itself, so many of its tokens `new`.

        It is put to the account as what the policy drops here.
        """
        drops = session.drops
        if new is None or drops is None:
            raise UsageError(
                "a method that drops messages needs to be sent messages, and this task sends raw "
                "completions; choose its chat route: --set route=chat"
            )
        if self._method.exec != "text" or isinstance(prompt, str):
            raise UsageError("kvbench.new_tokens is for exec=text, and prompts of token ids")
        plan = self._planner.raw(session, prompt, anew=True)
        drops.longest = max(drops.longest, new)
        if plan.keep is not None:
            _charge_rewrite(session, drops, plan, new)
        return plan

    def _carry_out(
        self,
        session: Session,
        drops: SessionDrops,
        plan: Plan,
        messages: Sequence[Message],
        tools: Tools,
        wanted: frozenset[Drop],
    ) -> Plan:
        if self._method.exec != "text":
            self._evict(session, drops, wanted)
            return plan
        if self._method.summary_tokens and wanted:
            ask = partial(self._summary, session, tools)
            if not drops.summarise(messages, wanted, ask):
                return plan
        drops.dropped |= wanted
        return self._rewrite(session, drops, plan, messages, tools) if wanted else plan

    def _summary(self, session: Session, tools: Tools, asked: Sequence[Message], limit: int) -> str:
        aside = self._ask(session, asked, asked, tools, limit)
        if session.running is not None:
            session.running.attach(aside)
        answer = aside.result()
        session.charge(answer)
        if answer.error:
            raise KVBenchError(answer.error)
        return answer.text

    def after(
        self,
        session: Session,
        plan: Plan,
        old: Known | None,
        messages: Sequence[Message],
        tools: Tools,
    ) -> None:
        """Take in where the messages of an answered request stand in the log.

        `old` is what was known of the session before it.
        """
        drops, known = session.drops, session.known
        if drops is None or known is None or len(known.messages) <= drops.seen:
            return
        if self._method.exec != "text":
            before = None if plan.reset else old
            drops.spots += self._spots(session, plan, before, messages, tools)
        drops.seen = len(known.messages)

    def _evict(self, session: Session, drops: SessionDrops, wanted: frozenset[Drop]) -> None:
        """Have rows leave; after a loss, whose recomputation brought them back, all of them."""
        if not session.opened:
            return
        losses = len(self._engine.stats(session.id).restarts)
        lost, drops.losses = losses != drops.losses, losses
        drops.dropped |= wanted
        leaving = drops.dropped if lost else wanted

        def runs(answer: SpanRange, what: What) -> list[SpanRange]:
            return phase_runs(session.phases, answer, _PHASES[what])

        if spans := drops.spans(leaving, runs):
            # A backend that died has no rows. They come back with this turn, all of them, and leave
            # at the next one.
            with suppress(ConnectionError):
                self._engine.evict_spans(session.id, spans)

    def _rewrite(
        self,
        session: Session,
        drops: SessionDrops,
        plan: Plan,
        messages: Sequence[Message],
        tools: Tools,
    ) -> Plan:
        """Write the history anew without what leaves, and put that to the session's account."""
        new = self._planner.rewrite(session, plan, drops.edited(self.shown(messages)), tools)
        _charge_rewrite(session, drops, new, len(plan.ids))
        return new

    def _spots(
        self,
        session: Session,
        plan: Plan,
        old: Known | None,
        messages: Sequence[Message],
        tools: Tools,
    ) -> list[Spot]:
        """Return where the messages that a request added stand, its answer last."""
        answer = session.outputs[-1] if session.outputs else ()
        behind = len(session.tokens)
        prompt_end = behind - len(answer)
        base = prompt_end - len(plan.ids)
        contents = self._planner.contents(plan, old, self.shown(messages), tools)
        new = messages[len(messages) - len(contents) :]
        spans = [None if c is None else (base + c[0], base + c[1]) for c in contents]
        ends = [None if span is None else span[1] for span in spans]
        for number, message in enumerate(new):
            if message.get("tool_calls"):
                ends[number] = _end_of_calls(new, spans, number)
        spots = [Spot(span, end) for span, end in zip(spans, ends, strict=True)]
        return [*spots, Spot(None, behind, (prompt_end, behind))]


def _end_of_calls(
    messages: Sequence[Message], spans: Sequence[SpanRange | None], number: int
) -> int | None:
    """Return where a client's own message with calls ends: where its first result begins.

    Its calls stand behind its content; a result never leaves later than they.
    """
    behind = number + 1
    result = behind < len(messages) and messages[behind].get("role") == "tool"
    span = spans[behind] if result else None
    return None if span is None else span[0]


def _charge_rewrite(session: Session, drops: SessionDrops, plan: Plan, added: int) -> None:
    """Put a history that is written anew to the account; the request adds so many tokens to it."""
    left = max(0, (plan.keep or 0) + len(plan.ids) - added)
    again = max(0, len(plan.ids) - added)
    rewritten = drops.rewritten(session.stats(), left, again)
    session.carried = session.carried.followed_by(rewritten)


def phase_runs(phases: Sequence[Phase], span: SpanRange, wanted: Phase) -> list[SpanRange]:
    """Return the runs of tokens of a phase within a span of a session's log."""
    found, at = [], span[0]
    for phase, run in groupby(phases[span[0] : span[1]]):
        end = at + sum(1 for _ in run)
        if phase is wanted:
            found.append((at, end))
        at = end
    return found
