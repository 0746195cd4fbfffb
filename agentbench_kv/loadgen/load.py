"""Playing a job: warm-up, then sessions in a closed or an open loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from agentbench_kv.loadgen.answers import Turn
from agentbench_kv.loadgen.arrivals import poisson
from agentbench_kv.loadgen.client import Player
from agentbench_kv.loadgen.connections import open_client
from agentbench_kv.loadgen.jobs import Job
from agentbench_kv.loadgen.prompts import Speaker

_WARMUP_SEED = 1 << 40

Play = Callable[[int], Awaitable[list[Turn]]]


class Outcome(msgspec.Struct, frozen=True):
    """What a job gave."""

    turns: list[Turn]  # all that were sent, in the order of sessions
    duration_s: float  # from the first session's beginning to the last token
    warmup_errors: list[str] = []


async def run(job: Job) -> Outcome:
    """Warm up, then measure."""
    load = job.load
    async with open_client() as client:
        player = Player(client, job)
        warm_up = _sessions(job, player, job.seed + _WARMUP_SEED, load.warmup)
        measured = _sessions(job, player, job.seed, load.sessions)
        warm = await _closed(warm_up, load.warmup, load.at_once)
        began = time.perf_counter()
        if load.rate is None:
            turns = await _closed(measured, load.sessions, load.at_once)
        else:
            turns = await _open(measured, poisson(load.rate, load.sessions, job.seed), began)
    turns = [msgspec.structs.replace(turn, start=turn.start - began) for turn in turns]
    errors = [turn.error for turn in warm if turn.error]
    return Outcome(turns, max((turn.end for turn in turns), default=0.0), errors)


def _sessions(job: Job, player: Player, seed: int, count: int) -> Play:
    """Write all prompts now, before any clock starts; return what plays a session."""
    speaker = Speaker(job.vocabulary, job.workload, seed)
    prompts = [speaker.prompts(index) for index in range(count)]
    name = f"bench-{uuid.uuid4().hex[:12]}"  # the same server may serve several jobs
    return lambda index: player.play(index, f"{name}-{index}", prompts[index])


async def _closed(play: Play, sessions: int, at_once: int) -> list[Turn]:
    """Keep `at_once` sessions open until all were played."""
    queue = iter(range(sessions))
    lanes = await asyncio.gather(*(_lane(play, queue) for _ in range(min(at_once, sessions))))
    return sorted((turn for lane in lanes for turn in lane), key=lambda t: (t.session, t.turn))


async def _lane(play: Play, queue: Iterator[int]) -> list[Turn]:
    return [turn for index in queue for turn in await play(index)]


async def _open(play: Play, starts: list[float], began: float) -> list[Turn]:
    """Begin every session at its time, however many are open then."""

    async def later(index: int, start: float) -> list[Turn]:
        await asyncio.sleep(max(began + start - time.perf_counter(), 0.0))
        return await play(index)

    played = await asyncio.gather(*(later(index, start) for index, start in enumerate(starts)))
    return [turn for turns in played for turn in turns]
