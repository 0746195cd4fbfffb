"""Memory banks of the server: rows of past sessions, which later ones are attached to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from agentbench_kv.engines.core.memory import SessionMemory, before_rope, memory_method
from agentbench_kv.engines.llamacpp.server.scheduler import BatchScheduler
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import describe_backend
from agentbench_kv.methods.memory.bank import MemoryBank
from agentbench_kv.methods.memory.files import PastFiles, PastRows

Request = Mapping[str, Any]


class MemoryCommands:
    """Filling banks and attaching sessions to them, on the scheduler's thread.

    Keys in a bank have their RoPE pairs half a head apart, whatever llama.cpp's order is.
    """

    def __init__(self, scheduler: BatchScheduler, files: PastFiles | None) -> None:
        self._scheduler = scheduler
        self._files = files
        self._banks: dict[str, MemoryBank] = {}

    def handlers(self) -> dict[str, Callable[[Request], Any]]:
        work = {
            "memorise": lambda r: self._memorise(r["session"], r["bank"], r["tokens"], r["start"]),
            "recollect": lambda r: self._recollect(r["bank"], r["past"]),
            "preserve": lambda r: self._preserve(r["bank"], r["past"], r["seconds"]),
            "attach": lambda r: self._attach(r["session"], r["bank"]),
            "recalled": lambda r: self._recalled(r["session"]),
            "forget": lambda r: self._banks.pop(r["bank"], None) is not None,
        }
        call = self._scheduler.call
        return {
            name: lambda request, do=do: call(lambda: do(request))  # type: ignore[misc]
            for name, do in work.items()
        }

    def _bank(self, name: str) -> MemoryBank:
        method = memory_method(self._scheduler.policy.method)
        return self._banks.setdefault(name, MemoryBank(method.block))

    def _memorise(self, name: str, bank: str, tokens: int | None, start: int) -> int:
        session = self._scheduler.idle_session(name)
        fed, held = session.ledger.fed, self._bank(bank)
        count = fed if tokens is None else tokens
        if not 0 <= start <= count <= fed:
            what = f"{start} to {count}" if start else str(count)
            raise UsageError(f"session {name} has seen {fed} tokens, not {what}")
        keys, values = session.rows.read_own(start, count)
        if keys.shape[2] != count - start:
            raise UsageError(f"{keys.shape[2]} of {count - start} tokens are in the cache")
        frequencies = self._scheduler.cells.form.frequencies
        first = session.positions_taken + start
        plain = before_rope(keys, first, frequencies, interleaved=False)
        blocks = held.append(plain, values, session.mark, start)
        if session.memory is not None and session.memory.holds(held):
            session.memory.has(blocks)
        return count - start

    def _recollect(self, bank: str, past: list[int]) -> float | None:
        found = None if self._files is None else self._files.find(past)
        if found is None:
            return None
        self._bank(bank).append(found.keys, found.values)
        return found.seconds

    def _preserve(self, bank: str, past: list[int], seconds: float) -> None:
        if self._files is not None:
            self._files.keep(past, PastRows(*self._banks[bank].newest, seconds))

    def _attach(self, name: str, bank: str) -> int:
        """Open a session that brings back rows of a bank; return how many."""
        method = memory_method(self._scheduler.policy.method)
        frequencies = self._scheduler.cells.form.frequencies
        memory = SessionMemory(method, self._banks[bank], frequencies)
        self._scheduler.attach(name, memory)
        return memory.rows

    def _recalled(self, name: str) -> list[list[int]]:
        session = self._scheduler.sessions.get(name)
        memory = None if session is None else session.memory
        found: list[list[int]] = [] if memory is None else memory.recalled().tolist()
        return found


def past_files(folder: Path, about: Mapping[str, str], scheduler: BatchScheduler) -> PastFiles:
    """Return the files of past sessions as this process reads them."""
    form = scheduler.cells.form
    shape = form.shape
    known = {
        **about,
        "kernels": describe_backend(torch.device("cpu")),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(form.dtype),
        "rope": repr((shape.rope_base, shape.rope_factors, shape.yarn)),
    }
    return PastFiles(folder, known, (shape.layers, shape.kv_heads, shape.head_dim), form.dtype)
