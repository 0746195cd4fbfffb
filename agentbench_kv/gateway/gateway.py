"""The token gateway: messages in, messages out, and between them an exact token log.

It decides whether a request extends its session and what it adds, or starts it over. A span method
names spans that a message brings to mind; their lines of text are made here.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentbench_kv.engines.base import CUT_OFF, Capability, Engine
from agentbench_kv.engines.core.grammar import GrammarConstraint
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.base import BaseGateway, Request
from agentbench_kv.gateway.dropping import SessionDrops
from agentbench_kv.gateway.exchange import Answer, Cancellation, Options
from agentbench_kv.gateway.executing import Executor
from agentbench_kv.gateway.grammar import GrammarCompiler
from agentbench_kv.gateway.memory import ASIDE, BankMemories
from agentbench_kv.gateway.messages import Message, count_calls
from agentbench_kv.gateway.parsing import Reader
from agentbench_kv.gateway.planning import Planner, reminder
from agentbench_kv.gateway.readers import reader_for, unread_syntax
from agentbench_kv.gateway.session import Plan, Session, UnknownSessionError, notes_for
from agentbench_kv.gateway.sidequest import Tools
from agentbench_kv.gateway.turn import Turn
from agentbench_kv.methods.base import CLOSINGS
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.phases.machine import PhaseTable
from agentbench_kv.phases.syntax import ToolSyntax, refuse_tools_without_syntax
from agentbench_kv.phases.tokens import IncrementalDecoder, TokenCodec, load_tokenizer


def _whole_word(text: str) -> re.Pattern[str]:
    """Return what finds a text where it is not a part of a longer word or number."""
    before = r"(?<!\w)" if text[:1].isalnum() else ""
    behind = r"(?!\w)" if text[-1:].isalnum() else ""
    return re.compile(before + re.escape(text) + behind)


class Gateway(BaseGateway[Session]):
    """Chat and completions over an engine of tokens.

    `tokenizer` is by default the one in the engine's model folder; `tool_syntax` is a name in
    `SYNTAXES`, or `auto` from chat template and vocabulary; `closing` is how the method reads
    closing markers, `policy` what drops messages; `remembers` is for methods with a memory, to
    which finished turns are added if it `appends`; `limits` are those of `BaseGateway`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Any = None,
        tool_syntax: str = "auto",
        closing: str = CLOSINGS[0],
        policy: DropMethod | None = None,
        remembers: bool = False,
        appends: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(engine, **limits)
        self.codec = TokenCodec(tokenizer or load_tokenizer(engine.info.model_path))
        self.table = PhaseTable.for_tokenizer(self.codec, tool_syntax, closing)
        self.syntax = self.table.syntax
        self._asked_syntax = tool_syntax
        engine.decode_with(self.codec.decode)
        self._planner = Planner(self.codec, self.table)
        self._executor: Executor | None = None
        if policy is not None:
            self._executor = Executor(policy, engine, self._planner, self.codec, self._aside)
        if remembers:
            self.memories = BankMemories(engine, self._planner, self.table, appends=appends)
        self._eos = frozenset(engine.info.eos_token_ids)
        self._grammars = GrammarCompiler(self.codec, self.syntax, engine.info.eos_token_ids)
        # Ids without text: turn ends, and the special tokens that the parser does not read.
        shown = self.codec.ids_of((*self.syntax.markers, "<think>", "</think>"))
        self._hidden = (self.codec.special - shown) | self._eos

    def provenance(self) -> dict[str, Any]:
        return {
            "tool_parser": self.syntax.name,
            "phase_family": self.table.family.name,
            "chat_template_sha": hashlib.sha256(self.codec.template.encode()).hexdigest(),
        }

    def token_log(self, session: str) -> tuple[list[int], list[int]]:
        """Return copies of a session's ids and their phases."""
        state = self._find(session)
        return list(state.tokens), [int(phase) for phase in state.phases]

    def drops(self, session: str) -> SessionDrops | None:
        """Return what a method has dropped of a session; None under a method that drops nothing."""
        return self._find(session).drops

    def places(self, session: str, texts: Sequence[str]) -> list[list[int]]:
        decoder = IncrementalDecoder(self.codec)
        pieces = [decoder.feed(token) for token in self._find(session).tokens]
        starts = [0, *itertools.accumulate(map(len, pieces))]
        whole = "".join(pieces) + decoder.finish()
        return [
            [bisect_right(starts, found.start()) - 1 for found in _whole_word(text).finditer(whole)]
            for text in texts
        ]

    def _new_session(self, name: str) -> Session:
        drops = self._executor.new_drops(name) if self._executor else None
        rows = isinstance(self.memories, BankMemories)
        bank = self.memories.bank_of(name) if rows and self.memories else ""
        return Session(name, self.engine, self.table, drops=drops, bank=bank)

    def _remember_turn(self, state: Session) -> None:
        if self.memories is not None and not state.gone:
            self.memories.append(state)

    def _fork_of(self, state: Session, new: str) -> Session:
        with self._lock:
            if new in self._sessions:
                raise UsageError(f"session {new!r} is open already")
            self._check_room(new)
        if not state.opened:
            raise UnknownSessionError(f"session {state.id!r} has no cache yet")
        return state.fork(new)

    def written(self, said: Message) -> list[int]:
        """Return the ids of an answer as the model writes it, its end included."""
        ids = self.codec.encode(self._planner.said(said))
        ends = self.codec.ids_of(self.table.family.closes) | self._eos
        return ids if ids[-1:] and ids[-1] in ends else [*ids, *self.engine.info.eos_token_ids[:1]]

    def _answer(self, state: Session, request: Request) -> Answer:
        options = request.options
        self._check_able(options)
        reader: Reader = Reader()
        syntax, tools = self._syntax_for(request), request.tools or ()
        held: tuple[GrammarConstraint | None, str | None] = (None, None)
        if request.tools:
            refuse_tools_without_syntax(self.syntax, self._asked_syntax)
        before, known = state.stats() if self._executor else None, state.known
        if request.prompt is not None:
            plan = self._raw_plan(state, request.prompt, request.new_tokens)
        else:
            plan = self._chat_plan(state, request)
            # Without a session every request would name its calls anew, and a history holds many.
            state.calls = max(state.calls, count_calls(request.messages))
            held = (self._constraint(request, plan), self._last_text(options, syntax))
        if request.prompt is None or tools:
            reader = reader_for(syntax, state.next_call_id, thinking=plan.thinking, tools=tools)
        # An engine keeps room for as many, and others wait for it.
        most = self.engine.info.context_limit
        limit = min(options.max_tokens or self.default_max_tokens, most)
        silent = (self._hidden, self._eos)
        asked = (reader, options, limit, *silent, request.cancellation, *held)
        reads = partial(unread_syntax, syntax=syntax, thinking=plan.thinking, tools=tools)
        said = request.said
        given = () if said is None else self.written(said)
        before = None if plan.reset else before
        waited = 0.0
        if self._executor is not None and request.prompt is None:
            # Last: what is refused has dropped nothing.
            told = (request.messages, request.tools, options.seed)
            began = time.perf_counter()
            plan = self._executor.before(state, plan, *told)
            waited = time.perf_counter() - began
        turn = Turn(state, plan, self.codec, *asked, before, said, given, reads, waited)
        turns = len(state.turns)
        try:
            yield from turn.deltas()
        finally:
            if len(state.turns) > turns:
                if self._executor is not None:
                    self._executor.after(state, plan, known, request.messages, request.tools)
                self._answered(state)
        yield turn.result()

    def _chat_plan(self, state: Session, request: Request) -> Plan:
        """Plan a chat request, with what a method reminds of."""
        asked = (state, request.messages, request.tools)
        shown = self._executor.shown(request.messages) if self._executor else None
        plan = self._planner.chat(*asked, shown=shown)
        if words := self._reminder(state, plan, request.options):
            plan = self._planner.chat(*asked, words)
        if plan.reset and state.rewinds and state.id.startswith(ASIDE):
            # What a memory asks is another conversation each time, with the same long beginning.
            plan = self._planner.rewrite(state, replace(plan, reset=False), *asked[1:])
        return plan

    def _raw_plan(self, state: Session, prompt: str | Sequence[int], new: int | None) -> Plan:
        """Plan a raw prompt, `new` of whose tokens its session has not had."""
        if self._executor is not None:
            return self._executor.by_client(state, prompt, new)
        if new is not None:
            raise UsageError("kvbench.new_tokens is for methods that drop messages, exec=text")
        return self._planner.raw(state, prompt)

    def _aside(
        self,
        state: Session,
        messages: Sequence[Message],
        shown: Sequence[Message],
        tools: Tools,
        max_tokens: int,
    ) -> Aside:
        """Begin a request beside a session: in a fork of it if the engine can, else in a new one.

        A fork reads only what the session has not read; where the messages are another story than
        the session's, as far as the engine can forget that. An answer that was cut off is none.
        """
        name = f"{state.id} aside {state.stats().auxiliary_calls + 1}"
        able = Capability.FORK in self.engine.info.capabilities
        if able and state.opened and not state.broken:
            twin = state.fork(name)
        else:
            twin = Session(name, self.engine, self.table)
        twin.drops = None
        try:
            plan = self._planner.chat(twin, messages, tools, shown=shown)
            if plan.reset and twin.rewinds:
                plan = self._planner.rewrite(twin, replace(plan, reset=False), shown, tools)
            syntax, cancellation = self.syntax.without_calls(), Cancellation()
            reader = reader_for(syntax, twin.next_call_id, thinking=plan.thinking, tools=())
            asked = (Options(), max_tokens, self._hidden, self._eos, cancellation)
            turn = Turn(twin, plan, self.codec, reader, *asked)
        except BaseException:
            twin.close()
            raise

        def answer() -> str:
            for _ in turn.deltas():
                pass
            said = turn.result()
            return "" if said.finish_reason in CUT_OFF else said.content.strip()

        return Aside(answer, lambda: twin.close().stats, cancellation.cancel, len(plan.ids))

    def _check_able(self, options: Options) -> None:
        """Refuse what the engine cannot do while it samples."""
        info, forced = self.engine.info, options.tool_choice.mode == "required"
        missing = {
            Capability.CONSTRAIN: "response_format" if options.answer else forced and "tool_choice",
            Capability.LOGPROBS: options.logprobs is not None and "logprobs",
        }
        for capability, field in missing.items():
            if field and capability not in info.capabilities:
                raise UsageError(
                    f"engine {info.name!r} has no {capability.value}, which {field} of this "
                    "request needs; kvbench ls engines shows who has"
                )

    def _syntax_for(self, request: Request) -> ToolSyntax:
        """Return how calls are read; an answer in JSON that may not call is never one."""
        options = request.options
        no_calls = options.tool_choice.mode == "none" or (options.answer and not request.tools)
        return self.syntax.without_calls() if no_calls else self.syntax

    def _constraint(self, request: Request, plan: Plan) -> GrammarConstraint | None:
        options, thinking = request.options, plan.thinking
        asked = (options.tool_choice, options.answer, request.tools)
        return self._grammars.constraint(*asked, thinking=thinking)

    def _last_text(self, options: Options, syntax: ToolSyntax) -> str | None:
        """Return the text behind which an answer with a single call ends."""
        if options.tool_choice.parallel or not syntax.spans:
            return None
        close = syntax.spans[0][1]
        if close is None or syntax.inner:
            raise UsageError(
                f"parallel_tool_calls=false: calls in {syntax.name!r} syntax have no end of their "
                "own to stop at"
            )
        return close

    def _reminder(self, state: Session, plan: Plan, options: Options) -> str:
        """Return a line for every evicted span that the method wants mentioned."""
        if not self.engine.wants_notes or plan.reset or not state.opened:
            return ""
        notes = notes_for(state.labeller, plan.ids, options.hints)
        return reminder(self.codec, state.tokens, self.engine.recalls(state.id, plan.ids, notes))
