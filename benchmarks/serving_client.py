"""What the load generator itself can sustain: its client against a server without a model.

    python benchmarks/serving_client.py [--concurrency 16 64] [--tokens 256] [--repeats 9]

The server is a process of its own that answers `POST /v1/completions` with ready-made chunks in
vLLM's form, one token each. Two questions, for every concurrency:

* flood: the server sends as fast as it is read. Output tokens per second and requests per second
  are the client's limit (or the server's, whichever is lower), with the client's CPU time a token.
* paced: every stream gets a token each `--itl-ms`. The ideal is concurrency / ITL tokens per
  second; what is missing is the overhead of client and server together.

Compare with the engines' own clients as docs/serving-bench.md says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time

from agentbench_kv.run.provenance import hardware
from agentbench_kv.serving_bench.jobs import (
    Load,
    LoadJob,
    SessionShape,
    Target,
    Vocabulary,
    Workload,
)
from agentbench_kv.serving_bench.loadgen import measure

CHUNK = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "none",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
    "usage": None,
}


def framed(data: bytes) -> bytes:
    """Return a chunk of a chunked HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(document: dict[str, object]) -> bytes:
    """Return one server-sent event as a chunk."""
    return framed(b"data: " + json.dumps(document).encode() + b"\n\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, itl_s: float) -> None:
    """Answer the requests of one connection until it is closed."""
    token = event(CHUNK)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    try:
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            size = next(
                int(line.split(b":")[1])
                for line in request.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            wanted = json.loads(await reader.readexactly(size))["max_tokens"]
            writer.write(head)
            began = time.perf_counter()
            for number in range(wanted):
                late = time.perf_counter() - began - number * itl_s
                await asyncio.sleep(max(-late, 0.0) if itl_s else 0.0)
                writer.write(token)
                await writer.drain()
            usage = {"prompt_tokens": 1, "completion_tokens": wanted}
            writer.write(event({**CHUNK, "choices": [], "usage": usage}))
            writer.write(framed(b"data: [DONE]\n\n") + framed(b""))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve(port: int, itl_s: float) -> None:
    """Serve until killed."""
    server = await asyncio.start_server(
        lambda reader, writer: answer(reader, writer, itl_s), "127.0.0.1", port, backlog=1024
    )
    print("ready", flush=True)
    await server.serve_forever()


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def one(port: int, args: argparse.Namespace, concurrency: int) -> dict[str, float]:
    """Measure once; sessions of one turn, so that nothing but the stream costs time."""
    job = LoadJob(
        Target(f"http://127.0.0.1:{port}", "vllm", "none"),
        Workload(SessionShape(args.prompt, args.tokens)).sessions(concurrency * args.rounds),
        Load(concurrency * args.rounds, concurrency=concurrency, warmup=concurrency),
        Vocabulary(32000),
    )
    cpu = time.process_time()
    result = measure(job)
    found = result.figures
    if found["failed"]:
        raise SystemExit(f"requests failed: {result.errors}")
    # The warm-up is in the CPU time too: one round more.
    tokens = found["total_output_tokens"] * (args.rounds + 1) / args.rounds
    return {
        "output_tok_s": found["output_throughput"],
        "requests_s": found["request_throughput"],
        "client_cpu_us_per_token": (time.process_time() - cpu) / tokens * 1e6,
        "p99_itl_ms": found["p99_itl_ms"],
    }


def measured(args: argparse.Namespace, itl_ms: float) -> None:
    """Start a server, measure every concurrency, print medians."""
    port = free_port()
    command = [sys.executable, __file__, "--serve", str(port), "--itl-ms", str(itl_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            for concurrency in args.concurrency:
                rows = [one(port, args, concurrency) for _ in range(args.repeats)]
                row = {key: statistics.median(each[key] for each in rows) for key in rows[0]}
                if itl_ms:
                    ideal = concurrency * 1e3 / itl_ms * args.tokens / (args.tokens - 1)
                    row["ideal_tok_s"] = ideal
                    row["missing_percent"] = 100 * (1 - row["output_tok_s"] / ideal)
                name = f"{'paced' if itl_ms else 'flood'}, {concurrency} streams"
                print(f"{name:20s}", "  ".join(f"{key}={value:.4g}" for key, value in row.items()))
        finally:
            server.kill()


def main() -> None:
    """Measure, then print the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.itl_ms / 1e3))
        return
    print(json.dumps({"hardware": hardware(), "args": vars(args)}))
    for itl_ms in (0.0, args.itl_ms):
        measured(args, itl_ms)


if __name__ == "__main__":
    main()
