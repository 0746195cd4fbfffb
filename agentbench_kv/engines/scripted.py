"""The scripted engine: replays texts written in advance, so a task can be checked without a model.

Agents whose score is known (gold, corrupt, null) run through the same gateway and sessions as a
model does. Nothing is computed and nothing is ever evicted.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Self

from agentbench_kv.engines.base import (
    Capability,
    Engine,
    EngineInfo,
    EngineOptions,
    FinishReason,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
    ScriptSource,
)
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import ContextLimitError, PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.tokens import load_tokenizer

AGENTS = ("gold", "corrupt", "null")
EXHAUSTED = "Done."
_CONTEXT_LIMIT = 1 << 24  # scripts are not a model: their length is up to the task


@dataclass
class ScriptedSession:
    """What a session was given and said."""

    labeller: PhaseLabeller
    stats: KVStats = field(default_factory=KVStats)
    pending: int = 0
    tokens: list[int] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)


class ScriptedEngine(Engine):
    """Replays texts as token ids; the k-th generation of a session id is its k-th text.

    A text that breaks the constraint of its request is an error of the script. A forced answer is
    none of the texts, and a fork goes on with those of the session it is from.

    The count of a session id goes on when the session is closed and opened again, because that is
    what a reset does in the middle of a trial. `scripts` gives the assistant texts of a session id,
    in order, without turn ends; past the last one the engine says `Done.`
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.CONSTRAIN, Capability.FORCE, Capability.FORK}
    )

    def __init__(
        self,
        scripts: ScriptSource,
        *,
        tokenizer_path: Path,
        model: str = "gold",
        context_limit: int = _CONTEXT_LIMIT,
    ) -> None:
        self._tokenizer: Any = load_tokenizer(tokenizer_path)
        if self._tokenizer.eos_token_id is None:
            raise PrerequisiteError(
                f"the tokenizer in {tokenizer_path} has no end: name eos_token in "
                "tokenizer_config.json"
            )
        self._scripts = scripts
        self._sessions: dict[str, ScriptedSession] = {}
        self._turns: defaultdict[str, int] = defaultdict(int)
        self._origins: dict[str, str] = {}  # fork -> the session whose texts it goes on with
        self._lock = threading.Lock()
        sha = sha256((tokenizer_path / "tokenizer.json").read_bytes()).hexdigest()
        ends = (int(self._tokenizer.eos_token_id),)
        self.info = EngineInfo(
            *("scripted", model, tokenizer_path, sha, "cpu", "none", context_limit, ends),
            self.capabilities,
        )

    @classmethod
    def check_model(cls, model: str) -> None:
        if model not in AGENTS:
            raise unknown_name("scripted agent", model, AGENTS)

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        if options.scripts is None:
            raise PrerequisiteError(
                "the scripted engine replays a task's scripts, and there is no task here; "
                "use it through `kvbench selftest task NAME`"
            )
        path = model_path("micro")
        if not (path / "tokenizer.json").is_file():
            raise PrerequisiteError(f"no tokenizer in {path}; reinstall agentbench-kv")
        return cls(options.scripts, tokenizer_path=path, model=options.model)

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        with self._lock:
            if session in self._sessions:
                raise ValueError(f"session {session!r} is open already")
            self._sessions[session] = ScriptedSession(labeller)

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        state = self._sessions[session]
        if len(tokens) != len(phases):
            raise ValueError(f"{len(tokens)} tokens but {len(phases)} phases")
        length = len(state.tokens) + len(tokens)
        if length > self.info.context_limit:
            raise ContextLimitError(
                f"the session would be {length} tokens; the limit is {self.info.context_limit}"
            )
        state.tokens.extend(tokens)
        state.phases.extend(phases)
        state.pending += len(tokens)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        state, origin = self._sessions[session], self._origins.get(session, session)
        with self._lock:
            turn = self._turns[origin]
            self._turns[origin] += 1
        texts = self._scripts(origin)
        text = texts[turn] if turn < len(texts) else EXHAUSTED
        with self._lock:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        room = self.info.context_limit - len(state.tokens)
        return ScriptedGeneration(state, [*ids, *self.info.eos_token_ids[:1]], sampling, room)

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:  # noqa: ARG002  it predicts nothing
        state = self._sessions[session]
        room = self.info.context_limit - len(state.tokens)
        if len(tokens) > room:
            raise ContextLimitError(f"{len(tokens)} tokens are given, there is room for {room}")
        return ScriptedGeneration(state, tokens, Sampling(max_tokens=len(tokens)), room)

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        with self._lock:
            state = self._sessions[session]
            if new in self._sessions:
                raise UsageError(f"session {new} is open already")
            live = state.stats.live
            stats = KVStats(live=live, peak_live=live, logical=state.stats.logical)
            logs = (state.tokens.copy(), state.phases.copy())
            self._sessions[new] = ScriptedSession(labeller, stats, state.pending, *logs)
            self._origins[new] = self._origins.get(session, session)

    def stats(self, session: str) -> KVStats:
        return replace(self._sessions[session].stats, events=[])

    def close(self, session: str) -> KVStats:
        with self._lock:
            self._origins.pop(session, None)
            return self._sessions.pop(session).stats

    def sessions(self) -> list[str]:
        with self._lock:
            return sorted(self._sessions)

    def token_log(self, session: str) -> list[int]:
        """Return every id the session was given or generated."""
        return list(self._sessions[session].tokens)

    def phase_log(self, session: str) -> list[Phase]:
        return list(self._sessions[session].phases)


@dataclass(eq=False)
class ScriptedGeneration(Generation):
    """One text being replayed."""

    session: ScriptedSession
    ids: Sequence[int]
    sampling: Sampling
    room: int
    cancelled: bool = False

    def __post_init__(self) -> None:
        self._start = time.perf_counter()

    def __iter__(self) -> Iterator[int]:
        state, stats = self.session, self.session.stats
        stats.prefill_tokens += state.pending
        stats.longest_prefill = max(stats.longest_prefill, state.pending)
        state.pending = 0
        self._count_live()
        for count, token in enumerate(self.ids, start=1):
            if self.cancelled:
                self.finish_reason = FinishReason.CANCELLED
                return
            if count > self.room:
                self.finish_reason = FinishReason.CONTEXT_LIMIT
                return
            self._check(token)
            state.tokens.append(token)
            state.phases.append(state.labeller.label(token))
            stats.decode_tokens += 1
            stats.decode_kv_sum += len(state.tokens)
            self._count_live()
            self.last_token_s = time.perf_counter() - self._start
            self.first_token_s = self.first_token_s or self.last_token_s
            self.finish_reason = self.sampling.ends(token, count)
            yield token
            if self.finish_reason is not None:
                return

    def cancel(self) -> None:
        self.cancelled = True

    def _check(self, token: int) -> None:
        constraint = self.sampling.constraint
        if constraint is None:
            return
        if not constraint.allowed()[token]:
            raise UsageError(f"the script breaks what the request demands, at token {token}")
        constraint.accept(token)

    def _count_live(self) -> None:
        stats = self.session.stats
        stats.logical = stats.live = stats.peak_live = len(self.session.tokens)
