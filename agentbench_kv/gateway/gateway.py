"""The token gateway: messages in, messages out, and between them an exact token log."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentbench_kv.engines.base import Engine
from agentbench_kv.gateway.base import BaseGateway
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.parsing import PARSERS, Delta, OutputParser, choose_parser
from agentbench_kv.gateway.planning import Planner
from agentbench_kv.gateway.reminders import reminder
from agentbench_kv.gateway.session import Plan, Session
from agentbench_kv.gateway.turn import PlainReader, Reader, Turn, TurnSetup
from agentbench_kv.gateway.types import ChatResult, Options
from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.machine import PhaseTable

__all__ = ["Gateway"]


class Gateway(BaseGateway[Session]):
    """Chat and completions over an engine of tokens. Thread-safe; see `BaseGateway`.

    Parameters
    ----------
    engine : Engine
        Who holds the KV cache.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        By default the one in the engine's model folder.
    parser : str
        Tool-call syntax: `hermes`, `llama3_json`, `none`, or `auto` from the vocabulary.
    **limits
        `max_sessions`, `default_max_tokens`, `on_turn` and `on_close` of `BaseGateway`.
    """

    def __init__(
        self, engine: Engine, *, tokenizer: Any = None, parser: str = "auto", **limits: Any
    ) -> None:
        super().__init__(engine, **limits)
        self.codec = TokenCodec(tokenizer or load_tokenizer(engine.info.model_path))
        self.table = PhaseTable.for_tokenizer(self.codec)
        self.syntax = choose_parser(parser, self.codec.added)
        engine.decode_with(self.codec.decode)
        self._planner = Planner(self.codec, self._message_ends())
        self._eos = frozenset(engine.info.eos_token_ids)

    def stream(
        self,
        session: str | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> Iterator[Delta | ChatResult]:
        """Yield the answer's deltas, then the `ChatResult`. Closing it early cancels."""
        options = options or Options()
        with self._using(session) as state:
            plan = self._planner.chat(state, messages, tools)
            words = self._reminder(state, plan, options)
            if words:
                plan = self._planner.chat(state, messages, tools, words)
            syntax = self.syntax if options.parse_tools else PARSERS["none"]
            reader = OutputParser(syntax, state.next_call_id, thinking=plan.thinking)
            yield from self._answer(state, plan, reader, options, cancellation)

    def stream_complete(
        self,
        session: str | None,
        prompt: str | Sequence[int],
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> Iterator[Delta | ChatResult]:
        """Yield the text's deltas, then the `ChatResult`. Closing it early cancels."""
        with self._using(session) as state:
            plan = self._planner.raw(state, prompt)
            options = options or Options()
            yield from self._answer(state, plan, PlainReader(), options, cancellation)

    def provenance(self) -> dict[str, Any]:
        """Return what the text side contributes to a run's record."""
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

    def _reminder(self, state: Session, plan: Plan, options: Options) -> str:
        """Return a line for every evicted span that the method wants mentioned."""
        if not self.engine.wants_notes or plan.reset or not state.opened:
            return ""
        notes = state.notes(plan.ids, options.hints)
        return reminder(self.codec, state.tokens, self.engine.recalls(state.id, plan.ids, notes))

    def _answer(
        self,
        state: Session,
        plan: Plan,
        reader: Reader,
        options: Options,
        cancellation: Cancellation | None,
    ) -> Iterator[Delta | ChatResult]:
        cancellation = self._register(state, cancellation or Cancellation())
        setup = TurnSetup(
            codec=self.codec,
            reader=reader,
            options=options,
            max_tokens=options.max_tokens or self.default_max_tokens,
            hidden=self._hidden(),
            eos=self._eos,
            cancellation=cancellation,
        )
        turn = Turn(state, plan, setup)
        turns = len(state.turns)
        try:
            yield from turn.deltas()
        finally:
            state.running = None
            if self.on_turn and len(state.turns) > turns:
                self.on_turn(state.id, state.turns[-1])
        yield turn.result()

    def _hidden(self) -> frozenset[int]:
        """Return the ids without text: turn ends, special tokens the parser does not read."""
        markers = (self.syntax.open, self.syntax.close, "<think>", "</think>")
        shown = {self.codec.added.get(text) for text in markers if text}
        return (self.codec.special - shown) | self._eos

    def _message_ends(self) -> frozenset[int]:
        ends = (self.codec.added.get(text) for text in self.table.family.message_close)
        return frozenset(index for index in ends if index is not None)
