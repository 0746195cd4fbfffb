"""One turn: prefill what the plan adds, decode, read the text, keep the log exact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentbench_kv.engines.base import FinishReason, Generation, Sampling
from agentbench_kv.errors import ContextLimitError
from agentbench_kv.gateway.accounting import TurnInfo, count_phases
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.messages import canonical
from agentbench_kv.gateway.parsing import Delta
from agentbench_kv.gateway.session import Known, Plan, Session
from agentbench_kv.gateway.types import ChatResult, Options
from agentbench_kv.phases.codec import TokenCodec
from agentbench_kv.phases.decoding import IncrementalDecoder, StopMatcher

__all__ = ["PlainReader", "Reader", "StopCutter", "Turn", "TurnSetup"]


class Reader(Protocol):
    """Makes a message of generated text while it arrives."""

    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    unparsable: bool

    def feed(self, text: str) -> list[Delta]:
        """Take more text, return what is certain now."""
        ...

    def finish(self) -> list[Delta]:
        """Take the end of the text, return the rest."""
        ...


class PlainReader:
    """The reader of raw completions: text is text."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.unparsable = False

    def feed(self, text: str) -> list[Delta]:
        """Pass the text on."""
        self.content += text
        return [Delta("content", text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is ever held back."""
        return []


class StopCutter:
    """Cuts text at the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.hit = ""
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        """Take more text, return what certainly stands before any stop."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        sizes = range(min(max(map(len, self._stops)) - 1, len(text)), 0, -1)
        return next(
            (n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops)), 0
        )


@dataclass(frozen=True)
class TurnSetup:
    """What a turn works with besides its session and plan.

    Attributes
    ----------
    hidden : frozenset of int
        Ids without text.
    eos : frozenset of int
        Ids that end the model's turn.
    """

    codec: TokenCodec
    reader: Reader
    options: Options
    max_tokens: int
    hidden: frozenset[int]
    eos: frozenset[int]
    cancellation: Cancellation


class Turn:
    """One request being answered. Iterate `deltas` to the end, then take `result`.

    Closing the iterator early cancels the generation; the tokens it had made stay in the log.
    """

    def __init__(self, session: Session, plan: Plan, setup: TurnSetup) -> None:
        self._session = session
        self._plan = plan
        self._setup = setup
        self._stop_ids, stops = _split_stops(setup)
        self._hidden = setup.hidden | self._stop_ids
        self._decoder = IncrementalDecoder(setup.codec, self._hidden)
        self._cutter = StopCutter(stops)
        self._matcher = (
            StopMatcher(IncrementalDecoder(setup.codec, self._hidden), stops) if stops else None
        )
        self._raw = ""
        self._output: list[int] = []
        self._generation: Generation | None = None
        self._over_limit = False

    def deltas(self) -> Iterator[Delta]:
        """Yield the message piece by piece."""
        session = self._session
        session.prepare(reset=self._plan.reset)
        self._base = len(session.tokens)
        self._before = session.stats()
        try:
            session.extend(self._plan.ids, self._setup.options.hints)
            yield from self._decode()
            yield from self._read(self._decoder.finish(), last=True)
        except ContextLimitError:
            self._over_limit = True
        except GeneratorExit:
            self._settle()
            raise
        self._settle()

    def result(self) -> ChatResult:
        """Return the finished message with its accounting."""
        reader = self._setup.reader
        return ChatResult(
            content=reader.content,
            reasoning=reader.reasoning,
            tool_calls=reader.tool_calls,
            finish_reason=self._session.turns[-1].finish_reason,
            unparsable=reader.unparsable,
            raw=self._raw,
            token_ids=self._output,
            turn=self._session.turns[-1],
            report=self._session.report(),
        )

    def _decode(self) -> Iterator[Delta]:
        session = self._session
        # Whatever escapes from the engine leaves a log nobody can vouch for.
        session.broken = True
        generation = self._generation = session.engine.generate(session.id, self._sampling())
        self._setup.cancellation.attach(generation)
        tokens = iter(generation)
        try:
            for token in tokens:
                self._output.append(token)
                yield from self._read(self._decoder.feed(token))
        except GeneratorExit:
            generation.cancel()
            self._output.extend(tokens)
            session.broken = False
            raise
        except ContextLimitError:
            session.broken = False
            raise
        session.broken = False

    def _read(self, text: str, *, last: bool = False) -> Iterator[Delta]:
        text = self._cutter.feed(text) + (self._cutter.finish() if last else "")
        self._raw += text
        yield from self._setup.reader.feed(text)
        if last:
            yield from self._setup.reader.finish()

    def _settle(self) -> None:
        """Bring log, history and accounting up to date."""
        session = self._session
        if len(session.tokens) > self._base or not self._plan.ids:
            session.record_output(self._output)
            session.known = self._known()
        session.turns.append(self._info())

    def _known(self) -> Known:
        known, reader = self._plan.known, self._setup.reader
        if known.text is not None:
            return replace(known, text=known.text + self._raw, tail=self._tail())
        message = {
            "role": "assistant",
            "content": reader.content,
            "tool_calls": reader.tool_calls,
        }
        return replace(known, messages=(*known.messages, canonical(message)))

    def _tail(self) -> str:
        ended = self._output and self._output[-1] in self._setup.eos | self._stop_ids
        return self._cutter.hit or (self._setup.codec.piece(self._output[-1]) if ended else "")

    def _sampling(self) -> Sampling:
        options = self._setup.options
        eos: frozenset[int] = frozenset() if options.ignore_eos else self._setup.eos
        return Sampling(
            max_tokens=self._setup.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=_turn_seed(options.seed, len(self._session.turns)),
            stop_token_ids=self._stop_ids | eos,
            stop=self._matcher,
        )

    def _finish_reason(self) -> str:
        if self._over_limit or self._generation is None:
            return FinishReason.CONTEXT_LIMIT.value
        reason = self._generation.finish_reason or FinishReason.CANCELLED
        if self._cutter.hit and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        called = reason is FinishReason.STOP and self._setup.reader.tool_calls
        return "tool_calls" if called else reason.value

    def _info(self) -> TurnInfo:
        session, before, after = self._session, self._before, self._session.stats()
        first, later = _times(self._generation, len(self._output))
        return TurnInfo(
            turn=len(session.turns),
            prompt_tokens=self._base + len(self._plan.ids),
            output_tokens=len(self._output),
            cached_tokens=self._base,
            phases=count_phases(session.phases[self._base :]),
            live_before=before.live,
            live_after=after.live,
            events=len(after.events) - len(before.events),
            evicted=after.evicted - before.evicted,
            restored=after.restored - before.restored,
            prefill_tokens=after.prefill_tokens - before.prefill_tokens,
            kv_bytes_read=after.bytes_read - before.bytes_read,
            ttft_ms=first,
            tpot_ms=later,
            finish_reason=self._finish_reason(),
            reset=self._plan.reset,
        )


def _times(generation: Generation | None, count: int) -> tuple[float | None, float | None]:
    """Return milliseconds to the first token and per later token, as far as they are known."""
    first = generation.first_token_s if generation else None
    last = generation.last_token_s if generation else None
    if first is None:
        return None, None
    later = (last - first) / (count - 1) * 1e3 if last is not None and count > 1 else None
    return first * 1e3, later


def _split_stops(setup: TurnSetup) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return stop strings that are one special id as ids (they have no text), and the others."""
    codec = setup.codec
    ids = {text: codec.added.get(text) for text in setup.options.stop}
    special = {text: index for text, index in ids.items() if index in codec.special}
    texts = tuple(text for text in setup.options.stop if text not in special)
    return frozenset(index for index in special.values() if index is not None), texts


def _turn_seed(seed: int, turn: int) -> int:
    """Return the seed of one turn; neighbouring session seeds share no stream."""
    digest = hashlib.sha256(f"{seed}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
