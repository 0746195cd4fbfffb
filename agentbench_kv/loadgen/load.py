"""Playing a job: warm-up, then sessions in a closed or an open loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

import httpx
import msgspec

from agentbench_kv.loadgen.answers import Turn
from agentbench_kv.loadgen.arrivals import poisson
from agentbench_kv.loadgen.client import Player
from agentbench_kv.loadgen.connections import Connections
from agentbench_kv.loadgen.jobs import Job
from agentbench_kv.loadgen.prompts import Speaker

__all__ = ["Outcome", "run"]

_WARMUP_SEED = 1 << 40

Play = Callable[[int], Awaitable[list[Turn]]]


class Outcome(msgspec.Struct, frozen=True):
    """What a job gave.

    Attributes
    ----------
    turns : list of Turn
        All that were sent, in the order of sessions.
    duration_s : float
        From the first session's beginning to the last token.
    warmup_errors : list of str
        Why sessions of the warm-up failed.
    """

    turns: list[Turn]
    duration_s: float
    warmup_errors: list[str] = []


async def run(job: Job, transport: httpx.AsyncBaseTransport | None = None) -> Outcome:
    """Warm up, then measure.

    Parameters
    ----------
    job : Job
    transport : httpx.AsyncBaseTransport, optional
        Instead of a network.
    """
    connections = Connections(job.target.base, transport)
    load = job.load
    warm_up = _sessions(job, connections, job.seed + _WARMUP_SEED, load.warmup)
    measured = _sessions(job, connections, job.seed, load.sessions)
    try:
        warm = await _closed(warm_up, load.warmup, load.at_once)
        began = time.perf_counter()
        if load.rate is None:
            turns = await _closed(measured, load.sessions, load.at_once)
        else:
            turns = await _open(measured, poisson(load.rate, load.sessions, job.seed), began)
    finally:
        await connections.close()
    turns = [msgspec.structs.replace(turn, start=turn.start - began) for turn in turns]
    errors = [turn.error for turn in warm if turn.error]
    return Outcome(turns, max((turn.end for turn in turns), default=0.0), errors)


def _sessions(job: Job, connections: Connections, seed: int, count: int) -> Play:
    """Write all prompts now, before any clock starts; return what plays a session."""
    speaker = Speaker(job.vocabulary, job.workload, seed)
    prompts = [speaker.prompts(index) for index in range(count)]
    # The same server may serve several jobs.
    name = f"bench-{uuid.uuid4().hex[:12]}"

    async def play(index: int) -> list[Turn]:
        with connections.one() as client:
            return await Player(client, job).play(index, f"{name}-{index}", prompts[index])

    return play


async def _closed(play: Play, sessions: int, at_once: int) -> list[Turn]:
    """Keep `at_once` sessions open until all were played."""
    queue = iter(range(sessions))
    lanes = await asyncio.gather(*(_lane(play, queue) for _ in range(min(at_once, sessions))))
    return sorted((turn for lane in lanes for turn in lane), key=lambda t: (t.session, t.turn))


async def _lane(play: Play, queue: Iterator[int]) -> list[Turn]:
    turns: list[Turn] = []
    for index in queue:
        turns += await play(index)
    return turns


async def _open(play: Play, starts: list[float], began: float) -> list[Turn]:
    """Begin every session at its time, however many are open then."""

    async def later(index: int, start: float) -> list[Turn]:
        await asyncio.sleep(max(began + start - time.perf_counter(), 0.0))
        return await play(index)

    played = await asyncio.gather(*(later(index, start) for index, start in enumerate(starts)))
    return [turn for turns in played for turn in turns]
