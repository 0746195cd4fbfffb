"""The embedded engine: a Hugging Face decoder with a session cache of our own.

It is the reference that every other engine is checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.engines.base import (
    SPAN_CAPABILITIES,
    Capability,
    Engine,
    EngineInfo,
    EngineOptions,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.core.kv_dtype import KV_DTYPES
from agentbench_kv.engines.core.memory import SessionMemory, before_rope, memory_method
from agentbench_kv.engines.embedded.generation import EmbeddedGeneration
from agentbench_kv.engines.embedded.model import (
    IN_MEMORY,
    LoadedModel,
    cache_shape,
    check_dtype,
    free_tokens,
    load_model,
    pick_device,
    read_settings,
    wrap_model,
)
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.engines.embedded.past import past_files
from agentbench_kv.engines.embedded.quantization import read_kv_dtype
from agentbench_kv.engines.embedded.scheduler import EmbeddedScheduler, StepTimes
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.engines.embedded.span_rows import (
    evict_spans,
    restore_block,
    save_block,
    span_attention,
)
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.methods.memory.bank import MemoryBank
from agentbench_kv.methods.memory.files import PastRows
from agentbench_kv.methods.memory.memart import MemArt
from agentbench_kv.methods.spans import Block, SpanRange, TurnNotes


class EmbeddedEngine(Engine):
    """Sessions over a Hugging Face decoder; `max_live_tokens` is half the free memory if absent."""

    capabilities: ClassVar[frozenset[Capability]] = SPAN_CAPABILITIES | {
        Capability.COMPRESS,
        Capability.CAPTURE,
        Capability.FORK,
        Capability.FORCE,
        Capability.REWIND,
        Capability.CONSTRAIN,
        Capability.LOGPROBS,
        Capability.PROTECT_SYSTEM,
        Capability.SHARE_PREFIX,
        Capability.MEMORY_BLOCKS,
    }

    kv_dtypes: ClassVar[tuple[str, ...]] = tuple(KV_DTYPES)

    def __init__(
        self,
        model: LoadedModel,
        method: Method,
        *,
        name: str = "",
        max_live_tokens: int | None = None,
        recorder: Observer | None = None,
        kv_dtype: str = "",
        banks: Path | None = None,
    ) -> None:
        self._model = model
        self.wants_notes = method.asks_for_system
        self._shape = cache_shape(model, method)
        self._mean_embedding: Tensor | None = None
        self._method = method
        self._banks: dict[str, MemoryBank] = {}
        self._files = None if banks is None else past_files(banks, model, kv_dtype)
        self._vocabulary = int(model.network.get_input_embeddings().num_embeddings)
        device, size = model.shape.device, self._shape.bytes_per_token
        # As if windows grew with the session: what memory is counted for is there.
        whole = size + model.window_shape.bytes_per_token
        limit = max_live_tokens or free_tokens(whole, device=device)
        self._scheduler = EmbeddedScheduler(model, method, limit, recorder, kv_dtype)
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        dtype = str(model.shape.dtype).removeprefix("torch.")
        self.info = EngineInfo(
            *("embedded", name or str(model.path), model.path, model.sha, where, dtype),
            *(model.context_limit, model.eos_token_ids, self.capabilities),
            details=model.attention.details()
            | ({"kv_dtype": f"{kv_dtype}, simulated"} if kv_dtype else {}),
        )

    @classmethod
    def create(
        cls, options: EngineOptions, *, model: Any = None, recorder: Observer | None = None
    ) -> Self:
        """Build the engine; `model` may be a network already in memory."""
        if model is None:
            loaded = load_model(options.model, options.dtype, options.device, options.context_limit)
        else:
            loaded = wrap_model(model.eval(), Path(options.model), IN_MEMORY)
        return cls(
            loaded,
            options.method,
            name=options.model,
            max_live_tokens=options.max_live_tokens,
            recorder=recorder,
            kv_dtype=options.kv_dtype,
            banks=options.banks,
        )

    @classmethod
    def check_model(cls, model: str) -> None:
        read_settings(model)

    @classmethod
    def check_method(cls, model: str, method: Method) -> None:
        read_settings(model).check_method(method)

    @classmethod
    def check_options(cls, options: EngineOptions) -> None:
        read_settings(options.model, options.context_limit).check_method(options.method)

    @classmethod
    def check_kv_dtype(cls, options: EngineOptions) -> None:
        if options.kv_dtype:
            windowed = read_settings(options.model, options.context_limit).windowed > 0
            read_kv_dtype(options.kv_dtype, options.method, windows=windowed)

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        check_dtype(dtype)
        pick_device(device)

    @property
    def times(self) -> StepTimes:
        return replace(self._scheduler.times)

    @property
    def bytes_per_token(self) -> int:
        return self._shape.bytes_per_token

    def allocated_bytes(self, session: str) -> int:
        return self._scheduler.get(session).nbytes

    @property
    def pool_bytes(self) -> int:
        return self._scheduler.pools.nbytes

    def pool(self) -> dict[str, int]:
        limit = self._scheduler.max_live_tokens
        return {"allocated_bytes": self.pool_bytes, "max_live_tokens": limit}

    def pool_peak(self) -> int | None:
        return self._scheduler.pool_peak()

    def drop_prefixes(self) -> None:
        self._scheduler.drop_prefixes()

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        self._scheduler.open(session, labeller)

    def note(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> None:
        super().note(session, tokens, notes)
        self._scheduler.get(session).ledger.opens_with(system=notes.system)

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        state = self._scheduler.get(session)
        self._check_length(session, state.positions_taken + state.logical + len(tokens))
        self._check_ids(session, tokens)
        state.extend(tokens, phases)

    def _check_ids(self, session: str, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise UsageError(
                f"session {session}: token ids from {min(tokens)} to {max(tokens)}; the model has "
                f"{self._vocabulary}, numbered from 0"
            )

    def generate(self, session: str, sampling: Sampling) -> Generation:
        return self._start(session, sampling)

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:
        if not tokens:
            raise UsageError(f"session {session}: no tokens to force")
        self._check_ids(session, tokens)
        state = self._scheduler.get(session)
        self._check_length(session, state.positions_taken + state.logical + len(tokens) - 1)
        return self._start(session, Sampling(max_tokens=len(tokens)), tokens, predict=predict)

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        """Open a session that goes on from where another one is.

        Cached rows are shared until one of the two would write over the other's, or an event
        changes them in place: that one then copies its own. Rows of windows, and rows with sums
        (h2o), are copied by the first that goes on; kept queries are copied at once.
        """
        self._scheduler.fork(session, new, labeller)

    def memorise(self, session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        """Add rows of a session to a memory bank, between two generations; return how many.

        Those that it brought back itself are no part of it.
        """
        # On the engine's thread, where sessions read the bank.
        held = self._bank(bank)
        return self._scheduler.between_turns(session, self._memorise, held, tokens, start)

    def _bank(self, name: str) -> MemoryBank:
        block = memory_method(self._method).block
        return self._banks.setdefault(name, MemoryBank(block, self._shape.device))

    def _memorise(
        self, state: EmbeddedSession, bank: MemoryBank, tokens: int | None, start: int = 0
    ) -> int:
        self._check_whole(state)
        count = state.fed if tokens is None else tokens
        if not 0 <= start <= count <= state.fed:
            what = f"{start} to {count}" if start else str(count)
            raise UsageError(f"session {state.name} has seen {state.fed} tokens, not {what}")
        first, turned = state.positions_taken + start, self._shape.interleaved
        own = slice(first, state.positions_taken + count)
        rows = [each[:, :, own] for each in (state.cache.keys, state.cache.values)]
        keys = before_rope(rows[0], first, state.frequencies, interleaved=turned)
        blocks = bank.append(keys, rows[1].clone(), state.mark, start)
        if state.memory is not None and state.memory.holds(bank):
            state.memory.has(blocks)
        return count - start

    def recollect(self, session: str, bank: str, tokens: Sequence[int]) -> float | None:
        # Too many to be read are too many: who reads them says so.
        room = min(self.info.context_limit, self._scheduler.max_live_tokens)
        if self._files is None or len(tokens) >= room:
            return None
        found = self._files.find(tokens)
        if found is None:
            return None
        held = self._bank(bank)
        self._scheduler.between_turns(session, lambda _: held.append(found.keys, found.values))
        return found.seconds

    def preserve(self, bank: str, tokens: Sequence[int], seconds: float) -> None:
        if self._files is not None:
            self._files.keep(tokens, PastRows(*self._banks[bank].newest, seconds))

    def attach(self, session: str, bank: str) -> None:
        """Have every prompt of a new session bring back rows of a bank, before it is read.

        Their number is fixed here; a bank that grows later has more to choose from.
        """
        method, held = memory_method(self._method), self._banks[bank]
        rows = method.rows_of(held)
        self._check_length(session, rows)
        self._scheduler.between_turns(session, self._attach, method, held, more=rows)

    def _attach(self, state: EmbeddedSession, method: MemArt, bank: MemoryBank) -> None:
        if state.logical or state.memory is not None:
            raise UsageError(f"session {state.name} has begun: a memory is attached before that")
        turned = self._shape.interleaved
        state.attach(SessionMemory(method, bank, state.frequencies, interleaved=turned))

    def recalled(self, session: str) -> NDArray[np.int64]:
        memory = self._scheduler.get(session).memory
        return np.zeros((0, 0), np.int64) if memory is None else memory.recalled()

    def forget(self, bank: str) -> None:
        self._banks.pop(bank, None)

    def rewind(self, session: str, length: int) -> None:
        """Forget a session's tokens from logical position `length` on.

        Rows stay where they are, also if a fork reads them. Where layers have windows, UsageError
        once the session has outgrown them.
        """
        self._scheduler.between_turns(session, self._rewind, length)

    def _rewind(self, state: EmbeddedSession, length: int) -> None:
        self._check_whole(state)
        lengths = {"tokens": state.logical, "fed": state.fed}
        window = 0 if state.window is None else state.window.window or 0
        self._check_rewind(state.name, state.method, length, **lengths, window=window)
        state.rewind(length)

    def _check_whole(self, state: EmbeddedSession) -> None:
        if state.broken is not None:
            raise KVBenchError(f"session {state.name} broke earlier: {state.broken}")

    def _start(
        self,
        session: str,
        sampling: Sampling,
        given: Sequence[int] = (),
        *,
        predict: bool = False,
    ) -> Generation:
        state = self._scheduler.get(session)
        self._check_whole(state)
        if not state.pending:
            raise KVBenchError(f"session {session} has no tokens to start from")
        generation = EmbeddedGeneration(state, sampling, given, predict)
        self._scheduler.submit(generation)
        return generation

    def save_block(self, session: str, start: int, end: int) -> Block:
        return self._scheduler.between_turns(session, save_block, start, end)

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        return self._scheduler.between_turns(session, evict_spans, spans)

    def restore_block(self, session: str, block: Block, at: int | None = None) -> None:
        more = block.tokens
        self._scheduler.between_turns(session, restore_block, block, at, more=more)

    def span_attention(
        self, session: str, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
    ) -> list[float]:
        return self._scheduler.between_turns(session, span_attention, spans, layers, decay)

    def embed_tokens(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        weight: Tensor = self._model.network.get_input_embeddings().weight.detach()
        if self._mean_embedding is None:
            self._mean_embedding = weight.float().mean(0)
        rows = weight[torch.tensor(list(tokens), device=weight.device)].float()
        vectors: NDArray[np.float32] = (rows - self._mean_embedding).cpu().numpy()
        return vectors

    def stats(self, session: str) -> KVStats:
        return self._scheduler.get(session).stats()

    def close(self, session: str) -> KVStats:
        return self._scheduler.remove(session).stats()

    def progress(self) -> int | None:
        return self._scheduler.progress()

    def shutdown(self) -> None:
        self._scheduler.stop()
