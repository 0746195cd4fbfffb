"""How many sessions a serving engine holds in a pool of one size, with and without eviction.

Sessions are opened one after the other, each with a prompt and an answer, and stay open. The count
is how many there are before the engine drops, preempts or queues one. A second figure is how many
run at the same time when all are asked at once. Both are ratios of memory: no figure is a speed.

    python benchmarks/serving_sessions.py --engine vllm --pool 8192 --budget 256
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import torch

from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import load_engine, make_method


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--model", default="micro")
    parser.add_argument("--method", default="agentkv")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--pool", type=int, default=8192, help="tokens")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--most", type=int, default=48, help="sessions tried")
    return parser.parse_args()


def ask(engine: Any, name: str, prompt: int, answer: int) -> None:
    """Open a session, prefill a prompt, decode an answer; leave it open."""
    tokens = torch.randint(5, 250, (prompt,)).tolist()
    engine.open(name, TokenPhases())
    engine.extend(name, tokens, [TokenPhases().label(token) for token in tokens])
    list(engine.generate(name, Sampling(max_tokens=answer)))


def trouble(engine: Any) -> int:
    """Return how many sessions lost their rows so far."""
    pool = engine.pool()
    return int(pool["dropped"] + pool["preempted"])


def at_rest(engine: Any, args: argparse.Namespace) -> int:
    """Return how many sessions stay in the pool before one must leave it."""
    before, held = trouble(engine), 0
    for number in range(args.most):
        ask(engine, f"rest-{number}", args.prompt, args.answer)
        if trouble(engine) > before:
            break
        held += 1
    for number in range(min(held + 1, args.most)):
        engine.close(f"rest-{number}")
    return held


def at_once(engine: Any, args: argparse.Namespace) -> int:
    """Return the most sessions that ran at the same time when all were asked together."""
    threads = [
        threading.Thread(target=ask, args=(engine, f"run-{i}", args.prompt, 4 * args.answer))
        for i in range(args.most)
    ]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, int(engine.pool()["running"]))
        time.sleep(0.02)
    for i in range(args.most):
        engine.close(f"run-{i}")
    return most


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Count a method's sessions on an engine of its own, and the megabytes of its pool."""
    settings = {"interval": args.interval, "trigger": "prefill+every"}
    compresses = not name.startswith("full")
    method = make_method(name, args.budget if compresses else None, settings if compresses else {})
    options = EngineOptions(
        model=args.model,
        method=method,
        device="auto",
        concurrency=args.most,
        max_live_tokens=args.pool,
        engine_args={},
    )
    engine = load_engine(args.engine).create(options)
    try:
        held = round(engine.bytes_per_token * args.pool / 1e6, 1)
        counts = {"at_rest": at_rest(engine, args), "at_once": at_once(engine, args)}
        return {"pool_mb": held, **counts}
    finally:
        engine.shutdown()


def main() -> None:
    """Measure both methods and print a table."""
    args = parse()
    results = {name: measure(name, args) for name in ("full-constrained", args.method)}
    print(json.dumps({**vars(args), "sessions": results}))
    print(f"{'method':>18} {'pool MB':>8} {'at rest':>8} {'at once':>8}")
    for name, found in results.items():
        print(f"{name:>18} {found['pool_mb']:>8} {found['at_rest']:>8} {found['at_once']:>8}")


if __name__ == "__main__":
    main()
