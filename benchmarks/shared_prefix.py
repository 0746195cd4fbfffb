"""What a shared prefix saves: sessions with one system message, with and without `prefix=shared`.

    python benchmarks/shared_prefix.py [--sessions 16] [--system 2048] [--repeats 9] [--engine NAME]

All sessions of an arm begin at once, each with the system message and a prompt of its own, and
decode until an event has fallen due. Arms are measured in rotated order; ratios are paired by
repetition, to the arm of the same method whose sessions hold their own rows. Tokens, events and
kept rows must be equal to that arm's, and `full`'s tokens, too. `used_mb` is the most that was held
at any moment that was looked at. `--model` is a folder or `micro`; `--layers N` instead takes
a Qwen3 with random weights and so many layers of Qwen3-0.6B's shape. Of a server `full` is as
shipped, with its own prefix cache; `full-constrained` is the plug-in's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentbench_kv.conformance.driver import TraceRecorder, plain_phases, read_kept
from agentbench_kv.engines.base import Engine, EngineOptions, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import LoadedModel, load_model, wrap_model
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.sglang.engine import SglangEngine
from agentbench_kv.engines.vllm.engine import VllmEngine
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import TurnNotes
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

# Servers, and what each calls the longest session; "" needs not be told.
SERVERS: dict[str, tuple[type[ServingEngine], str]] = {
    "vllm": (VllmEngine, "max-model-len"),
    "sglang": (SglangEngine, "context-length"),
    "llamacpp": (LlamaCppEngine, ""),
}
OWN_FULL = ("embedded", "llamacpp")  # whose `full` is no server as shipped
PROMPT, ANSWER = 64, 160  # tokens of a session's own
LOOK_S = 0.2  # between two looks at what is held
ROOM = 160  # rows of the budget beyond the system message


def random_model(layers: int) -> LoadedModel:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "eos_token_id": None,
    }  # fmt: skip
    network = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)  # logits far enough apart
    return wrap_model(network, Path(), "random")


@dataclass
class Arm:
    """An engine that runs a method, and how to look into it."""

    engine: Engine
    kept: Callable[[str], list[Any]]  # of a session: sorted kept rows of every event
    used: Callable[[], float]  # bytes of cached rows that sessions and prefixes hold


class EmbeddedArms:
    """A new engine for every arm; the model is loaded once."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    @contextmanager
    def arm(self, method: Method) -> Iterator[Arm]:
        seen = TraceRecorder()
        engine = EmbeddedEngine(self._model, method, max_live_tokens=1 << 24, recorder=seen)

        def used() -> float:
            pools = engine._scheduler.pools.full._pools.values()
            rows = sum(pool.capacity * len(pool._users) for pool in pools)
            return float(rows * engine.bytes_per_token)

        try:
            yield Arm(engine, lambda name: sorted_rows(seen.kept([name])), used)
        finally:
            engine.shutdown()


class ServerArms:
    """A new server for every arm, with room for all sessions' own rows."""

    def __init__(
        self, engine: type[ServingEngine], length: str, model: str, sessions: int, longest: int
    ) -> None:
        self._engine = engine
        self._options = partial(
            EngineOptions, model, device="cpu", dtype="float32", concurrency=sessions,
            max_live_tokens=sessions * (longest + 64),
            engine_args={length: str(longest + 64)} if length else {},
        )  # fmt: skip

    @contextmanager
    def arm(self, method: Method) -> Iterator[Arm]:
        with TemporaryDirectory() as trace:
            engine = self._engine.create(self._options(method, trace=Path(trace)))

            def kept(name: str) -> list[Any]:
                return sorted_rows(read_kept(Path(trace), [engine.kept_names(name)]))

            def used() -> float:
                return float(engine.pool_peak() or 0)

            try:
                yield Arm(engine, kept, used)
            finally:
                engine.shutdown()


def sorted_rows(events: list[torch.Tensor]) -> list[Any]:
    return [event.sort(-1).values.tolist() for event in events]


def play(arm: Arm, sessions: int, system: list[int]) -> tuple[dict[str, float], list[Any]]:
    """Return figures of an arm, and what its sessions did."""
    engine = arm.engine
    rng, said, firsts = random.Random(2), dict[str, list[int]](), dict[str, float]()
    names = [str(number) for number in range(sessions)]
    for name in names:
        prompt = system + [rng.randrange(5, 400) for _ in range(PROMPT)]
        engine.open(name, TokenPhases())
        engine.note(name, prompt, TurnNotes([], system=len(system)))
        engine.extend(name, prompt, plain_phases(prompt))

    def answer(name: str) -> None:
        generation = engine.generate(name, Sampling(max_tokens=ANSWER))
        said[name] = list(generation)
        firsts[name] = generation.first_token_s or 0.0

    threads = [Thread(target=answer, args=(name,)) for name in names]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    used = 0.0  # of what a server as shipped holds, nothing is left when they are done
    while any(thread.is_alive() for thread in threads):
        used = max(used, arm.used())
        threads[-1].join(LOOK_S)
    wall = time.perf_counter() - started
    stats = [engine.stats(name) for name in names]
    found = {
        "ttft_s": statistics.median(firsts.values()), "worst_ttft_s": max(firsts.values()),
        "wall_s": wall, "used_mb": max(used, arm.used()) / 1e6,
        "prefilled": sum(each.prefill_tokens - each.cached_tokens for each in stats),
        "events": sum(len(each.events) for each in stats),
    }  # fmt: skip
    return found, [(said[name], arm.kept(name)) for name in names]


def arms(engine: str, system: int) -> dict[str, Method]:
    full = "full" if engine in OWN_FULL else "full-constrained"
    found = {
        f"{name} {prefix}": make_method(name, size, {"prefix": prefix})
        for prefix in ("shared", "own")
        for name, size in ((full, None), ("agentkv@system", system + ROOM))
    }
    return found if engine in OWN_FULL else {**found, "full": make_method("full", None)}


def main() -> None:
    """Read the options, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--system", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default="micro")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--engine", choices=("embedded", *SERVERS), default="embedded")
    options = parser.parse_args()
    engines: EmbeddedArms | ServerArms
    if server := SERVERS.get(options.engine):
        longest = options.system + PROMPT + ANSWER
        engines = ServerArms(*server, options.model, options.sessions, longest)
    elif options.layers:
        engines = EmbeddedArms(random_model(options.layers))
    else:
        engines = EmbeddedArms(load_model(options.model, "float32", "cpu"))
    rng = random.Random(1)
    system = [rng.randrange(5, 400) for _ in range(options.system)]
    chosen = arms(options.engine, options.system)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for repeat in range(options.repeats):
        order = list(chosen)[repeat % len(chosen) :] + list(chosen)[: repeat % len(chosen)]
        did = {}
        for name in order:
            with engines.arm(chosen[name]) as arm:
                figures, did[name] = play(arm, options.sessions, system)
            found[name].append(figures)
            print(
                repeat, name, {key: round(value, 3) for key, value in figures.items()}, flush=True
            )
        for name in {arm.split()[0] for arm in chosen if " " in arm}:
            same = did[f"{name} own"] == did[f"{name} shared"]
            print(
                repeat, name, "tokens, events, kept rows", "equal" if same else "DIFFER", flush=True
            )
        if "full" in did:  # a server as shipped
            same = _tokens(did["full"]) == _tokens(did["full-constrained own"])
            print(repeat, "full: tokens", "equal" if same else "DIFFER", flush=True)
    print(f"{options.sessions} sessions, a system message of {options.system} tokens, medians of "
          f"{options.repeats}; ratios to `own` paired by repetition")  # fmt: skip
    for name, rows in found.items():
        line = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        base = found.get(f"{name.split()[0]} own", rows)
        ratios = {
            key: statistics.median(a[key] / b[key] for a, b in zip(rows, base, strict=True))
            for key in ("ttft_s", "wall_s", "used_mb")
            if all(row[key] for row in base)
        }
        print(f"{name:22}", {k: round(v, 3) for k, v in line.items()},
              "x", {k: round(v, 3) for k, v in ratios.items()})  # fmt: skip


def _tokens(did: list[Any]) -> list[list[int]]:
    return [said for said, _ in did]


if __name__ == "__main__":
    main()
