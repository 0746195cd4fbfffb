"""Server-sent events, as a backend writes them and as it should not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from agentbench_kv.engines.serving.transport import RequestError, RequestFailedError, post_events


class Chunks(httpx.SyncByteStream):
    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = data, size

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), self.size):
            yield self.data[start : start + self.size]


def client(data: bytes, status: int = 200, size: int = 7) -> httpx.Client:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=Chunks(data, size))

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_text_with_unicode_line_ends_is_one_event(size: int) -> None:
    text = "a\u2028b\u0085c\u000bd"
    data = event({"text": text}) + b": comment\n\n" + event({"n": 2}) + b"data: [DONE]\n\n"
    with client(data, size=size) as http:
        assert list(post_events(http, "/", {})) == [{"text": text}, {"n": 2}]


def test_nothing_after_done_is_read() -> None:
    with client(b"data: [DONE]\n\n" + event({"late": 1})) as http:
        assert list(post_events(http, "/", {})) == []


def test_a_last_line_without_newline_counts() -> None:
    with client(event({"n": 1}) + b"data: [DONE]") as http:
        assert list(post_events(http, "/", {})) == [{"n": 1}]


@pytest.mark.parametrize("end", [b"", b"data: {"])
def test_a_stream_that_ends_in_good_order_before_its_end_broke_off(end: bytes) -> None:
    """A server whose engine died may close it so; it must not look like a short answer."""
    with client(event({"n": 1}) + end) as http:
        events = post_events(http, "/", {})
        assert next(events) == {"n": 1}
        with pytest.raises(httpx.TransportError, match="broke off"):
            next(events)


def test_a_refusal_is_told() -> None:
    for status in (400, 500):
        with (
            client(b"prompt too long", status) as http,
            pytest.raises(RequestError, match=f"{status}.*too long") as raised,
        ):
            list(post_events(http, "/", {}))
        assert isinstance(raised.value, RequestFailedError) == (status != 400)


def test_an_error_in_the_stream_is_told() -> None:
    failed = client(event({"error": {"message": "engine died"}}))
    with failed as http, pytest.raises(RequestError, match="engine died"):
        list(post_events(http, "/", {}))
