"""The engine contract: sessions of token ids whose KV state lives across turns.

An engine never sees messages or text. It is given token ids with their phases, keeps the KV rows of
each session, evicts what the method tells it to evict, and reports what it holds. The exception are
engines at text level, see `engines.text`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.accounting import KVEvent as KVEvent
from agentbench_kv.accounting import KVStats as KVStats
from agentbench_kv.accounting import LayerReach
from agentbench_kv.errors import ContextLimitError, UsageError
from agentbench_kv.methods.base import Method, Phase, QueryKind
from agentbench_kv.methods.spans import Block, SpanRange, TurnNotes


class Capability(StrEnum):
    """What an engine can do; a method states what it needs done to a session's cache."""

    COMPRESS = "compress"
    EVICT_SPANS = "evict_spans"
    FORK = "fork"
    REWIND = "rewind"
    FORCE = "force"
    SAVE_BLOCK = "save_block"
    RESTORE_BLOCK = "restore_block"
    SPAN_ATTENTION = "span_attention"
    EMBED_TOKENS = "embed_tokens"
    CAPTURE = "capture"
    MEMORY_BLOCKS = "memory_blocks"
    TEXT = "text"
    CONSTRAIN = "constrain"
    LOGPROBS = "logprobs"
    PROTECT_SYSTEM = "protect_system"
    OFFLOAD = "offload"
    SHARE_PREFIX = "share_prefix"


# What an engine that moves single rows can do to spans.
SPAN_CAPABILITIES = frozenset(
    {
        Capability.EVICT_SPANS,
        Capability.SAVE_BLOCK,
        Capability.RESTORE_BLOCK,
        Capability.SPAN_ATTENTION,
        Capability.EMBED_TOKENS,
    }
)


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT_LIMIT = "context_limit"
    CANCELLED = "cancelled"
    ENDPOINT_ERROR = "endpoint_error"


# Whatever the model had to say, it was ended in the middle of it.
CUT_OFF = frozenset({FinishReason.CONTEXT_LIMIT, FinishReason.CANCELLED})


class PhaseLabeller(Protocol):
    """Labels a session's tokens one by one; holds the state between them."""

    def label(self, token: int) -> Phase:
        """Return the phase of the next token of the session."""


class Constraint(Protocol):
    """Which tokens a generation may draw; holds the state between them."""

    grammar: str  # the same in llguidance's Lark, for backends that hold to a grammar themselves

    def allowed(self) -> NDArray[np.bool_]:
        """Return for every id whether it may come next; never none. Ids behind the end may not."""

    def accept(self, token: int) -> None:
        """Take the token that was drawn."""


@dataclass(frozen=True)
class TokenLogprob:
    """What the model gave a token it drew: before temperature, cut-offs and constraint."""

    token: int
    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...] = ()  # the likeliest ids with theirs, best first


@dataclass(frozen=True)
class Sampling:
    """How one generation picks its tokens."""

    max_tokens: int  # at least 1
    temperature: float = 0.0  # 0 means greedy
    top_p: float = 1.0  # 1.0 switches the nucleus cut-off off
    top_k: int = 0  # 0 switches the cut-off off
    seed: int = 0  # of this generation's own random stream
    stop_token_ids: frozenset[int] = frozenset()  # they end it and are kept in the session
    stop: Callable[[int], bool] | None = None  # asked after every token; True ends the generation
    constraint: Constraint | None = None  # of this generation alone
    logprobs: int | None = None  # how many of the likeliest ids to note; None notes nothing

    def ends(self, token: int, produced: int) -> FinishReason | None:
        """Return why a generation ends with this token, its `produced`-th; None if it goes on."""
        if token in self.stop_token_ids or (self.stop is not None and self.stop(token)):
            return FinishReason.STOP
        return FinishReason.LENGTH if produced >= self.max_tokens else None


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is and can do."""

    name: str
    model: str  # as the user named it
    model_path: Path  # folder with the tokenizer (and the weights where the engine is local)
    model_sha: str  # over config and weights; part of a run's provenance
    device: str
    dtype: str
    context_limit: int  # last position + 1 a session may reach
    eos_token_ids: tuple[int, ...]  # ids that end the model's turn
    capabilities: frozenset[Capability] = frozenset()
    # What else tells two set-ups of an engine apart: its version, its flags.
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def reach(self) -> LayerReach | None:
        """Which layers a method reaches; None if it is all of them."""
        return LayerReach.read(self.details)

    @property
    def rewinds(self) -> bool:
        """Whether it can forget the end of a session alone; windows forget themselves."""
        return Capability.REWIND in self.capabilities and self.reach is None


class Generation(ABC):
    """A running generation: iterate for its token ids, in order, until it is exhausted.

    After `cancel` the iterator still yields every token the session really holds, so that a token
    log built from it is exact. Times are seconds from the call of `Engine.generate`.
    """

    finish_reason: FinishReason | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens so far, where they were asked for
    best: Sequence[int] = ()  # of given tokens that were to be predicted: the model's own best
    # Prompt tokens found in a server's prefix cache, other sessions' included; None: not told.
    cached_tokens: int | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield the generated ids."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the engine to stop after the token in flight."""


class Engine(ABC):
    """Sessions of tokens over a KV cache. Thread-safe: sessions may be driven from many threads.

    One session is driven by one thread at a time.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    takes_arguments: ClassVar[bool] = False  # does it pass `EngineOptions.engine_args` on?
    at_once: ClassVar[int] = 16  # sessions that a run drives at once if nobody says how many
    info: EngineInfo
    kv_dtypes: ClassVar[tuple[str, ...]] = ()  # precisions of cached rows other than the dtype
    wants_notes: bool = False  # whether `note` is to be called before `extend`
    outlives_runs: bool = False  # whether another run may go on with it, after `reconfigure`

    @classmethod
    def check_model(cls, model: str) -> None:  # noqa: ARG003
        """Refuse a model name this engine cannot use: UsageError or PrerequisiteError."""
        return None

    @classmethod
    def check_method(cls, model: str, method: Method) -> None:  # noqa: ARG003
        """Refuse a method this engine cannot run on a model that it can use: UsageError."""
        return None

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:  # noqa: ARG003
        """Refuse a dtype or device this engine cannot use: UsageError or PrerequisiteError."""
        return None

    @classmethod
    def check_options(cls, options: EngineOptions) -> None:
        """Refuse options that do not go together; `create` refuses the same.

        UsageError or PrerequisiteError.
        """
        cls.check_method(options.model, options.method)

    @classmethod
    def check_kv_dtype(cls, options: EngineOptions) -> None:
        """Refuse a precision of cached rows that the engine has not, or not for the method."""
        if options.kv_dtype and options.kv_dtype not in cls.kv_dtypes:
            raise UsageError(
                f"--kv-dtype {options.kv_dtype}: the engine's cache has no such rows; it knows: "
                f"{', '.join(cls.kv_dtypes) or 'none but the dtype'}"
            )

    @abstractmethod
    def open(self, session: str, labeller: PhaseLabeller) -> None:
        """Start an empty session; `labeller` is called for every generated token, in order."""

    @abstractmethod
    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        """Append prompt tokens with their phases; the next `generate` prefills them.

        Raises ContextLimitError if the session would pass the model's context.
        """

    @abstractmethod
    def generate(self, session: str, sampling: Sampling) -> Generation:
        """Prefill what is pending, then decode until a stop or a limit."""

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:
        """Prefill what is pending, then take these ids, at least one, as if they had been drawn.

        Phases, kept queries, events and accounting are those of a decode of the same ids. The
        generation yields them and ends by its length. With `predict` its `best` is what a greedy
        decode would have drawn in each one's place. Raises ContextLimitError if they do not fit.
        """
        raise self._cannot(Capability.FORCE, session, tokens, predict)

    @abstractmethod
    def stats(self, session: str) -> KVStats:
        """Return a snapshot of the session's accounting."""

    @abstractmethod
    def close(self, session: str) -> KVStats:
        """Free the session's cache and return its final accounting; KeyError if unknown."""

    def note(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> None:
        """Take what the gateway knows about tokens that the next `extend` adds.

        An engine with `PROTECT_SYSTEM` or `SHARE_PREFIX` wants notes under methods that ask for it
        (`Method.asks_for_system`), and tells the session's ledger how long its system message is.
        """
        del session, tokens
        if notes.hints:
            raise UsageError(f"engine {self.info.name!r} runs no method that takes hints")

    def recalls(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> list[SpanRange]:
        """Return the evicted spans of which new tokens should bring a reminder in words."""
        del session, tokens, notes
        return []

    def decode_with(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Take the function that turns ids into text, for encoders that read text."""
        del decode

    def save_block(self, session: str, start: int, end: int) -> Block:
        """Copy the rows of logical positions `[start, end)` to the host, between two generations.

        Raises UsageError if a position is not in the cache, or the engine cannot save.
        """
        raise self._cannot(Capability.SAVE_BLOCK, session, start, end)

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        """Remove logical spans from all layers and heads, between two generations.

        Positions that are not in the cache are passed over. One call is one event; returns the
        tokens removed. ConnectionError if the rows went with a backend, and only the next
        generation will compute them again.
        """
        raise self._cannot(Capability.EVICT_SPANS, session, spans)

    def restore_block(self, session: str, block: Block, at: int | None = None) -> None:
        """Put a saved block back between two generations, without a forward pass.

        Parameters
        ----------
        session : str
            The one it was saved from, or another one that has seen its logical positions.
        block : Block
            None of its logical positions may be in the cache.
        at : int, optional
            RoPE position of its first token; keys turn by the difference. If not given: where it
            was saved, bit for bit, or behind the last row where positions are the cache's.
        """
        raise self._cannot(Capability.RESTORE_BLOCK, session, block, at)

    def span_attention(
        self, session: str, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
    ) -> list[float]:
        """Return the attention that the session's kept queries give each logical span.

        That is per span the mean over layers, heads and weighted queries of its softmax
        probability.

        Parameters
        ----------
        layers : sequence of int
            Negative ones count from the last; empty for all.
        decay : float
            Weight of a query relative to the next newer one.
        """
        raise self._cannot(Capability.SPAN_ATTENTION, session, spans, layers, decay)

    def embed_tokens(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the model's input embeddings [tokens, hidden], less their mean over all ids.

        What all ids have in common would make any two spans alike.
        """
        raise self._cannot(Capability.EMBED_TOKENS, tokens)

    def memorise(self, session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        """Add rows of a session to a memory bank, between two generations; return how many.

        Of its first `tokens`, or if not given of all that the model has seen, those from `start`
        on. Turn by turn comes to the same as at once, if nothing else is added between. The bank is
        made if it is new. One that the session is attached to does not bring them back to it.
        UsageError under a method without a memory, or if the session has fewer.
        """
        raise self._cannot(Capability.MEMORY_BLOCKS, session, bank, tokens, start)

    def recollect(self, session: str, bank: str, tokens: Sequence[int]) -> float | None:  # noqa: ARG002
        """Add to a memory bank what a file holds of a past session of these tokens.

        `session` is open and empty, and stays so. Return the seconds that the model took to read
        the tokens when the file was made; None if it has to read them, as where no files are kept.
        """
        return None

    def preserve(self, bank: str, tokens: Sequence[int], seconds: float) -> None:  # noqa: B027
        """Keep what was memorised last in a file, for `recollect`; nothing where none are kept.

        `tokens` are that session's, `seconds` what the model took to read them.
        """

    def attach(self, session: str, bank: str) -> None:
        """Have every prompt of a new session bring back rows of a bank, before it is read.

        They come as the method chooses, before the session's own. KeyError for an unknown bank.
        """
        raise self._cannot(Capability.MEMORY_BLOCKS, session, bank)

    def recalled(self, session: str) -> NDArray[np.int64]:
        """Return which of its bank's rows a session's last prompt brought back: [layers, rows].

        Ascending in every layer; no rows before the first prompt, or without a bank.
        """
        raise self._cannot(Capability.MEMORY_BLOCKS, session)

    def forget(self, bank: str) -> None:
        """Free a bank; sessions that it is attached to keep it until they are closed."""
        raise self._cannot(Capability.MEMORY_BLOCKS, bank)

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        """Open a session that goes on from where another one, between two generations, is.

        Neither learns what becomes of the other. `labeller` is as in `open`; the new session's
        account has its lengths, and nothing of what was done before.
        """
        raise self._cannot(Capability.FORK, session, new, labeller)

    def rewind(self, session: str, length: int) -> None:
        """Forget a session's tokens from logical position `length` on, between two generations.

        What is fed next takes their positions. Rows below stay as they are, and what was evicted of
        them stays evicted. Work that was done stays counted, nothing counts as evicted. The
        labeller is the caller's to bring back. Raises UsageError if the session has fewer tokens,
        its method keeps more than plain rows (queries, sums, positions of the cache), or layers
        with a window have lost what lies before.
        """
        raise self._cannot(Capability.REWIND, session, length)

    def _check_rewind(
        self, session: str, method: Method, length: int, *, tokens: int, fed: int, window: int = 0
    ) -> None:
        """Refuse to rewind a session of so many tokens, the model having seen `fed` of them.

        `window` is what layers with a window keep in rings, which lose what they write over.
        """
        queries = method.query_plan().kind is not QueryKind.NONE
        if method.compresses or queries or method.positions == "cache":
            raise UsageError(
                f"session {session} cannot be rewound under {method.label}, which keeps more than "
                "its tokens' rows; use full or full-constrained"
            )
        if not 0 <= length <= tokens:
            raise UsageError(
                f"session {session} has {tokens} tokens and cannot be rewound to {length}"
            )
        if length < fed and 0 < window < fed:
            raise UsageError(
                f"session {session} has outgrown its model's windows of {window} tokens and cannot "
                "be rewound: they have forgotten what came before; open another one"
            )

    def _check_length(self, session: str, tokens: int) -> None:
        if tokens >= self.info.context_limit:
            raise ContextLimitError(
                f"session {session} would reach {tokens} tokens; "
                f"the model's context is {self.info.context_limit}"
            )

    def _cannot(self, capability: Capability, *_: object) -> UsageError:
        return UsageError(
            f"engine {self.info.name!r} has no {capability.value}; kvbench ls engines shows who has"
        )

    def pool(self) -> dict[str, int]:
        """Return figures of the KV memory, such as `free_blocks` and `total_blocks`, if known."""
        return {}

    @property
    def restarts(self) -> int:
        """How often the process that it works in died and was started again."""
        return 0

    def pool_peak(self) -> int | None:
        """Return the most bytes of KV memory that sessions took up since this was last asked.

        What they share counts once, and whole slots or blocks count, as nobody else can have the
        rest of one. An engine that cannot look back says what they take up now; None if it is not
        known.
        """
        return None

    def drop_prefixes(self) -> None:
        """Drop the shared prefixes that no session reads, a server's own prefix cache included.

        An engine without any has nothing to drop. KVBenchError if a server keeps it.
        """
        return

    def progress(self) -> int | None:
        """Return a number that changes with every piece of work done.

        None while there is nothing to do, or if the engine does not say. An engine whose number
        stays the same for long is taken for hung, and the run ends.
        """
        return None

    def reconfigure(self, method: Method) -> None:
        """Go on with another method, without a new start.

        KVBenchError or OSError if it cannot: a session is open, the method needs another start, or
        the engine has died. It is then as it was.
        """
        raise UsageError(
            f"engine {self.info.name!r} needs a new start for another method ({method.label})"
        )

    def shutdown(self) -> None:
        """Release threads, processes and memory. The engine is unusable afterwards.

        What is still asked of it, and every later call, raises EngineGoneError.
        """
        return None


ScriptSource = Callable[[str], Sequence[str]]  # session id -> assistant texts


def spelled_arguments(given: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's own arguments by their names with dashes; UsageError for one given twice.

    vLLM's command line takes underscores for dashes in a name, up to a dot: behind it are keys of a
    JSON value.
    """
    spelled: dict[str, str] = {}
    for name, value in given.items():
        option, dot, keys = name.partition(".")
        dashed = option.replace("_", "-") + dot + keys
        if dashed in spelled:
            raise UsageError(f"--engine-arg {dashed} is given twice, with dashes and underscores")
        spelled[dashed] = value
    return spelled


@dataclass(frozen=True)
class EngineOptions:
    """Options of `Engine.create`; an engine ignores what it has no use for."""

    model: str  # a shipped model's name (`micro`), a folder, or what the engine understands
    method: Method  # budget included
    device: str = "auto"  # or `cpu`, `cuda`, `cuda:N`
    dtype: str = "float32"  # or `bfloat16`, `float16`
    concurrency: int = 16  # sessions the caller will drive at once
    max_live_tokens: int | None = None  # over all sessions; None takes half of the free memory
    context_limit: int = 0  # tokens a session may have: fewer than the model's, or more by YaRN
    scripts: ScriptSource | None = None  # for the scripted engine
    trace: Path | None = None  # folder for what every event kept, for conformance checks
    load_format: str = "auto"  # or `dummy`: random weights of the model's shape, throughput only
    # Options passed on to a serving engine's own command line, by their names without the dashes in
    # front.
    engine_args: Mapping[str, str] = field(default_factory=dict)
    # Go on with a version of a serving engine that the adapter was not written for.
    allow_untested: bool = False
    kv_dtype: str = ""  # of cached rows, a name in `Engine.kv_dtypes`; empty for the dtype
    banks: Path | None = None  # folder in which the rows of past sessions are kept

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine_args", spelled_arguments(self.engine_args))
