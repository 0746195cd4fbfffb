"""Our load generator against the engine's own client, on the same server and load, in turns.

    python benchmarks/serving_clients.py vllm --url http://127.0.0.1:8000 --model FOLDER \
        --command "ENV/bin/python -m vllm.entrypoints.cli.main bench serve"

One turn a session, random ids, the same number and length of prompts at the same concurrency.
Every repetition runs both clients, in an order that changes. Prints the medians of output tokens
per second, and the median of the paired ratios: what our client costs. The server must stand, and
must not cache prefixes (vLLM: --no-enable-prefix-caching, SGLang: --disable-radix-cache).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx

from agentbench_kv.results.stats import median
from agentbench_kv.run.provenance import hardware
from agentbench_kv.serving_bench.endpoints import authorization
from agentbench_kv.serving_bench.jobs import Load, LoadJob, SessionShape, Target, Workload
from agentbench_kv.serving_bench.loadgen import measure_apart
from agentbench_kv.serving_bench.prompts import read_vocabulary

COMMANDS = {"vllm": "vllm bench serve", "sglang": "python -m sglang.bench_serving"}
KEYS = (
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "p99_itl_ms",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
)


def ours(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Measure with our client, in a process of its own."""
    model = httpx.get(f"{args.url}/v1/models", headers=authorization()).json()["data"][0]["id"]
    job = LoadJob(
        Target(args.url, args.engine, model),
        Workload(SessionShape(args.input, args.output)).sessions(args.prompts),
        Load(args.prompts, concurrency=args.concurrency, warmup=args.warmup),
        read_vocabulary(args.model),
        seed,
    )
    result = measure_apart(job)
    if result.figures["failed"]:
        raise SystemExit(f"our requests failed: {result.errors}")
    return dict(result.figures)


def vllm(args: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """Measure with `vllm bench serve`."""
    run(
        args,
        f"--backend vllm --base-url {args.url} --endpoint /v1/completions --model {args.model} "
        f"--dataset-name random --random-input-len {args.input} --random-output-len {args.output} "
        f"--num-prompts {args.prompts} --max-concurrency {args.concurrency} --request-rate inf "
        f"--ignore-eos --temperature 0 --num-warmups {args.warmup} --seed {seed} "
        f"--save-result --result-dir {folder} --result-filename theirs.json",
    )
    return dict(json.loads((folder / "theirs.json").read_text()))


def sglang(args: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """Measure with `sglang.bench_serving`."""
    run(
        args,
        f"--backend sglang --base-url {args.url} --model {args.model} --tokenizer {args.model} "
        f"--dataset-name random-ids --random-input-len {args.input} "
        f"--random-output-len {args.output} --random-range-ratio 1.0 --tokenize-prompt "
        f"--num-prompts {args.prompts} --max-concurrency {args.concurrency} --request-rate inf "
        f"--warmup-requests {args.warmup} --seed {seed} --output-file {folder}/theirs.jsonl",
    )
    return dict(json.loads((folder / "theirs.jsonl").read_text().splitlines()[-1]))


def run(args: argparse.Namespace, options: str) -> None:
    """Run the engine's client; its output matters only if it fails."""
    command = [*shlex.split(args.command or COMMANDS[args.engine]), *shlex.split(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    """Measure in turns, then print the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=COMMANDS)
    parser.add_argument("--url", required=True, help="Without /v1.")
    parser.add_argument("--model", type=Path, required=True, help="Folder with the tokenizer.")
    parser.add_argument("--command", help="The engine's client.  [the engine's name for it]")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    args.url = args.url.rstrip("/").removesuffix("/v1")
    theirs = {"vllm": vllm, "sglang": sglang}[args.engine]
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for seed in range(args.repeats):
        with tempfile.TemporaryDirectory() as scratch:
            clients: dict[str, Callable[[], dict[str, float]]] = {
                "ours": lambda seed=seed: ours(args, seed),
                "theirs": lambda seed=seed, at=scratch: theirs(args, seed, Path(at)),
            }
            for name in sorted(clients, reverse=bool(seed % 2)):
                rows[name].append(clients[name]())
    plain = {key: str(value) for key, value in vars(args).items()}
    print(json.dumps({"hardware": hardware(), "args": plain}))
    for name, measured in rows.items():
        medians = (median([row[key] for row in measured]) for key in KEYS)
        known = zip(KEYS, medians, strict=True)
        print(f"{name:7s}", "  ".join(f"{key}={middle.point:.5g}" for key, middle in known))
    pairs = zip(rows["ours"], rows["theirs"], strict=True)
    ratio = median([our[KEYS[0]] / their[KEYS[0]] for our, their in pairs])
    print(f"output tok/s, ours over theirs: {ratio.point:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]")


if __name__ == "__main__":
    main()
