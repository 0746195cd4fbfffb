"""Playing one session over HTTP and timing every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from agentbench_kv.loadgen.answers import Answer, Turn, events
from agentbench_kv.loadgen.jobs import Job
from agentbench_kv.loadgen.wires import WIRES, Call

__all__ = ["Player"]


class AnswerError(Exception):
    """The server's answer is of no use; the text says why."""


class Player:
    """Plays sessions of one job.

    Parameters
    ----------
    client : httpx.AsyncClient
        Of the job's server.
    job : Job
    """

    def __init__(self, client: httpx.AsyncClient, job: Job) -> None:
        self._client = client
        self._job = job
        self._wire = WIRES[job.target.wire](job.target.model, keep=job.workload.turns > 1)

    async def play(self, index: int, name: str, prompts: Sequence[list[int]]) -> list[Turn]:
        """Send a session's turns one after the other; a failed one is the last.

        `Turn.start` is what `time.perf_counter` said.

        Parameters
        ----------
        index : int
            The session's number in the records.
        name : str
            The session's id on the server.
        prompts : sequence of list of int
            New ids of each turn.
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
        except (AnswerError, httpx.HTTPError, TimeoutError) as error:
            turns.append(self._not_opened(index, len(prompts[0]), error))
        await self._close(name)
        return turns

    async def _turn(
        self, index: int, number: int, name: str, log: list[int], new: int
    ) -> tuple[Turn, list[int]]:
        wanted = self._job.workload.shape.output
        call = self._wire.turn(name, log, new, wanted)
        payload = msgspec.json.encode(call.body)
        answer = Answer(time.perf_counter())
        error = await self._listen(call, payload, answer)
        error = error or answer.error or self._short(answer, wanted, last=self._is_last(number))
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
            error=error,
            kv=answer.kv,
        )
        return turn, answer.ids

    async def _listen(self, call: Call, payload: bytes, answer: Answer) -> str | None:
        """Read one answer to its end; return what went wrong on the way."""
        headers = {"Content-Type": "application/json", **call.headers}
        try:
            async with (
                asyncio.timeout(self._job.timeout_s),
                self._client.stream(
                    call.method, call.path, content=payload, headers=headers
                ) as response,
            ):
                if response.status_code >= httpx.codes.BAD_REQUEST:
                    await response.aread()
                    return _refusal(response)
                async for event in events(response.aiter_raw()):
                    self._wire.read(event, answer, time.perf_counter())
        except TimeoutError:
            return f"no whole answer within {self._job.timeout_s:g} s"
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        except ValueError as error:
            return f"the stream holds something else than JSON: {error}"
        return None

    def _is_last(self, number: int) -> bool:
        return number + 1 == self._job.workload.turns

    def _short(self, answer: Answer, wanted: int, *, last: bool) -> str | None:
        """Say what a finished answer lacks: every arm must do the same work."""
        if answer.tokens != wanted:
            return f"{answer.tokens} of {wanted} tokens were generated"
        if self._wire.needs_ids and not last and len(answer.ids) != wanted:
            return f"{len(answer.ids)} ids came for {wanted} tokens"
        return None

    def _not_opened(self, index: int, new: int, error: Exception) -> Turn:
        said = str(error) or type(error).__name__
        return Turn(index, 0, time.perf_counter(), new, new, error=said)

    async def _close(self, name: str) -> None:
        """End the session; one that failed before may not exist, which is no news."""
        try:
            await self._call(self._wire.closing(name))
        except (AnswerError, httpx.HTTPError, TimeoutError):
            return

    async def _call(self, call: Call | None) -> None:
        if call is None:
            return
        async with asyncio.timeout(self._job.timeout_s):
            body: dict[str, Any] = {} if call.body is None else {"json": call.body}
            response = await self._client.request(
                call.method, call.path, headers=call.headers, **body
            )
        if response.status_code >= httpx.codes.BAD_REQUEST:
            raise AnswerError(_refusal(response))


def _refusal(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {' '.join(response.text.split())[:200]}"
