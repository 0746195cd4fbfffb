"""The token gateway: messages in, messages out, and between them an exact token log."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from agentbench_kv.engines.base import Engine
from agentbench_kv.gateway.base import BaseGateway, Request
from agentbench_kv.gateway.parsing import PARSERS, OutputParser, Reader, choose_parser
from agentbench_kv.gateway.planning import Planner
from agentbench_kv.gateway.reminders import reminder
from agentbench_kv.gateway.session import Plan, Session
from agentbench_kv.gateway.sources import notes_for
from agentbench_kv.gateway.turn import Turn
from agentbench_kv.gateway.types import Answer, Options
from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.machine import PhaseTable


class Gateway(BaseGateway[Session]):
    """Chat and completions over an engine of tokens.

    `tokenizer` is by default the one in the engine's model folder; `parser` is the tool-call syntax
    (`hermes`, `llama3_json`, `none`, or `auto` from the vocabulary); `limits` are those of
    `BaseGateway`.
    """

    def __init__(
        self, engine: Engine, *, tokenizer: Any = None, parser: str = "auto", **limits: Any
    ) -> None:
        super().__init__(engine, **limits)
        self.codec = TokenCodec(tokenizer or load_tokenizer(engine.info.model_path))
        self.table = PhaseTable.for_tokenizer(self.codec)
        self.syntax = choose_parser(parser, self.codec.added)
        engine.decode_with(self.codec.decode)
        self._planner = Planner(self.codec, self._ids_of(self.table.family.message_close))
        self._eos = frozenset(engine.info.eos_token_ids)
        # Ids without text: turn ends, and the special tokens that the parser does not read.
        shown = self._ids_of((self.syntax.open, self.syntax.close, "<think>", "</think>"))
        self._hidden = (self.codec.special - shown) | self._eos

    def provenance(self) -> dict[str, Any]:
        template = str(getattr(self.codec.tokenizer, "chat_template", None) or "")
        return {
            "tool_parser": self.syntax.name,
            "phase_family": self.table.family.name,
            "chat_template_sha": hashlib.sha256(template.encode()).hexdigest(),
        }

    def token_log(self, session: str) -> tuple[list[int], list[int]]:
        """Return copies of a session's ids and their phases."""
        state = self._find(session)
        return list(state.tokens), [int(phase) for phase in state.phases]

    def _new_session(self, name: str) -> Session:
        return Session(name, self.engine, self.table)

    def _answer(self, state: Session, request: Request) -> Answer:
        options = request.options
        reader = Reader()
        if request.prompt is not None:
            plan = self._planner.raw(state, request.prompt)
        else:
            plan = self._planner.chat(state, request.messages, request.tools)
            if words := self._reminder(state, plan, options):
                plan = self._planner.chat(state, request.messages, request.tools, words)
            syntax = self.syntax if options.parse_tools else PARSERS["none"]
            reader = OutputParser(syntax, state.next_call_id, thinking=plan.thinking)
        turn = Turn(
            state,
            plan,
            self.codec,
            reader,
            options,
            options.max_tokens or self.default_max_tokens,
            self._hidden,
            self._eos,
            request.cancellation,
        )
        turns = len(state.turns)
        try:
            yield from turn.deltas()
        finally:
            if self.on_turn and len(state.turns) > turns:
                self.on_turn(state.id, state.turns[-1])
        yield turn.result()

    def _reminder(self, state: Session, plan: Plan, options: Options) -> str:
        """Return a line for every evicted span that the method wants mentioned."""
        if not self.engine.wants_notes or plan.reset or not state.opened:
            return ""
        notes = notes_for(state.machine, plan.ids, options.hints)
        return reminder(self.codec, state.tokens, self.engine.recalls(state.id, plan.ids, notes))

    def _ids_of(self, texts: Sequence[str | None]) -> frozenset[int]:
        """Return the ids of those texts that are tokens of their own."""
        return frozenset(self.codec.added[text] for text in texts if text in self.codec.added)
