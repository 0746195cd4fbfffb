"""The browser over HTTP: the same answers as in process, sessions apart, bad requests refused."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from agentbench_kv.adapters.browser.browser import TOOLS, Browser
from agentbench_kv.adapters.browser.corpus import Corpus
from agentbench_kv.adapters.browser.server import BrowserServer


@pytest.fixture
def client(corpus: Corpus) -> TestClient:
    return TestClient(BrowserServer(corpus, view_tokens=1024).app)


def test_http_says_what_the_process_says(client: TestClient, corpus: Corpus) -> None:
    browser = Browser(corpus)
    for tool, arguments, view in (
        ("search", {"query": "heron"}, browser.search("heron")),
        ("open", {"id": 1}, browser.open(1)),
        ("find", {"pattern": "reeds"}, browser.find("reeds")),
    ):
        reply = client.post(f"/sessions/a/{tool}", json=arguments)
        assert reply.json() == {"text": view.text, "cursor": view.cursor, "failed": False}


def test_sessions_have_pages_of_their_own(client: TestClient) -> None:
    assert client.post("/sessions/a/search", json={"query": "otter"}).json()["cursor"] == 0
    assert client.post("/sessions/b/search", json={"query": "otter"}).json()["cursor"] == 0
    assert client.post("/sessions/a/open", json={}).json()["cursor"] == 1
    assert client.delete("/sessions/a").json() == {"ended": True}
    assert client.post("/sessions/a/open", json={}).json()["failed"] is True
    assert client.delete("/sessions/nobody").status_code == 404


def test_it_says_what_it_serves(client: TestClient, corpus: Corpus) -> None:
    assert client.get("/health").json() == {"corpus": corpus.provenance()}
    assert client.get("/tools").json() == TOOLS


@pytest.mark.parametrize(
    ("body", "status"), [(b"{oops", 400), (b"[]", 400), (b"{}" + b" " * 70_000, 413)]
)
def test_bad_bodies(client: TestClient, body: bytes, status: int) -> None:
    reply = client.post("/sessions/a/search", content=body)
    assert reply.status_code == status
    assert reply.json()["error"]


def test_an_unknown_tool_is_the_agents_mistake(client: TestClient) -> None:
    reply = client.post("/sessions/a/fly", json={})
    assert reply.status_code == 200
    assert reply.json()["failed"] is True


def test_the_key_is_asked_for(corpus: Corpus) -> None:
    client = TestClient(BrowserServer(corpus, view_tokens=1024, api_key="k").app)
    assert client.get("/health").status_code == 401
    assert client.get("/health", headers={"Authorization": "Bearer x"}).status_code == 401
    assert client.get("/health", headers={"Authorization": "Bearer k"}).status_code == 200
