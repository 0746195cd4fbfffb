"""A server under many clients of every kind: whether it stays up, small, honest, and stops.

`kvbench serve` runs in a process of its own. Clients hold sessions, stream, leave in the middle of
an answer, send bodies slowly or never, send nonsense, flood it with one-shots and leave sessions
behind. Meanwhile /health has to answer and memory has to stay flat; afterwards the server's
counters have to be what the clients counted, and SIGTERM has to leave nothing running.

    python benchmarks/server_soak.py --sessions 1000 --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

IDLE_S, DRAIN_S = 10, 5
SERVE = ["-c", "from agentbench_kv.cli import main; main()", "serve"]
JUNK: list[Any] = [
    {},
    {"model": "micro", "messages": [{"role": "assistant", "tool_calls": 5}]},
    {"model": "micro", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10**30},
    {"model": "micro", "messages": [{"role": "robot", "content": "x"}]},
    {"model": "micro", "messages": [{"role": "user", "content": "x"}], "foo": 1},
    [[[]]],
]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200, help="clients at once")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine", default="embedded")
    parser.add_argument("--model", default="micro")
    parser.add_argument("--method", default="agentkv")
    parser.add_argument("--budget", default="128")
    parser.add_argument("--naming", default="auto", help="kvbench serve --sessions")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--port", type=int, default=18999)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@dataclass
class Soak:
    """What the clients share: the server's address, when to end, and what they counted."""

    url: str
    model: str
    http: aiohttp.ClientSession
    end: float
    seen: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)  # sessions nobody closed
    tokens: int = 0  # generated, as answers and final accounts say
    names: int = 0

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def name(self) -> str:
        self.names += 1
        return f"soak-{self.names}"

    def body(self, history: list[Any], **more: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": history, "max_tokens": 8, **more}

    async def post(self, body: Any, session: str | None = None) -> tuple[int, dict[str, Any]]:
        """Ask, and wait and ask again while the server is full."""
        headers = {"X-KVBench-Session": session} if session else {}
        while True:
            async with self.http.post(f"{self.url}/v1/chat/completions", json=body,
                                      headers=headers) as answer:  # fmt: skip
                self.statuses[answer.status] += 1
                found = await answer.json()
            if answer.status != 429:
                return answer.status, found
            await asyncio.sleep(1)

    async def close(self, session: str, *, booked: bool = False) -> None:
        """Close a session and take its account; one that is not open yet may come late."""
        async with self.http.delete(f"{self.url}/v1/sessions/{session}") as answer:
            found = await answer.json()
        if answer.status == 200:
            if not booked:
                self.tokens += found["kvbench"]["usage"]["completion_tokens"]
            self.seen["expired sessions" if found.get("expired") else "closed sessions"] += 1
        elif not booked and session not in self.left:
            self.left.append(session)


async def hold(soak: Soak, rng: random.Random) -> None:
    """Hold a session for some turns and close it."""
    session, history = soak.name(), [{"role": "user", "content": f"task {rng.random()}"}]
    for _ in range(rng.randint(1, 6)):
        status, answer = await soak.post(soak.body(history), session)
        if status != 200:
            soak.seen[f"held sessions refused with {status}"] += 1
            break
        # Not from the account: under load a session may expire between two requests.
        soak.tokens += answer["usage"]["completion_tokens"]
        history += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        await asyncio.sleep(rng.random() / 4)
    await soak.close(session, booked=True)


async def converse(soak: Soak, rng: random.Random) -> None:
    """Hold a conversation without naming a session; many begin alike."""
    history: list[Any] = [{"role": "user", "content": rng.choice("abc")}]
    for _ in range(rng.randint(1, 4)):
        status, answer = await soak.post(soak.body(history))
        if status != 200:
            soak.seen[f"conversations refused with {status}"] += 1
            return
        soak.tokens += answer["usage"]["completion_tokens"]
        soak.seen["tokens cached without a name"] += answer["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        said = answer["choices"][0]["message"]
        history += [said, {"role": "user", "content": f"{rng.randint(0, 9)}"}]


async def leave(soak: Soak, rng: random.Random) -> None:
    """Hang up in the middle of a stream; sometimes the session is left behind as well."""
    session = soak.name()
    body = soak.body([{"role": "user", "content": "tell"}], stream=True, max_tokens=200)
    patience = aiohttp.ClientTimeout(total=rng.random())
    headers = {"X-KVBench-Session": session}
    try:
        async with soak.http.post(f"{soak.url}/v1/chat/completions", json=body, headers=headers,
                                  timeout=patience) as answer:  # fmt: skip
            await answer.read()
        soak.seen["streams read"] += 1
    except TimeoutError:
        soak.seen["streams left"] += 1
    if rng.random() < 0.5:
        soak.left.append(session)
    else:
        await soak.close(session)


async def crawl(soak: Soak, rng: random.Random) -> None:
    """Send half a request, a byte at a time, and go away or wait to be sent away."""
    host, port = soak.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    text = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    if rng.random() < 0.5:
        text += b"Content-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    try:
        for byte in text:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(rng.random() / 50)
        if rng.random() < 0.3:
            await asyncio.wait_for(reader.read(), 20)
        soak.seen["slow senders"] += 1
    except (OSError, TimeoutError):
        soak.seen["slow senders sent away"] += 1
    finally:
        writer.close()


async def flood(soak: Soak, rng: random.Random) -> None:
    """Send many one-shots at once."""

    async def once() -> None:
        body = soak.body([{"role": "user", "content": f"{rng.random()}"}], max_tokens=1)
        status, answer = await soak.post(body)
        assert status == 200, answer
        soak.tokens += answer["usage"]["completion_tokens"]
        soak.seen["one-shots"] += 1

    await asyncio.gather(*(once() for _ in range(rng.randint(2, 40))))


async def babble(soak: Soak, rng: random.Random) -> None:
    """Send what is no request."""
    status, answer = await soak.post(rng.choice(JUNK))
    assert 400 <= status < 500, (status, answer)
    soak.seen["refusals"] += 1
    await asyncio.sleep(rng.random() / 4)


KINDS: list[Callable[[Soak, random.Random], Awaitable[None]]]
KINDS = [hold, hold, converse, leave, leave, crawl, flood, babble]


async def client(soak: Soak, number: int, seed: int) -> None:
    """Be one kind of client after another."""
    rng = random.Random(f"{seed}:{number}")
    while not soak.over:
        try:
            await rng.choice(KINDS)(soak, rng)
        except aiohttp.ClientError as error:
            soak.seen[f"connection trouble: {type(error).__name__}"] += 1
            await asyncio.sleep(0.1)


@dataclass
class Vitals:
    """How the server was over time."""

    rss_mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)

    async def watch(self, soak: Soak, pid: int) -> None:
        """Look once a second."""
        while True:
            self.look(pid)
            start = time.monotonic()
            async with soak.http.get(f"{soak.url}/health") as answer:
                assert answer.status == 200
            self.health_ms.append((time.monotonic() - start) * 1e3)
            await asyncio.sleep(1)

    def look(self, pid: int) -> None:
        status = Path(f"/proc/{pid}/status").read_text()
        self.rss_mb.append(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024)
        self.threads.append(int(re.findall(r"Threads:\s+(\d+)", status)[0]))
        self.files.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))

    @property
    def growth_mb(self) -> float:
        """How much the last third was above the second."""
        third = len(self.rss_mb) // 3
        return max(self.rss_mb[-third:]) - max(self.rss_mb[third : 2 * third])


async def metrics(soak: Soak) -> dict[str, float]:
    async with soak.http.get(f"{soak.url}/metrics") as answer:
        text = await answer.text()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def settle(soak: Soak) -> dict[str, float]:
    """Wait until nothing is answered and idle sessions have expired, then close what is left."""
    for _ in range(10 * IDLE_S):
        found = await metrics(soak)
        if not found["kvbench_requests_in_flight"] and not found["kvbench_sessions"]:
            break
        await asyncio.sleep(1)
    for session in soak.left:
        await soak.close(session)
    return await metrics(soak)


async def stop(soak: Soak, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Send SIGTERM while answers are streamed; say how they and the process ended."""
    body = soak.body([{"role": "user", "content": "tell"}], stream=True, max_tokens=4000)

    async def stream() -> str:
        try:
            async with soak.http.post(f"{soak.url}/v1/chat/completions", json=body) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            return type(error).__name__
        if answer.status != 200:
            return str(json.loads(text)["error"]["code"])
        if not text.endswith("data: [DONE]\n\n"):
            return "cut"
        return "server_stopping" if "server_stopping" in text else "whole"

    streams = [asyncio.create_task(stream()) for _ in range(40)]
    await asyncio.sleep(1)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    ends = Counter(await asyncio.gather(*streams))
    code = await asyncio.to_thread(process.wait, 120)
    alive = [pid for pid in descendants(process.pid) if Path(f"/proc/{pid}").exists()]
    seconds = round(time.monotonic() - started, 1)
    return {"streams": dict(ends), "code": code, "seconds": seconds, "left_running": alive}


def descendants(group: int) -> list[int]:
    """Return the processes of a group; the server leads one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(int(path.parent.name))
    return found


def judge(soak: Soak, vitals: Vitals, counted: dict[str, float]) -> dict[str, bool]:
    """Return what has to be true."""
    route = '{route="/v1/chat/completions",status="'
    answered = counted.get(f'kvbench_requests_total{route}200"}}', 0)
    errors = sum(v for k, v in counted.items() if k.startswith("kvbench_requests_total")
                 and re.search(r'status="5', k))  # fmt: skip
    streams = soak.seen["streams read"] + soak.seen["streams left"]
    return {
        "memory is flat": vitals.growth_mb < 0.05 * max(vitals.rss_mb) + 10,
        "health always answered": max(vitals.health_ms) < 10_000,
        "no 5xx": errors == 0 and not any(status >= 500 for status in soak.statuses),
        "200s add up": soak.statuses[200] <= answered <= soak.statuses[200] + streams,
        "tokens add up": counted["kvbench_generated_tokens_total"] == soak.tokens,
        "no session is left": counted["kvbench_sessions"] == 0,
        "no request is left": counted["kvbench_requests_in_flight"] == 0,
    }


async def soak(args: argparse.Namespace, process: subprocess.Popen[bytes]) -> bool:
    """Run the clients, print what was found, return whether all is well."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    vitals = Vitals()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        url = f"http://127.0.0.1:{args.port}"
        shared = Soak(url, args.model, http, 0.0)
        await up(shared, process)
        shared.end = time.monotonic() + args.seconds
        watch = asyncio.create_task(vitals.watch(shared, process.pid))
        await asyncio.gather(*(client(shared, n, args.seed) for n in range(args.sessions)))
        watch.cancel()
        counted = await settle(shared)
        vitals.look(process.pid)
        stopped = await stop(shared, process)
    checks = judge(shared, vitals, counted)
    checks["ended by SIGTERM in time"] = stopped["code"] == 0 and stopped["seconds"] < DRAIN_S + 15
    checks["nothing left running"] = not stopped["left_running"]
    checks["no stream was cut"] = set(stopped["streams"]) <= {"whole", "server_stopping"}
    health = sorted(vitals.health_ms)
    shown = {
        "clients": dict(shared.seen),
        "statuses": dict(shared.statuses),
        "tokens": [counted["kvbench_generated_tokens_total"], shared.tokens],
        "rss_mb": [round(value) for value in vitals.rss_mb[:: max(1, len(vitals.rss_mb) // 12)]],
        "growth_mb": round(vitals.growth_mb, 1),
        "files": [vitals.files[0], max(vitals.files), vitals.files[-1]],
        "threads": [vitals.threads[0], max(vitals.threads), vitals.threads[-1]],
        "health_ms": {"median": round(health[len(health) // 2]), "max": round(health[-1])},
        "stop": stopped,
        "checks": checks,
    }
    print(json.dumps(shown, indent=2))
    return all(checks.values())


async def up(soak: Soak, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            async with soak.http.get(f"{soak.url}/health"):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.5)
    raise SystemExit("the server did not start")


def main() -> None:
    """Start the server, run the soak, exit 1 if anything is wrong."""
    args = parse()
    options = {
        "engine": args.engine, "model": args.model, "method": args.method, "port": args.port,
        "concurrency": args.concurrency, "session-idle": IDLE_S, "drain": DRAIN_S,
        "max-sessions": 1_000_000, "sessions": args.naming,
    }  # fmt: skip
    options |= {"budget": args.budget} if args.method != "full" else {}
    command = [sys.executable, *SERVE]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            well = asyncio.run(soak(args, process))
        finally:
            if process.poll() is None:
                process.kill()
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
    print("the server's last lines:", *lines[-12:], sep="\n  ")
    quiet = not any("Traceback" in line for line in lines)
    print("no traceback in its log:", quiet)
    sys.exit(0 if well and quiet else 1)


if __name__ == "__main__":
    main()
