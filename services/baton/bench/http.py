"""A small HTTP/1.1 client for measuring, with nothing between a chunk's arrival and its time stamp."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import SplitResult

import httptools

from baton.process.options import join_address

_READ_BYTES = 64 * 1024
_MAX_ERROR_BYTES = 64 * 1024


class ConnectError(OSError):
    """The server cannot be reached."""


class BrokenError(OSError):
    """The connection ended before the answer did, or the server does not speak HTTP."""


@dataclass(slots=True)
class _Parsed:
    """The parts of an answer that the parser has found so far. The method names are httptools'."""

    headers_done: bool = False
    done: bool = False
    body: list[bytes] = field(default_factory=list)

    def on_headers_complete(self) -> None:
        self.headers_done = True

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.done = True


class Response:
    """An answer whose headers have come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parsed = _Parsed()
        self._parser = httptools.HttpResponseParser(self._parsed)

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    @property
    def reusable(self) -> bool:
        """Whether another request may go over the same connection."""
        return self._parsed.done and self._parser.should_keep_alive()

    async def begin(self) -> None:
        """Read until the headers have arrived. Raises BrokenError."""
        while not self._parsed.headers_done:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises BrokenError when the connection ends before the body does."""
        while True:
            if self._parsed.body:
                piece = b"".join(self._parsed.body)
                self._parsed.body.clear()
                yield piece
            if self._parsed.done:
                return
            await self._read()

    async def body(self) -> bytes:
        """Return the whole body, or the beginning of a long one."""
        found = b""
        async for piece in self.pieces():
            found += piece
            if len(found) > _MAX_ERROR_BYTES:
                break
        return found

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise BrokenError(f"the connection broke: {error}") from error
        if not data:
            raise BrokenError("the server closed the connection in the middle of an answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BrokenError(f"what the server sent is not HTTP/1.1: {error}") from error


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpClient:
    """A client of one server, without a limit of concurrent requests. Idle connections are reused."""

    def __init__(self, base: SplitResult, api_key: str | None = None) -> None:
        assert base.hostname
        self._host = base.hostname
        self._port = base.port or (443 if base.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if base.scheme == "https" else None
        self._path = base.path
        self._idle: list[_Connection] = []
        self._headers = f"Host: {base.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Send a request and yield the answer once its headers have arrived.

        Raises ConnectError or BrokenError. A connection whose answer was not read to its end is closed.
        """
        connection = await self._connection()
        try:
            response = Response(connection.reader)
            head = (
                f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
            )
            connection.writer.write(head.encode() + body)
            await response.begin()
            yield response
        except BaseException:
            connection.writer.close()
            raise
        if response.reusable:
            self._idle.append(connection)
        else:
            connection.writer.close()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            reason = error.strerror or str(error)
            where = join_address(self._host, self._port)
            raise ConnectError(f"cannot connect to {where}: {reason}") from error
        return _Connection(reader, writer)
