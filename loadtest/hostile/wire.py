"""Connections of attackers: to loopback only, from another address than honest clients have."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from baton.process.options import parse_address

SOURCE = "127.0.0.2"
"""The address that attackers call from, so that a bound for each address does not hit the honest clients."""
ANSWER_S = 15.0
PIECE = 1 << 18


def loopback(address: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError for any address that is not this machine's alone."""
    host, port = parse_address(address)
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"{address} is not on loopback: nothing else is attacked")
    return host, port


@dataclass(frozen=True)
class Answer:
    """The answer to a request. ``ending`` is the status, or how the connection ended without one."""

    ending: str
    seconds: float
    body: bytes = b""


@dataclass(frozen=True)
class Line:
    """An open connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def close(self) -> None:
        self.writer.transport.abort()

    async def is_open(self, wait_s: float = 0.0) -> bool:
        """Return whether the other side has kept the connection open, after ``wait_s`` seconds."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(max(wait_s, 0.001)):
                while await self.reader.read(PIECE):
                    pass
            return False
        return not self.writer.transport.is_closing() and self.reader.exception() is None


async def call(address: str, *, source: str | None = SOURCE) -> Line:
    """Connect. Raises OSError, and ValueError for an address that is not to be attacked."""
    host, port = loopback(address)
    local = (source, 0) if source is not None and ":" not in host else None
    return Line(*await asyncio.open_connection(host, port, local_addr=local))


async def push(line: Line, data: bytes, times: int = 1, *, until: float | None = None) -> int:
    """Send ``data`` again and again. Returns how many bytes were taken before the other side closed or
    answered, or the time (of the monotonic clock) was over."""
    sent = 0
    for _ in range(times):
        if line.reader.at_eof() or line.writer.transport.is_closing():
            break
        try:
            line.writer.write(data)
            async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
                await line.writer.drain()
        except (OSError, TimeoutError):
            break
        sent += len(data)
    return sent


def request(
    path: str,
    body: bytes | None = None,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    length: int | None = None,
) -> bytes:
    """Return an HTTP request. ``length``: the length that it claims for its body, if that is false."""
    lines = {"host": "127.0.0.1"}
    if body is not None:
        lines |= {"content-type": "application/json", "content-length": str(length or len(body))}
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    lines |= headers or {}
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n"
    return (head + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n").encode() + (
        body or b""
    )


async def answer_of(line: Line, began: float, wait_s: float = ANSWER_S) -> Answer:
    """Read the whole answer on a connection."""
    try:
        async with asyncio.timeout(wait_s):
            head = await line.reader.readuntil(b"\r\n\r\n")
            body = await _body(line.reader, head)
    except TimeoutError:
        return Answer("no answer", time.monotonic() - began)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return Answer("closed", time.monotonic() - began)
    return Answer(head[9:12].decode("ascii", "replace"), time.monotonic() - began, body)


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if (length := fields.get(b"content-length")) is not None:
        return await reader.readexactly(int(length))
    if b"chunked" not in fields.get(b"transfer-encoding", b""):
        return b""
    whole = bytearray()
    while size := int(await reader.readline(), 16):
        whole += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return bytes(whole)


async def ask(address: str, sent: bytes, *, wait_s: float = ANSWER_S, source: str | None = SOURCE) -> Answer:
    """Send one request on a connection of its own. A refusal before the request was whole is an answer
    too."""
    began = time.monotonic()
    try:
        line = await call(address, source=source)
    except OSError:
        return Answer("refused connection", time.monotonic() - began)
    try:
        line.writer.write(sent)
        return await answer_of(line, began, wait_s)
    finally:
        line.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
