"""A server without a model: it speaks as our gateway, vLLM and SGLang do, and takes notes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from agentbench_kv.serving_bench import loadgen
from agentbench_kv.serving_bench.jobs import (
    Load,
    LoadJob,
    SessionShape,
    Target,
    Vocabulary,
    Workload,
)
from agentbench_kv.serving_bench.loadgen import PlayedJob

TOKEN = 7
"""Ids of an answer are this, that + 1, ..."""


def sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


class FakeServer:
    """A handler of HTTP requests.

    Parameters
    ----------
    kind : str
        Whose endpoints it has.
    parts : callable, optional
        Cuts a whole event stream into the parts that are sent.
    refuse : callable, optional
        Called with the number of a generation, from 0; its text becomes a refusal.
    short : int
        Tokens that every answer lacks.
    """

    def __init__(
        self,
        kind: str,
        *,
        parts: Callable[[bytes], list[bytes]] = lambda data: [data],
        refuse: Callable[[int], str | None] = lambda _: None,
        short: int = 0,
    ) -> None:
        self.kind = kind
        self.calls: list[tuple[str, str, dict[str, Any], dict[str, str]]] = []
        self.generations: list[dict[str, Any]] = []
        self._parts = parts
        self._refuse = refuse
        self._short = short

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        data = await request.read()
        body = json.loads(data) if data else {}
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.calls.append((request.method, request.path, body, headers))
        if request.path not in ("/v1/completions", "/generate"):
            return web.json_response({})
        refusal = self._refuse(len(self.generations))
        self.generations.append(body)
        if refusal:
            return web.Response(status=500, text=refusal)
        response = web.StreamResponse()
        await response.prepare(request)
        for part in self._parts(self._stream(body)):
            await response.write(part)
        return response

    def _stream(self, body: dict[str, Any]) -> bytes:
        make = {"gateway": self._gateway, "vllm": self._vllm, "sglang": self._sglang}[self.kind]
        return b"".join([*map(sse, make(body)), b"data: [DONE]\n\n"])

    def _ids(self, wanted: int) -> list[int]:
        return list(range(TOKEN, TOKEN + wanted - self._short))

    def _gateway(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        ids = self._ids(body["max_tokens"])
        last = {"text": "", "finish_reason": "length"}
        last |= {"token_ids": ids} if body.get("return_token_ids") else {}
        usage = {"completion_tokens": len(ids), "prompt_tokens": len(body["prompt"])}
        live = len(body["prompt"]) + len(ids)
        usage["kvbench"] = {"peak_live": live, "live": live, "logical": live, "events": 0}
        texts = [{"choices": [{"text": "x", "finish_reason": None}]} for _ in ids]
        return [*texts, {"choices": [last]}, {"choices": [], "usage": usage}]

    def _vllm(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        ids = self._ids(body["max_tokens"])
        chunks = [{"text": "x", "finish_reason": None} for _ in ids]
        for chunk, token in zip(chunks, ids, strict=True):
            chunk |= {"token_ids": [token]} if body.get("return_token_ids") else {}
        chunks[-1]["finish_reason"] = "length"
        usage = {"completion_tokens": len(ids), "prompt_tokens": len(body["prompt"])}
        return [*({"choices": [chunk]} for chunk in chunks), {"choices": [], "usage": usage}]

    def _sglang(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        total = len(self._ids(body["sampling_params"]["max_new_tokens"]))
        ends = [*range(2, total, 2), total]
        return [
            {
                "text": "x" * end,
                "meta_info": {
                    "completion_tokens": end,
                    "prompt_tokens": len(body["input_ids"]),
                    "finish_reason": {"type": "length"} if end == total else None,
                },
            }
            for end in ends
        ]


def job_of(kind: str = "gateway", **changes: Any) -> LoadJob:
    """Return two sessions of three turns, one at a time, without a warm-up."""
    workload = Workload(SessionShape(20, 5), turns=3, tool_tokens=4)
    load = changes.get("load", Load(sessions=2, concurrency=1, warmup=0))
    fields: dict[str, Any] = {
        "target": Target("http://fake", kind, "model"),
        "sessions": workload.sessions(load.sessions),
        "load": load,
        "vocabulary": Vocabulary(50, special=[0, 1]),
    }
    return LoadJob(**{**fields, **changes})


@pytest.fixture
def fake_server() -> type[FakeServer]:
    """Return the class."""
    return FakeServer


@pytest.fixture
def make_job() -> Callable[..., LoadJob]:
    """Return the function that builds jobs."""
    return job_of


@pytest.fixture
def play() -> Callable[[FakeServer, LoadJob], PlayedJob]:
    """Return a function that plays a job against a fake server on this machine."""

    async def playing(server: FakeServer, job: LoadJob) -> PlayedJob:
        async with RawTestServer(server) as running:
            target = msgspec.structs.replace(job.target, base=f"http://127.0.0.1:{running.port}")
            return await loadgen.play(msgspec.structs.replace(job, target=target))

    return lambda server, job: asyncio.run(playing(server, job))
