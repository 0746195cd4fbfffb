"""Playing one session over HTTP and timing every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress

import aiohttp
import msgspec

from agentbench_kv.loadgen.answers import Answer, Turn, events
from agentbench_kv.loadgen.jobs import Job
from agentbench_kv.loadgen.wires import WIRES, Call

_REFUSED = 400


class AnswerError(Exception):
    """The server's answer is of no use; the text says why."""


class Player:
    """Plays sessions of one job."""

    def __init__(self, client: aiohttp.ClientSession, job: Job) -> None:
        self._client = client
        self._job = job
        self._wire = WIRES[job.target.wire](job.target.model, keep=job.workload.turns > 1)

    async def play(self, index: int, name: str, prompts: Sequence[list[int]]) -> list[Turn]:
        """Send a session's turns one after the other; a failed one is the last.

        `name` is the session's id on the server, `prompts` are the new ids of each turn;
        `Turn.start` is what `time.perf_counter` said.
        """
        turns: list[Turn] = []
        log: list[int] = []
        try:
            await self._call(self._wire.opening(name))
            for number, prompt in enumerate(prompts):
                if number and self._job.workload.think_time_s:
                    await asyncio.sleep(self._job.workload.think_time_s)
                log += prompt
                turn, ids = await self._turn(index, number, name, log, len(prompt))
                turns.append(turn)
                if turn.error:
                    break
                log += ids
        except (AnswerError, aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            new = len(prompts[0])
            turns.append(Turn(index, 0, time.perf_counter(), new, new, error=why))
        # A session that failed before may not exist, which is no news.
        with suppress(AnswerError, aiohttp.ClientError, TimeoutError):
            await self._call(self._wire.closing(name))
        return turns

    async def _turn(
        self, index: int, number: int, name: str, log: list[int], new: int
    ) -> tuple[Turn, list[int]]:
        """Send one turn; return it with the ids that were generated."""
        wanted = self._job.workload.shape.output
        call = self._wire.turn(name, log, new, wanted)
        payload = msgspec.json.encode(call.body)
        answer = Answer(time.perf_counter())
        error = await self._listen(call, payload, answer)
        last = number + 1 == self._job.workload.turns
        turn = Turn(
            session=index,
            turn=number,
            start=answer.started,
            new_tokens=new,
            prompt_tokens=len(log),
            output_tokens=answer.tokens,
            ttft_s=answer.ttft_s,
            latency_s=answer.latency_s,
            itls_s=answer.itls_s,
            error=error or answer.error or self._lack(answer, wanted, last=last),
            kv=answer.kv,
        )
        return turn, answer.ids

    async def _listen(self, call: Call, payload: bytes, answer: Answer) -> str | None:
        """Read one answer to its end; return what went wrong on the way."""
        try:
            async with (
                asyncio.timeout(self._job.timeout_s),
                self._request(call, payload) as response,
            ):
                if response.status >= _REFUSED:
                    return await _refusal(response)
                async for event in events(response.content.iter_any()):
                    self._wire.read(event, answer, time.perf_counter())
        except aiohttp.ClientError as error:  # before TimeoutError: a failed connect is both
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        except TimeoutError:
            return f"no whole answer within {self._job.timeout_s:g} s"
        except ValueError as error:
            return f"the stream holds something else than JSON: {error}"
        return None

    def _lack(self, answer: Answer, wanted: int, *, last: bool) -> str | None:
        """Say what a finished answer lacks: every arm must do the same work."""
        if answer.tokens != wanted:
            return f"{answer.tokens} of {wanted} tokens were generated"
        if self._wire.needs_ids and not last and len(answer.ids) != wanted:
            return f"{len(answer.ids)} ids came for {wanted} tokens"
        return None

    async def _call(self, call: Call | None) -> None:
        if call is None:
            return
        payload = msgspec.json.encode(call.body) if call.body is not None else None
        async with (
            asyncio.timeout(self._job.timeout_s),
            self._request(call, payload) as response,
        ):
            if response.status >= _REFUSED:
                raise AnswerError(await _refusal(response))
            await response.read()  # so that the connection can be used again

    def _request(
        self, call: Call, payload: bytes | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._client.request(
            call.method,
            self._job.target.base + call.path,
            data=payload,
            headers={"Content-Type": "application/json", **call.headers},
            allow_redirects=False,  # a second request would be part of the time to the first token
        )


async def _refusal(response: aiohttp.ClientResponse) -> str:
    return f"HTTP {response.status}: {' '.join((await response.text()).split())[:200]}"
