"""The load generator: plays a job's sessions over HTTP and times every answer.

`measure_apart` does so in a process of its own (`__main__`).
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
from functools import partial
from subprocess import PIPE
from tempfile import TemporaryFile
from typing import Any

import aiohttp
import msgspec
import numpy as np

from agentbench_kv.errors import KVBenchError
from agentbench_kv.serving_bench import endpoints
from agentbench_kv.serving_bench.endpoints import HttpRequest, TimedTurn
from agentbench_kv.serving_bench.figures import figures, kv_figures
from agentbench_kv.serving_bench.jobs import LoadJob, TraceCall, TraceSession
from agentbench_kv.serving_bench.prompts import Speaker

_REFUSED = 400  # the least HTTP status that is one
_WARMUP_SEED = 1 << 40
_MOST_ERRORS = 5

PlaySession = Callable[[int], Awaitable[list[TimedTurn]]]
# When a session's next call may be sent, by `time.perf_counter`; asked when the last answer ended.
Due = Callable[[TraceCall], float]
Warmed = Callable[[], None]  # called when the warm-up is over, before any clock starts


class JobResult(msgspec.Struct, frozen=True):
    """One measurement."""

    figures: dict[str, int | float]  # see `figures`
    kv: dict[str, Any] | None  # see `kv_figures`
    errors: dict[str, int]  # what failed requests said and how often, the most frequent ones
    warmup_errors: int  # failed requests of the warm-up
    requests: list[TimedTurn]  # every request, without its gaps and ids


def measure_apart(job: LoadJob, warmed: Warmed) -> JobResult:
    """Play a job in a process of its own, which waits for `warmed` when its warm-up is over.

    `KVBenchError` if that process dies.
    """
    command = [sys.executable, "-m", "agentbench_kv.serving_bench"]
    with TemporaryFile() as said:
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=said) as process:
            try:
                result = _talk(process, msgspec.json.encode(job), warmed)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "it said nothing"
            raise KVBenchError(f"the load generator ended with code {process.returncode}: {why}")
    return msgspec.json.decode(result, type=JobResult)


def _talk(process: subprocess.Popen[bytes], job: bytes, warmed: Warmed) -> bytes:
    """Give a process its job, answer the line it says when it is warm, return its result."""
    told, said = process.stdin, process.stdout
    if told is None or said is None:
        raise KVBenchError("the load generator was started without pipes")
    with suppress(BrokenPipeError):  # it died, which its code says
        told.write(job + b"\n")
        told.flush()
    if not said.readline():
        with suppress(BrokenPipeError):
            told.close()
        return b""
    warmed()
    return process.communicate(b"\n")[0]


def measure(job: LoadJob, warmed: Warmed = lambda: None) -> JobResult:
    played = asyncio.run(play(job, warmed))
    errors = Counter(turn.error for turn in played.turns if turn.error)
    requests = [msgspec.structs.replace(turn, itls_s=[], ids=[]) for turn in played.turns]
    return JobResult(
        figures(played.turns, played.duration_s, job.goodput, job.sessions),
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


async def play(job: LoadJob, warmed: Warmed = lambda: None) -> PlayedJob:
    """Warm up, call `warmed`, which may take its time, then play the sessions."""
    load = job.load
    async with endpoints.open_client() as client:
        player = Player(client, job)
        cycle = [job.sessions[at % len(job.sessions)] for at in range(load.warmup)]
        # No prefix cache is to know what is measured.
        warm = Speaker(job.vocabulary, job.seed + _WARMUP_SEED, anew=True)
        warm_up = _sessions(player, warm, cycle)
        measured = _sessions(player, Speaker(job.vocabulary, job.seed), job.sessions)
        first = await _closed(partial(warm_up, lambda _: 0.0), load.warmup, load.at_once)
        warmed()
        began = time.perf_counter()
        if load.fixed_schedule:
            zero = min(session.start_s or 0.0 for session in job.sessions)
            starts = [((each.start_s or 0.0) - zero) * job.time_scale for each in job.sessions]
            clocked = partial(measured, on_clock(began - zero * job.time_scale, job.time_scale))
            turns = await _open(clocked, starts, began)
        else:
            paced = partial(measured, after_gap(job.time_scale))
            if load.rate is None:
                turns = await _closed(paced, load.sessions, load.at_once)
            else:
                turns = await _open(paced, poisson(load.rate, load.sessions, job.arrivals), began)
    for turn in turns:
        turn.start -= began
    errors = [turn.error for turn in first if turn.error]
    return PlayedJob(turns, max((turn.end for turn in turns), default=0.0), errors)


def after_gap(scale: float) -> Due:
    """Send a call when its gap has passed since the answer before."""
    return lambda call: time.perf_counter() + call.gap_s * scale


def on_clock(zero: float, scale: float) -> Due:
    """Send a call when its trace did, or after its gap where the trace does not say.

    `zero` is when the trace's clock would have been 0.
    """
    gap = after_gap(scale)
    return lambda call: gap(call) if call.at_s is None else zero + call.at_s * scale


def _sessions(
    player: Player, speaker: Speaker, sessions: Sequence[TraceSession]
) -> Callable[[Due, int], Awaitable[list[TimedTurn]]]:
    """Write all prompts now, before any clock starts; return what plays a session."""
    prompts = [speaker.prompts(number, session) for number, session in enumerate(sessions)]
    name = f"bench-{uuid.uuid4().hex[:12]}"  # the same server may serve several jobs

    def play(due: Due, index: int) -> Awaitable[list[TimedTurn]]:
        planned = list(zip(sessions[index].calls, prompts[index], strict=True))
        return player.play(index, f"{name}-{index}", planned, due)

    return play


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
            job.target.model,
            keep=any(len(session.calls) > 1 for session in job.sessions),
            drops=job.target.drops,
        )

    async def play(
        self, index: int, name: str, planned: Sequence[tuple[TraceCall, list[int]]], due: Due
    ) -> list[TimedTurn]:
        """Send a session's calls with their new ids one after the other; a failed one is the last.

        `name` is the session's id on the server, where a fresh call begins another one;
        `TimedTurn.start` is what `time.perf_counter` said.
        """
        turns: list[TimedTurn] = []
        part, log, held = 0, list[int](), 0
        try:
            await self._call(self._endpoint.opening(name))
            for number, (call, prompt) in enumerate(planned):
                when = due(call) if number else time.perf_counter()
                await asyncio.sleep(max(when - time.perf_counter(), 0.0))
                if call.fresh:
                    await self._call(self._endpoint.closing(f"{name}{_part(part)}"))
                    part, log, held = part + 1, [], 0
                    await self._call(self._endpoint.opening(f"{name}{_part(part)}"))
                if call.keep is not None:
                    log, held = log[: call.keep], call.keep
                log += prompt
                new = len(prompt)
                added = new - call.again
                turn = TimedTurn(index, number, 0.0, added, held + new, part=part)
                if self._job.load.fixed_schedule and call.at_s is not None:
                    turn.late_s = max(time.perf_counter() - when, 0.0)
                last = number + 1 == len(planned)
                turns.append(await self._ask(turn, f"{name}{_part(part)}", log, call, last))
                if turns[-1].error:
                    break
                log += turns[-1].ids
                held += new + call.output_tokens
        except (AnswerError, aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            new = len(planned[len(turns)][1])
            now = time.perf_counter()
            turns.append(TimedTurn(index, len(turns), now, new, held + new, error=why))
        # A session that failed before may not exist, which is no news.
        with suppress(AnswerError, aiohttp.ClientError, TimeoutError):
            await self._call(self._endpoint.closing(f"{name}{_part(part)}"))
        return turns

    async def _ask(
        self, turn: TimedTurn, name: str, log: list[int], call: TraceCall, last: bool
    ) -> TimedTurn:
        wanted = call.output_tokens
        request = self._endpoint.turn(name, log, turn.new_tokens, wanted)
        payload = msgspec.json.encode(request.body)
        turn.start = time.perf_counter()
        error = await self._listen(request, payload, turn)
        turn.error = error or turn.error or self._lack(turn, wanted, last)
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

    def _lack(self, turn: TimedTurn, wanted: int, last: bool) -> str | None:
        """Say what a finished answer lacks: every arm must do the same work."""
        if turn.output_tokens != wanted:
            return f"{turn.output_tokens} of {wanted} tokens were generated"
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


def _part(number: int) -> str:
    """Return what the server's id of a session's part ends with."""
    return f"-{number}" if number else ""
