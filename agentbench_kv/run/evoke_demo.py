"""A session that outgrows its cache: facts stated first, eleven other turns, then the question.

Played by the shipped micro model in its own small world (`adapters.micro`). Everything that is
shown was watched at the engine: which blocks left, which came back, and whether the rows that came
back were those that had left, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.adapters.micro.episode import Environment, Episode, Judged
from agentbench_kv.adapters.micro.generate import EpisodeProfile, generate
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.methods.spans import Block, SpanMethod, SpanRange
from agentbench_kv.run.observe import find_text

TURNS = 14
SEED = 85  # an episode that the model answers without a mistake with the whole cache
PROFILE = EpisodeProfile("demo", (1, 1), (1, 1), (11, 11), (2, 3), (1, 2), (1, 4), (0, 2), (22, 32))
SESSION = "demo"


@dataclass(frozen=True)
class TurnShown:
    """One user turn."""

    number: int
    user: str
    answers: list[str]  # raw assistant messages, think blocks and calls included
    logical: int
    live: int
    peak: int  # most tokens in the cache so far
    evicted: list[SpanRange]  # spans that left during the turn
    restored: list[SpanRange]
    exact: bool  # every message was right


@dataclass(frozen=True)
class FactShown:
    """Something the last turn asked for."""

    text: str
    stated: int  # the turn that stated it first
    away: list[int]  # turns at whose end some of its tokens were not in the cache
    came_back: int | None  # the last turn in which they came back
    recalled: bool


class WatchedEngine(EmbeddedEngine):
    """The embedded engine, writing down which spans leave and which come back."""

    left: list[SpanRange]
    came: list[SpanRange]
    unlike: int

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        """Remove spans and write them down."""
        self.left += spans
        return super().evict_spans(session, spans)

    def restore_block(self, session: str, block: Block, at: int | None = None) -> None:
        """Put a block back and compare its rows with those that had left."""
        super().restore_block(session, block, at)
        self.came.append((block.start, block.end))
        again = self.save_block(session, block.start, block.end)
        self.unlike += not bool((again.data == block.data).all())


def episode_for(seed: int) -> Episode:
    """Return the first episode from a seed on whose last turn needs what the second one stored."""
    while True:
        episode = generate(seed, PROFILE)
        kinds = [turn.text.split()[1] for turn in episode.turns]
        if kinds[1] == "store" and kinds[-1] == "ship":
            return episode
        seed += 1


@dataclass
class Demo:
    """The session, turn by turn; iterate `play`, then ask for `facts`."""

    method: SpanMethod
    episode: Episode
    turns: list[TurnShown] = field(default_factory=list)
    unlike: int = 0
    _judged: list[list[Judged]] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)

    def play(self) -> Iterator[TurnShown]:
        """Play the session and yield its turns as they end."""
        options = EngineOptions(model="micro", method=self.method.below(), device="cpu")
        below = WatchedEngine.create(options)
        below.left, below.came, below.unlike = [], [], 0
        engine = BlockEngine(below, self.method)
        try:
            gateway = Gateway(engine)
            environment = Environment(self.episode)
            messages: list[dict[str, Any]] = [{"role": "system", "content": self.episode.system}]
            while not environment.done:
                below.left, below.came = [], []
                yield self._turn(gateway, below, environment, messages)
            self.unlike = below.unlike
            tokens, _ = gateway.token_log(SESSION)
            self._pieces = [gateway.codec.piece(token) for token in tokens]
        finally:
            engine.shutdown()

    def facts(self) -> list[FactShown]:
        """Return what the last turn needed from earlier ones."""
        found = {}
        for judged in self._judged[-1]:
            slot = judged.slot
            if slot.kind in ("one_shot", "recurring") and not slot.copied:
                found[slot.handle] = self._fact(slot.handle, judged.right)
        return list(found.values())

    def _turn(
        self,
        gateway: Gateway,
        engine: WatchedEngine,
        environment: Environment,
        messages: list[dict[str, Any]],
    ) -> TurnShown:
        user = environment.request or ""
        judged, exact = len(environment.judged), len(environment.exact)
        answers = _hold(gateway, environment, messages, user)
        stats = gateway.stats(SESSION)
        self._judged.append(environment.judged[judged:])
        turn = TurnShown(
            number=len(self.turns) + 1,
            user=user,
            answers=answers,
            logical=stats.logical,
            live=stats.live,
            peak=stats.peak_live,
            evicted=engine.left,
            restored=engine.came,
            exact=all(environment.exact[exact:]),
        )
        self.turns.append(turn)
        return turn

    def _fact(self, text: str, recalled: bool) -> FactShown:
        places = set(find_text(self._pieces, text))
        gone: set[int] = set()
        away: list[int] = []
        came_back = None
        for turn in self.turns:
            gone |= places & _positions(turn.evicted)
            if gone & _positions(turn.restored):
                came_back = turn.number
            gone -= _positions(turn.restored)
            if gone:
                away.append(turn.number)
        ends = [turn.number for turn in self.turns if max(places, default=0) < turn.logical]
        return FactShown(text, ends[0], away, came_back, recalled)


def _positions(spans: Sequence[SpanRange]) -> set[int]:
    return {position for start, end in spans for position in range(start, end)}


def _hold(
    gateway: Gateway, environment: Environment, messages: list[dict[str, Any]], user: str
) -> list[str]:
    """Hold one user turn; return the raw assistant messages."""
    messages.append({"role": "user", "content": user})
    answers = []
    while True:
        reply = gateway.chat(SESSION, messages, environment.episode.tools)
        answers.append(reply.raw)
        messages.append(reply.message)
        if not reply.tool_calls:
            environment.reply(reply.content)
            return answers
        call = reply.tool_calls[0]
        function = call["function"]
        seen = environment.call(function["name"], json.loads(function["arguments"]))
        answer = {"role": "tool", "tool_call_id": call["id"], "content": seen.text}
        messages.append(answer)
        if seen.turn_over:
            return answers
