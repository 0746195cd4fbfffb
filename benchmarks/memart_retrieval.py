"""What MemArt's retrieval takes beside the prefill of the question it is for, and its index.

    python benchmarks/memart_retrieval.py --model FOLDER --rows 200000 --question 60 --repeats 5

The bank is random, of the model's shape. Each repeat asks one question without a memory and one
with it, in turns; printed are medians: the prefill alone, what choosing and splicing took in all
layers, and the same question's whole time with a memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.core.memory import SessionMemory
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.memory.bank import MemoryBank
from agentbench_kv.registry import make_method

SESSION = 1000  # tokens of a past session


class Others:
    """Every token is text."""

    def label(self, token: int) -> Phase:  # noqa: ARG002
        return Phase.OTHERS


def random_bank(engine: EmbeddedEngine, rows: int, block: int) -> MemoryBank:
    shape, source = engine._shape, torch.Generator().manual_seed(0)
    bank = MemoryBank(block)
    for first in range(0, rows, SESSION):
        size = (shape.layers, shape.kv_heads, min(SESSION, rows - first), shape.head_dim)
        keys, values = (torch.randn(size, generator=source) for _ in range(2))
        bank.append(keys, values.to(shape.dtype))
    return bank


def ask(engine: EmbeddedEngine, question: list[int], memory: bool) -> float:
    """Return the seconds to the first token."""
    engine.open("s", Others())
    if memory:
        engine.attach("s", "bank")
    engine.extend("s", question, [Phase.OTHERS] * len(question))
    started = time.perf_counter()
    list(engine.generate("s", Sampling(max_tokens=1)))
    seconds = time.perf_counter() - started
    engine.close("s")
    return seconds


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--question", type=int, default=60)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--topk", type=int, default=128)
    given: Any = options.parse_args()
    method = make_method("memart", None, {"topk": str(given.topk)})
    engine = EmbeddedEngine.create(
        EngineOptions(str(Path(given.model).expanduser()), method, dtype=given.dtype)
    )
    bank = random_bank(engine, given.rows, 16)
    engine._banks["bank"] = bank
    print(
        f"index {bank.index_nbytes / 2**20:.0f} MiB, rows {bank.nbytes / 2**20:.0f} MiB: ", end=""
    )
    print(f"1/{bank.nbytes / bank.index_nbytes:.1f}")
    spent: list[float] = []

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*asked: Any) -> Any:
            started = time.perf_counter()
            done = work(*asked)
            spent[-1] += time.perf_counter() - started
            return done

        return run

    SessionMemory.ask = timed(SessionMemory.ask)  # type: ignore[method-assign]
    SessionMemory.front = timed(SessionMemory.front)  # type: ignore[method-assign]
    tokens: Tensor = torch.randint(1, 1000, (given.question,), generator=torch.Generator())
    question = tokens.tolist()
    plain, whole = [], []
    for _ in range(given.repeats + 1):
        plain.append(ask(engine, question, memory=False))
        spent.append(0.0)
        whole.append(ask(engine, question, memory=True))
    engine.shutdown()
    alone, retrieval, both = (median(times[1:]) for times in (plain, spent, whole))
    print(
        f"prefill of {given.question} tokens alone {alone:.3f} s, retrieval {retrieval:.3f} s ",
        end="",
    )
    print(f"({retrieval / alone:.0%}), with memory {both:.3f} s; {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
