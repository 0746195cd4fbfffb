"""The load generator: plays a job's sessions over HTTP, times every answer, derives the figures.

`measure_apart` does so in a process of its own (`__main__`). Figures have the names that
`vllm bench serve` and `sglang.bench_serving` use.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec
import numpy as np

from agentbench_kv.errors import KVBenchError
from agentbench_kv.serving_bench import endpoints
from agentbench_kv.serving_bench.endpoints import HttpRequest, TimedTurn
from agentbench_kv.serving_bench.jobs import LoadJob
from agentbench_kv.serving_bench.prompts import Speaker

_REFUSED = 400  # the least HTTP status that is one
_WARMUP_SEED = 1 << 40
_MOST_ERRORS = 5
_MEDIANS = ("peak_live", "live", "logical")
_SUMMED = ("events", "evicted", "restored", "prefill_tokens", "recomputed", "session_resets")

PlaySession = Callable[[int], Awaitable[list[TimedTurn]]]


class JobResult(msgspec.Struct, frozen=True):
    """One measurement."""

    figures: dict[str, int | float]  # see `figures`
    kv: dict[str, Any] | None  # see `kv_figures`
    errors: dict[str, int]  # what failed requests said and how often, the most frequent ones
    warmup_errors: int  # failed requests of the warm-up
    requests: list[TimedTurn]  # every request, without its gaps and ids


def measure_apart(job: LoadJob) -> JobResult:
    """Play a job in a process of its own; `KVBenchError` if that process dies."""
    command = [sys.executable, "-m", "agentbench_kv.serving_bench"]
    done = subprocess.run(command, input=msgspec.json.encode(job), capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else "it said nothing"
        raise KVBenchError(f"the load generator ended with code {done.returncode}: {why}")
    return msgspec.json.decode(done.stdout, type=JobResult)


def measure(job: LoadJob) -> JobResult:
    played = asyncio.run(play(job))
    errors = Counter(turn.error for turn in played.turns if turn.error)
    requests = [msgspec.structs.replace(turn, itls_s=[], ids=[]) for turn in played.turns]
    return JobResult(
        figures(played),
        kv_figures(played.turns),
        dict(errors.most_common(_MOST_ERRORS)),
        len(played.warmup_errors),
        requests,
    )


class PlayedJob(msgspec.Struct, frozen=True):
    """What was sent and answered in a job."""

    turns: list[TimedTurn]  # all that were sent, in the order of sessions
    duration_s: float  # from the first session's beginning to the last token
    warmup_errors: list[str] = []


async def play(job: LoadJob) -> PlayedJob:
    """Warm up, then play the sessions."""
    load = job.load
    async with endpoints.open_client() as client:
        player = Player(client, job)
        warm_up = _sessions(job, player, job.seed + _WARMUP_SEED, load.warmup)
        measured = _sessions(job, player, job.seed, load.sessions)
        warm = await _closed(warm_up, load.warmup, load.at_once)
        began = time.perf_counter()
        if load.rate is None:
            turns = await _closed(measured, load.sessions, load.at_once)
        else:
            turns = await _open(measured, poisson(load.rate, load.sessions, job.seed), began)
    for turn in turns:
        turn.start -= began
    errors = [turn.error for turn in warm if turn.error]
    return PlayedJob(turns, max((turn.end for turn in turns), default=0.0), errors)


def _sessions(job: LoadJob, player: Player, seed: int, count: int) -> PlaySession:
    """Write all prompts now, before any clock starts; return what plays a session."""
    speaker = Speaker(job.vocabulary, job.workload, seed)
    prompts = [speaker.prompts(index) for index in range(count)]
    name = f"bench-{uuid.uuid4().hex[:12]}"  # the same server may serve several jobs
    return lambda index: player.play(index, f"{name}-{index}", prompts[index])


async def _closed(play: PlaySession, sessions: int, at_once: int) -> list[TimedTurn]:
    """Keep `at_once` sessions open until all were played."""
    queue = iter(range(sessions))

    async def lane() -> list[TimedTurn]:
        return [turn for index in queue for turn in await play(index)]

    lanes = await asyncio.gather(*(lane() for _ in range(min(at_once, sessions))))
    return sorted((turn for lane in lanes for turn in lane), key=lambda t: (t.session, t.turn))


async def _open(play: PlaySession, starts: Sequence[float], began: float) -> list[TimedTurn]:
    """Begin every session at its time, however many are open then."""

    async def later(index: int, start: float) -> list[TimedTurn]:
        await asyncio.sleep(max(began + start - time.perf_counter(), 0.0))
        return await play(index)

    played = await asyncio.gather(*(later(index, start) for index, start in enumerate(starts)))
    return [turn for turns in played for turn in turns]


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return when sessions begin, in seconds: the first at 0, `rate` a second on average."""
    # The same seed gives the same schedule; another rate stretches it.
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    starts: list[float] = (np.concatenate([[0.0], np.cumsum(gaps)[:-1]]) / rate).tolist()
    return starts


class AnswerError(Exception):
    """The server's answer is of no use; the text says why."""


class Player:
    """Plays sessions of one job."""

    def __init__(self, client: aiohttp.ClientSession, job: LoadJob) -> None:
        self._client = client
        self._job = job
        self._endpoint = endpoints.ENDPOINTS[job.target.wire](
            job.target.model, keep=job.workload.turns > 1
        )

    async def play(self, index: int, name: str, prompts: Sequence[list[int]]) -> list[TimedTurn]:
        """Send a session's turns one after the other; a failed one is the last.

        `name` is the session's id on the server, `prompts` are the new ids of each turn;
        `TimedTurn.start` is what `time.perf_counter` said.
        """
        turns: list[TimedTurn] = []
        log: list[int] = []
        try:
            await self._call(self._endpoint.opening(name))
            for number, prompt in enumerate(prompts):
                if number and self._job.workload.think_time_s:
                    await asyncio.sleep(self._job.workload.think_time_s)
                log += prompt
                turns.append(await self._turn(index, number, name, log, len(prompt)))
                if turns[-1].error:
                    break
                log += turns[-1].ids
        except (AnswerError, aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            new = len(prompts[0])
            turns.append(TimedTurn(index, 0, time.perf_counter(), new, new, error=why))
        # A session that failed before may not exist, which is no news.
        with suppress(AnswerError, aiohttp.ClientError, TimeoutError):
            await self._call(self._endpoint.closing(name))
        return turns

    async def _turn(
        self, index: int, number: int, name: str, log: list[int], new: int
    ) -> TimedTurn:
        wanted = self._job.workload.shape.output
        request = self._endpoint.turn(name, log, new, wanted)
        payload = msgspec.json.encode(request.body)
        turn = TimedTurn(index, number, time.perf_counter(), new, len(log))
        error = await self._listen(request, payload, turn)
        turn.error = error or turn.error or self._lack(turn, wanted)
        return turn

    async def _listen(self, request: HttpRequest, payload: bytes, turn: TimedTurn) -> str | None:
        """Read one answer to its end; return what went wrong on the way."""
        try:
            async with self._send(request, payload) as response:
                async for event in endpoints.events(response.content.iter_any()):
                    self._endpoint.read(event, turn, time.perf_counter())
        except AnswerError as error:
            return str(error)
        except aiohttp.ClientError as error:  # before TimeoutError: a failed connect is both
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        except TimeoutError:
            return f"no whole answer within {self._job.timeout_s:g} s"
        except ValueError as error:
            return f"the stream holds something else than JSON: {error}"
        return None

    def _lack(self, turn: TimedTurn, wanted: int) -> str | None:
        """Say what a finished answer lacks: every arm must do the same work."""
        if turn.output_tokens != wanted:
            return f"{turn.output_tokens} of {wanted} tokens were generated"
        last = turn.turn + 1 == self._job.workload.turns
        if self._endpoint.needs_ids and not last and len(turn.ids) != wanted:
            return f"{len(turn.ids)} ids came for {wanted} tokens"
        return None

    async def _call(self, request: HttpRequest | None) -> None:
        if request is None:
            return
        payload = None if request.body is None else msgspec.json.encode(request.body)
        async with self._send(request, payload) as response:
            await response.read()  # so that the connection can be used again

    @asynccontextmanager
    async def _send(
        self, request: HttpRequest, payload: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and give its response; an AnswerError if it is refused."""
        sent = self._client.request(
            request.method,
            self._job.target.base + request.path,
            data=payload,
            headers={"Content-Type": "application/json", **request.headers},
            allow_redirects=False,  # a second request would be part of the time to the first token
        )
        async with asyncio.timeout(self._job.timeout_s), sent as response:
            if response.status >= _REFUSED:
                text = " ".join((await response.text()).split())[:200]
                raise AnswerError(f"HTTP {response.status}: {text}")
            yield response


def figures(played: PlayedJob) -> dict[str, int | float]:
    """Return every figure of a measurement; failed requests only count as failed.

    `total_input_tokens` are new tokens, each counted once; `total_prompt_tokens` count a session's
    history again in every turn, as an API would bill it. Latencies are absent if nothing completed.
    """
    done = [turn for turn in played.turns if turn.error is None]
    seconds = played.duration_s

    def per_second(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    new, out = sum(t.new_tokens for t in done), sum(t.output_tokens for t in done)
    starts, ends = [t.start for t in done], [t.end for t in done]
    firsts = [t.start + t.ttft_s for t in done]
    found: dict[str, int | float] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(played.turns) - len(done),
        "sessions": len({turn.session for turn in played.turns}),
        "total_input_tokens": new,
        "total_prompt_tokens": sum(t.prompt_tokens for t in done),
        "total_output_tokens": out,
        "request_throughput": per_second(len(done)),
        "output_throughput": per_second(out),
        "total_token_throughput": per_second(new + out),
        "max_concurrent_requests": most_at_once(starts, ends),
        "max_concurrent_decodes": most_at_once(firsts, ends),
        "concurrency": per_second(sum(t.latency_s for t in done)),
    }
    for name, values in _latencies(done).items():
        if values:
            ms = np.array(values) * 1e3
            p90, p99 = np.percentile(ms, (90, 99))
            found[f"mean_{name}_ms"] = float(ms.mean())
            found[f"median_{name}_ms"] = float(np.median(ms))
            found[f"std_{name}_ms"] = float(ms.std())
            found |= {f"p90_{name}_ms": float(p90), f"p99_{name}_ms": float(p99)}
    return found


def kv_figures(turns: Sequence[TimedTurn]) -> dict[str, Any] | None:
    """Sum up the KV accounting of sessions: the last that each sent; None if none did.

    Token counts are per (layer, KV head). `max_over_budget` is the most that a session's peak was
    above budget and longest single prefill; what is left over may be at most the method's interval.
    """
    last = {turn.session: turn.kv for turn in turns if turn.kv}
    if not last:
        return None
    accounts = list(last.values())
    phases = Counter[str]()
    for turn in turns:
        phases.update((turn.kv or {}).get("phases") or {})
    budgets = {account.get("budget") for account in accounts}

    def column(name: str) -> list[Any]:
        return [account.get(name, 0) for account in accounts]

    steps, held = column("decode_tokens"), column("mean_decode_kv")
    over = [
        account["peak_live"] - account["budget"] - account.get("longest_prefill", 0)
        for account in accounts
        if account.get("budget") is not None
    ]
    return {
        "sessions": len(accounts),
        "budget": budgets.pop() if len(budgets) == 1 else None,
        **{f"median_{name}": float(np.median(column(name))) for name in _MEDIANS},
        "max_peak_live": max(column("peak_live")),
        "longest_prefill": max(column("longest_prefill")),
        "mean_decode_kv": float(np.average(held, weights=steps)) if sum(steps) else 0.0,
        "max_over_budget": max(over, default=None),
        "compressed_sessions": sum(account.get("events", 0) > 0 for account in accounts),
        **{name: sum(column(name)) for name in _SUMMED},
        "phases": dict(phases),
    }


def most_at_once(starts: Sequence[float], ends: Sequence[float]) -> int:
    """Return how many intervals overlap at most; one that ends as another starts does not."""
    steps = sorted([*((end, -1) for end in ends), *((start, 1) for start in starts)])
    return max(np.cumsum([step for _, step in steps], dtype=int).tolist(), default=0)


def _latencies(done: Sequence[TimedTurn]) -> dict[str, list[float]]:
    """Return seconds to the first token, per later token, between tokens and to the last."""
    several = [turn for turn in done if turn.output_tokens > 1]
    return {
        "ttft": [turn.ttft_s for turn in done],
        "tpot": [(t.latency_s - t.ttft_s) / (t.output_tokens - 1) for t in several],
        "itl": [gap for turn in done for gap in turn.itls_s],
        "e2el": [turn.latency_s for turn in done],
    }
