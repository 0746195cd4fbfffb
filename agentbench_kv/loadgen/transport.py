"""HTTP/1.1 for streams of small events: one connection, one request at a time, little else.

httpx's own transport costs about 80 microseconds for every token that arrives by itself, which a
server on the same machine feels. This one keeps httpx's interface and costs a quarter of that.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

__all__ = ["ChunkDecoder", "StreamTransport"]

_CONNECT_S = 20.0
# Below uvicorn's 5 s, so that a request never takes a connection that the server is closing.
_KEEP_ALIVE_S = 2.0
_READ = 1 << 16


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: float

    @property
    def usable(self) -> bool:
        return not self.reader.at_eof() and time.monotonic() - self.used < _KEEP_ALIVE_S


class StreamTransport(httpx.AsyncBaseTransport):
    """A connection that is kept between requests.

    Parameters
    ----------
    certificates : ssl.SSLContext
        For `https`.
    """

    def __init__(self, certificates: ssl.SSLContext) -> None:
        self._certificates = certificates
        self._held: _Connection | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, return its response as soon as the head has come.

        Raises
        ------
        httpx.TransportError
            If the server cannot be reached, or says something that is not HTTP.
        """
        body = await request.aread()
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await self._connect(request.url)
        except (OSError, TimeoutError) as error:
            raise httpx.ConnectError(str(error) or "no connection in time") from error
        try:
            connection.writer.write(_head(request) + body)
            status, headers = await _read_head(connection.reader)
            stream = _Body(self, connection, httpx.Headers(headers))
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            connection.writer.close()
            raise httpx.RemoteProtocolError(f"no HTTP answer: {error}") from error
        except BaseException:
            connection.writer.close()
            raise
        return httpx.Response(status, headers=headers, stream=stream)

    async def aclose(self) -> None:
        """Close the connection that is kept, if there is one."""
        if self._held is not None:
            self._held.writer.close()
            self._held = None

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose answer was read to the end."""
        connection.used = time.monotonic()
        self._held = connection

    async def _connect(self, url: httpx.URL) -> _Connection:
        held, self._held = self._held, None
        if held is not None:
            if held.usable:
                return held
            held.writer.close()
        secure = self._certificates if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(url.host, port, ssl=secure)
        return _Connection(reader, writer, time.monotonic())


class ChunkDecoder:
    """Takes `Transfer-Encoding: chunked` apart; trailers are not understood."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take more of the body, return the payload of the chunks that are whole.

        Raises
        ------
        ValueError
            If a chunk's size is none.
        """
        rest, payload = self._rest + data, []
        while not self.done:
            line, found, after = rest.partition(b"\r\n")
            size = int(line.partition(b";")[0], 16) if found else 0
            if not found or len(after) < size + 2:
                break
            payload.append(after[:size])
            rest = after[size + 2 :]
            self.done = size == 0
        self._rest = rest
        return b"".join(payload)


class _Body(httpx.AsyncByteStream):
    """An answer's body; its connection is kept only if it was read to the end."""

    def __init__(
        self, transport: StreamTransport, connection: _Connection, headers: httpx.Headers
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._length = int(headers["content-length"]) if "content-length" in headers else None
        self._whole = False
        self._kept = headers.get("connection", "").lower() != "close"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the payload as it comes.

        Raises
        ------
        httpx.RemoteProtocolError
            If the server ends the connection too early.
        """
        try:
            async for part in self._chunks() if self._chunked else self._plain():
                yield part
        except (OSError, EOFError, ValueError) as error:
            raise httpx.RemoteProtocolError(f"the answer broke off: {error}") from error
        self._whole = True

    async def aclose(self) -> None:
        """Keep the connection, or close it."""
        if self._whole and self._kept:
            self._transport.keep(self._connection)
        else:
            self._connection.writer.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        decoder = ChunkDecoder()
        while not decoder.done:
            data = await self._connection.reader.read(_READ)
            if not data:
                raise EOFError("the server closed the connection")
            payload = decoder.feed(data)
            if payload:
                yield payload

    async def _plain(self) -> AsyncIterator[bytes]:
        if self._length is None:
            self._kept = False
            yield await self._connection.reader.read(-1)
        elif self._length:
            yield await self._connection.reader.readexactly(self._length)


def _head(request: httpx.Request) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % pair for pair in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, list[tuple[bytes, bytes]]]:
    status = 0
    while status < 200:
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        version, code = first.split(b" ", 2)[:2]
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"it begins with {version[:20]!r}")
        status = int(code)
    pairs = (line.partition(b":") for line in lines)
    return status, [(name.strip(), value.strip()) for name, _, value in pairs]
