"""An HTTP port for the metrics of a process, on the event loop of that process.

Any client that reaches the port may ask, and no client can harm the process by it. There are a few
connections at most, each for one answer and for some seconds, and a new connection takes the place of the
oldest one that has sent no request yet: a client that sends a request is answered, however many are silent.
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

from baton.net import sockets

MAX_CONNECTIONS = 32
HEAD_S = 10.0
"""The time within which the head of a request must be whole, in seconds."""
ANSWER_S = 10.0
"""The time within which a client must take an answer, from the moment that it is written, in seconds."""
MAX_HEAD = 8 << 10
"""The most bytes of a request's head."""
MAX_LATE = 16
"""The most pieces of what a client sends beyond its request that are read and discarded."""
BACKLOG = 128


class _RefusedError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parts of a request's head that matter here."""

    method: str
    names: tuple[str, ...]
    """The metrics that are asked for; empty: all."""
    accept: str
    zipped: bool


class MetricsPort:
    """Serves ``registry`` until it is closed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._silent: dict[asyncio.WriteTransport, None] = {}
        """Connections that have sent no request yet, the oldest first."""
        self._asked: dict[asyncio.WriteTransport, None] = {}
        """Connections that have sent a request, the oldest first."""
        self._pages = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        """Renders pages one after the other: each takes milliseconds, in which the event loop goes on."""

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port: a free one if ``port`` is 0. Raises OSError."""
        listener = sockets.listen(host, port, backlog=BACKLOG)
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD)
        bound: int = listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for transport in [*self._silent, *self._asked]:
            transport.abort()
        self._pages.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._silent) + len(self._asked) >= MAX_CONNECTIONS:
            self._make_room()
        self._silent[writer.transport] = None
        try:
            # A client that left, was too slow, or had to make room gets no answer.
            with contextlib.suppress(OSError, TimeoutError, EOFError):
                await self._answer(reader, writer)
        finally:
            self._forget(writer.transport)
            writer.transport.abort()

    def _make_room(self) -> None:
        """Close the oldest connection: one that has sent no request if there is any."""
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
            for _ in range(MAX_LATE):  # a close with input unread would lose the answer
                if not await reader.read(MAX_HEAD):
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
    """Read the head of a request. Raises _RefusedError, TimeoutError, EOFError and OSError."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a head may have {MAX_HEAD} bytes"
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
