"""Decode throughput of the embedded engine against Hugging Face `generate`, paired and repeated.

    python benchmarks/embedded.py [--model micro] [--sessions 16] [--live 2048] [--repeats 9]

Arms, interleaved in every repetition: HF `generate` on a static batch with its full cache; the
engine with `full`; the engine with AgentKV (or `--methods`) at a budget. Prints medians; figures
with the machine they were measured on belong in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import DTYPES, model_path, pick_device
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import make_method
from agentbench_kv.run.calibration import calibrated
from agentbench_kv.run.provenance import hardware


class ConstantPhase:
    """Labels every token `others`: throughput does not depend on labels."""

    def label(self, token: int) -> Phase:  # noqa: ARG002
        """Return OTHERS."""
        return Phase.OTHERS


def prompts(args: argparse.Namespace, vocab: int) -> torch.Tensor:
    """Random prompts [sessions, live]."""
    stream = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (args.sessions, args.live), generator=stream)


def hf_arm(args: argparse.Namespace) -> Callable[[], dict[str, float]]:
    """Time `generate` for 1 + N tokens minus for 1 token: N decode steps of the whole batch."""
    device = pick_device(args.device)
    model = AutoModelForCausalLM.from_pretrained(
        model_path(args.model), dtype=DTYPES[args.dtype], local_files_only=True
    )
    model = model.to(device).eval()
    ids = prompts(args, model.config.vocab_size).to(device)

    def generate(tokens: int) -> float:
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    def measure() -> dict[str, float]:
        prefill = generate(1)
        seconds = generate(1 + args.tokens) - prefill
        return {"tok_s": args.sessions * args.tokens / seconds}

    return measure


def engine_arm(
    args: argparse.Namespace, method: str, budget: int | None
) -> Callable[[], dict[str, float]]:
    """Prefill all sessions and take one token, then time N decode steps of all."""
    settings = {"trigger": "prefill+every"} if budget else {}
    options = EngineOptions(
        model=args.model,
        method=calibrated(make_method(method, budget, settings), args.model, args.device),
        dtype=args.dtype,
        device=args.device,
    )

    def measure() -> dict[str, float]:
        engine = EmbeddedEngine.create(options)
        vocab = engine._model.network.config.vocab_size
        names = [f"s{i}" for i in range(args.sessions)]
        for name, row in zip(names, prompts(args, vocab).tolist(), strict=True):
            engine.open(name, ConstantPhase())
            engine.extend(name, row, [Phase.OTHERS] * len(row))
        drain(engine, names, 1)
        before = engine.times
        seconds = drain(engine, names, args.tokens)
        after = engine.times
        stats = [engine.stats(name) for name in names]
        allocated = sum(engine.allocated_bytes(name) for name in names)
        theoretical = sum(s.live for s in stats) * engine.bytes_per_token
        engine.shutdown()
        return {
            "tok_s": args.sessions * args.tokens / seconds,
            "event_share": (after.event_s - before.event_s) / seconds,
            "events": after.events - before.events,
            "live": statistics.median(s.live for s in stats),
            "allocated_mib": allocated / 2**20,
            "theoretical_mib": theoretical / 2**20,
        }

    return measure


def drain(engine: EmbeddedEngine, names: list[str], tokens: int) -> float:
    """Generate `tokens` in every session; return the seconds it took."""
    started = time.perf_counter()
    running = [engine.generate(name, Sampling(max_tokens=tokens)) for name in names]
    for generation in running:
        for _ in generation:
            pass
    return time.perf_counter() - started


def main() -> None:
    """Measure, then print the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="micro")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--live", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--methods", nargs="+", default=["agentkv"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    arms = {
        "hf_generate_full": hf_arm(args),
        "engine_full": engine_arm(args, "full", None),
    }
    for method in args.methods:
        arms[f"engine_{method}_{args.budget}"] = engine_arm(args, method, args.budget)
    for arm in arms.values():
        arm()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(args.repeats):
        for name, arm in arms.items():
            samples[name].append(arm())
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in samples.items()
    }
    base = [row["tok_s"] for row in samples["hf_generate_full"]]
    for name, rows in samples.items():
        ratios = [row["tok_s"] / b for row, b in zip(rows, base, strict=True)]
        medians[name]["ratio_to_hf"] = statistics.median(ratios)
    print(json.dumps({"hardware": hardware(), "args": vars(args)}))
    for name, row in medians.items():
        print(f"{name:24s}", "  ".join(f"{key}={value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
