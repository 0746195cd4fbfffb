"""One turn: prefill what the plan adds, decode, read the text, keep the log exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentbench_kv.engines.base import FinishReason, Generation, KVStats, Sampling, TokenLogprob
from agentbench_kv.engines.core.grammar import GrammarConstraint
from agentbench_kv.errors import ContextLimitError, KVBenchError
from agentbench_kv.gateway.exchange import Cancellation, ChatResult, Options
from agentbench_kv.gateway.messages import Message, canonical
from agentbench_kv.gateway.parsing import Delta, Logprob, Reader, beginning_of
from agentbench_kv.gateway.reports import TurnInfo, count_phases
from agentbench_kv.gateway.session import Known, Plan, Session
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.tokens import IncrementalDecoder, StopMatcher, TokenCodec


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str)
    except RecursionError:  # deep, and so far right
        return True
    except ValueError:
        return False
    return True


_WHOLE = ("stop", "tool_calls")  # why an answer ends that nothing has cut off


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
        certain = len(text) - beginning_of(self._stops, text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass
class Turn:
    """One request being answered. Iterate `deltas` to the end, then take `result`.

    Closing the iterator early cancels the generation; the tokens it had made stay in the log.
    """

    session: Session
    plan: Plan
    codec: TokenCodec
    reader: Reader
    options: Options
    max_tokens: int
    hidden: frozenset[int]  # ids without text
    eos: frozenset[int]  # ids that end the model's turn
    cancellation: Cancellation
    constraint: GrammarConstraint | None = None
    last_text: str | None = None  # ends the generation and stays: the end of its only call
    # The session's account before anything was done for the request; None: as it is now.
    before: KVStats | None = None
    said: Message | None = None  # the answer, where it is given
    given: Sequence[int] = ()  # its tokens
    # Returns the tool syntax that calls in a text are in which the reader took for none.
    unread: Callable[[str], str] = lambda _: ""
    waited_s: float = 0.0  # before it could begin, for what a method asked the model first

    def __post_init__(self) -> None:
        self._stop_ids, stops = _split_stops(self.options.stop, self.codec)
        hidden = self.hidden | self._stop_ids
        self._decoder = IncrementalDecoder(self.codec, hidden)
        self._cutter = StopCutter(stops)
        ends = (*stops, self.last_text) if self.last_text else stops
        # The engine calls the matcher from another thread than the reader's.
        own_decoder = IncrementalDecoder(self.codec, hidden)
        self._matcher = StopMatcher(own_decoder, ends) if ends else None
        self._logprobs: list[Logprob] = []
        self._reported = 0  # of them, how many a delta carries
        self._raw = ""
        self._output: list[int] = []
        self._generation: Generation | None = None
        self._over_limit = False

    def deltas(self) -> Iterator[Delta]:
        """Yield the message piece by piece."""
        session = self.session
        session.prepare(self.plan)
        self._base = len(session.tokens)
        self._before = session.stats() if self.before is None else self.before
        try:
            session.extend(self.plan.ids, self.options.hints)
            yield from self._decode()
            yield from self._read(self._decoder.finish(), last=True)
        except ContextLimitError:
            self._over_limit = True
        except GeneratorExit:
            self._settle()
            raise
        self._settle()

    def result(self) -> ChatResult:
        """Return what was answered; KVBenchError if nothing could fit what was asked for."""
        if self.constraint is not None and self.constraint.problem:
            raise KVBenchError(f"no token fits the schema: {self.constraint.problem}")
        reader = self.reader
        turn = self.session.turns[-1]
        if self.constraint is not None and turn.finish_reason in _WHOLE and not self._of_its_form():
            raise KVBenchError(
                "the answer has not the form that was asked for: nothing could follow, or the "
                f"backend did not hold to it; it begins with {reader.content[:80]!r}"
            )
        said = (reader.content, reader.reasoning, reader.tool_calls, turn.finish_reason)
        generated = (reader.unparsable, self._raw, self._output)
        phases = self.session.phases[len(self.session.phases) - len(self._output) :]
        more = (phases.count(Phase.THINK), self._logprobs if self._asks_logprobs else None)
        return ChatResult(*said, *generated, turn, self.session.report(), *more)

    def _of_its_form(self) -> bool:
        """Whether a whole answer is a call, if an unreadable one, or JSON behind a thought.

        Backends hold to schemas themselves; a string may hold the words of any marker.
        """
        if self.reader.tool_calls or self.reader.unparsable or self._cutter.hit:
            return True
        if self.options.tool_choice.mode == "required":
            return False
        return any(map(_is_json, (self._raw, self._raw.partition("</think>")[2])))

    @property
    def _asks_logprobs(self) -> bool:
        return self.options.logprobs is not None

    def _decode(self) -> Iterator[Delta]:
        session = self.session
        # Whatever escapes from the engine leaves a log nobody can vouch for.
        session.broken = True
        generation = self._generation = self._start()
        self.cancellation.attach(generation)
        tokens = iter(generation)
        try:
            for token in tokens:
                self._note(generation, token)
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

    def _start(self) -> Generation:
        engine, session = self.session.engine, self.session.id
        if self.given:
            return engine.force(session, self.given)
        return engine.generate(session, self._sampling())

    def _read(self, text: str, *, last: bool = False) -> Iterator[Delta]:
        text = self._cutter.feed(text) + (self._cutter.finish() if last else "")
        self._raw += text
        yield from map(self._with_logprobs, self.reader.feed(text))
        if last:
            yield from map(self._with_logprobs, self.reader.finish())

    def _note(self, generation: Generation, token: int) -> None:
        if self._asks_logprobs and token not in self.eos:
            noted = generation.logprobs[len(self._output)]
            self._logprobs.append(_logprob(noted, self.codec))

    def _with_logprobs(self, delta: Delta) -> Delta:
        new, self._reported = self._logprobs[self._reported :], len(self._logprobs)
        return replace(delta, logprobs=tuple(new)) if new else delta

    def _settle(self) -> None:
        """Bring log, history and accounting up to date."""
        session = self.session
        if len(session.tokens) > self._base or not self.plan.ids:
            session.record_output(self._output)
            session.known = self._known()
        session.turns.append(self._info())

    def _known(self) -> Known:
        known, reader = self.plan.known, self.reader
        if known.text is not None:
            ended = self._output and self._output[-1] in self.eos | self._stop_ids
            tail = self._cutter.hit or (self.codec.piece(self._output[-1]) if ended else "")
            return replace(known, text=known.text + self._raw, tail=tail)
        read = {"role": "assistant", "content": reader.content, "tool_calls": reader.tool_calls}
        # The client goes on from what it gave, however the model's syntax writes and reads it.
        answer = canonical(read if self.said is None else self.said)
        return replace(known, messages=(*known.messages, answer))

    def _sampling(self) -> Sampling:
        options = self.options
        stop_ids = self._stop_ids if options.ignore_eos else self._stop_ids | self.eos
        own_end = self.codec.tokenizer.eos_token_id
        if self.constraint is not None and own_end is not None:
            stop_ids |= {own_end}  # with which a backend may end what is held to a grammar
        seed = _turn_seed(options.seed, len(self.session.turns))
        shape = (options.temperature, options.top_p, options.top_k)
        ends = (stop_ids, self._matcher)
        return Sampling(
            *(self.max_tokens, *shape, seed, *ends, self.constraint), logprobs=options.logprobs
        )

    def _finish_reason(self) -> str:
        if self._over_limit or self._generation is None:
            return FinishReason.CONTEXT_LIMIT.value
        reason = self._generation.finish_reason or FinishReason.CANCELLED
        if reason is FinishReason.LENGTH and (self._cutter.hit or self.given):
            reason = FinishReason.STOP
        called = reason is FinishReason.STOP and self.reader.tool_calls
        return "tool_calls" if called else reason.value

    def _info(self) -> TurnInfo:
        session, before, after = self.session, self._before, self.session.stats()
        # A given answer says nothing of how fast one is written.
        first, later = _times(None if self.given else self._generation, len(self._output))
        if first is not None:
            first += 1e3 * self.waited_s
        return TurnInfo(
            turn=len(session.turns),
            prompt_tokens=self._base + len(self.plan.ids),
            output_tokens=len(self._output),
            cached_tokens=self._cached(before, after),
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
            reset=self.plan.reset,
            unparsable=self.reader.unparsable,
            unread_syntax=self._unread_syntax(),
        )

    def _cached(self, before: KVStats, after: KVStats) -> int:
        """Return how many tokens of the prompt nobody had to compute: a server may say it."""
        told = None if self._generation is None else self._generation.cached_tokens
        if told is None:
            return cached(self._base, before, after)
        return min(told, self._base + len(self.plan.ids))

    def _unread_syntax(self) -> str:
        if self.reader.tool_calls:
            return ""
        # Markers of another syntax may be special tokens, which have no text here.
        shown = [token for token in self._output if token not in self.eos]
        return self.unread(self.codec.decode(shown))


def cached(held: int, before: KVStats, after: KVStats) -> int:
    """Return how many tokens of a turn's prompt nobody had to compute.

    Those are the `held` ones, but for what was lost and computed again, and what a shared prefix
    had. What a history written anew, or a memory that reads prompts twice, counts as computed again
    was held by nobody.
    """
    found = held + after.cached_tokens - before.cached_tokens
    if after.rewrites != before.rewrites or after.restored:
        return found
    return max(0, found - (after.recomputed - before.recomputed))


_LOWEST = -9999.0  # what OpenAI says of a token that was impossible; JSON has no infinity


def _logprob(noted: TokenLogprob, codec: TokenCodec) -> Logprob:
    """Return a token's log probability as a chat response has it."""
    top = [_shown(token, value, codec) for token, value in noted.top]
    return {**_shown(noted.token, noted.logprob, codec), "top_logprobs": top}


def _shown(token: int, logprob: float, codec: TokenCodec) -> dict[str, Any]:
    text = codec.piece(token)
    # A piece of a character has no text of its own, and its bytes are the tokenizer's secret.
    whole = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": whole}


def _times(generation: Generation | None, count: int) -> tuple[float | None, float | None]:
    """Return milliseconds to the first token and per later token, as far as they are known."""
    first = generation.first_token_s if generation else None
    last = generation.last_token_s if generation else None
    if first is None:
        return None, None
    later = (last - first) / (count - 1) * 1e3 if last is not None and count > 1 else None
    return first * 1e3, later


def _split_stops(stops: Sequence[str], codec: TokenCodec) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return stop strings that are one special id as ids (they have no text), and the others."""
    special = {text for text in stops if codec.added.get(text) in codec.special}
    texts = tuple(text for text in stops if text not in special)
    return frozenset(codec.added[text] for text in special), texts


def _turn_seed(seed: int, turn: int) -> int:
    """Return the seed of one turn; neighbouring session seeds share no stream."""
    digest = hashlib.sha256(f"{seed}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
