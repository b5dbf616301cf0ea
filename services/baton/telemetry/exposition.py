"""A port that tells metrics over HTTP, on the event loop of the process that it tells of.

Whoever reaches the port asks here, and must not harm the process by it. There are a few connections at most,
each for one answer and for some seconds, and a new one takes the place of the oldest that has asked for
nothing yet: who does ask is answered, however many are silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from baton import sockets

MOST_CONNECTIONS = 32
HEAD_S = 10.0
"""For the head of a request to be whole."""
ANSWER_S = 10.0
"""For an answer to be taken, from the moment that it is written."""
MOST_HEAD = 8 << 10
"""Bytes of a request's head."""
MOST_LATE = 16
"""Pieces of what a client sends beyond its request that are taken and thrown away."""
BACKLOG = 128


class _RefusedError(Exception):
    """What was asked cannot be answered."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a head says, as far as it matters."""

    method: str
    names: tuple[str, ...]
    """Of metrics; none: all."""
    accept: str
    zipped: bool


class MetricsPort:
    """Serves ``registry`` until it is closed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._silent: dict[asyncio.WriteTransport, None] = {}
        """Connections that have asked for nothing yet, the oldest first."""
        self._asked: dict[asyncio.WriteTransport, None] = {}
        """The others, likewise."""
        self._pages = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        """Writes out pages, one after the other: each takes milliseconds, in which the loop goes on."""

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port, which is any where 0 is asked for. Raises OSError."""
        listener = sockets.listen(host, port, backlog=BACKLOG)
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MOST_HEAD)
        bound: int = listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for transport in [*self._silent, *self._asked]:
            transport.abort()
        self._pages.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._silent) + len(self._asked) >= MOST_CONNECTIONS:
            self._make_room()
        self._silent[writer.transport] = None
        try:
            # Whoever left, was too slow, or had to make room is told nothing.
            with contextlib.suppress(OSError, TimeoutError, EOFError):
                await self._answer(reader, writer)
        finally:
            self._forget(writer.transport)
            writer.transport.abort()

    def _make_room(self) -> None:
        """End the oldest connection, of those that have asked for nothing if there is one."""
        oldest = next(iter(self._silent or self._asked))
        self._forget(oldest)
        oldest.abort()

    def _forget(self, transport: asyncio.WriteTransport) -> None:
        self._silent.pop(transport, None)
        self._asked.pop(transport, None)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await _heard(reader)
            if writer.transport in self._silent:
                self._forget(writer.transport)
                self._asked[writer.transport] = None
            answer = await asyncio.get_running_loop().run_in_executor(self._pages, self._page, asked)
        except _RefusedError as error:
            answer = _message(error.status, "text/plain; charset=utf-8", f"{error}\n".encode())
        async with asyncio.timeout(ANSWER_S):
            writer.write(answer)
            writer.write_eof()
            await writer.drain()
            for _ in range(MOST_LATE):  # closed with something unread, the connection would lose the answer
                if not await reader.read(MOST_HEAD):
                    break

    def _page(self, asked: _Asked) -> bytes:
        encode, content_type = choose_encoder(asked.accept)
        registry = self._registry.restricted_registry(asked.names) if asked.names else self._registry
        body = encode(registry)
        if asked.zipped:
            body = gzip.compress(body)
        return _message(
            HTTPStatus.OK, content_type, body, zipped=asked.zipped, bodiless=asked.method == "HEAD"
        )


async def _heard(reader: asyncio.StreamReader) -> _Asked:
    """Raises _RefusedError, TimeoutError, EOFError, OSError."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a head may have {MOST_HEAD} bytes"
        ) from None
    first, *rest = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
    method, target, _ = parts
    if method not in ("GET", "HEAD"):
        raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "metrics are read with GET")
    fields = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in rest)}
    return _Asked(
        method=method,
        names=tuple(parse_qs(target.partition("?")[2]).get("name[]", ())),
        accept=fields.get("accept", ""),
        zipped=any(
            each.partition(";")[0].strip().lower() == "gzip"
            for each in fields.get("accept-encoding", "").split(",")
        ),
    )


def _message(
    status: HTTPStatus, content_type: str, body: bytes, *, zipped: bool = False, bodiless: bool = False
) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *(["Content-Encoding: gzip"] if zipped else []),
        *(["Allow: GET, HEAD"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if bodiless else body)
