"""An HTTP client that sends what no library would."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, str]:
        """Of OpenAI's shape."""
        error: dict[str, str] = json.loads(self.body)["error"]
        return error


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Does not mind a server that hears no more."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            pass

    async def answer(self, seconds: float = 5.0) -> Answer:
        """The next answer. Fails when none comes in time."""
        async with asyncio.timeout(seconds):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in rest)}
            if headers.get("transfer-encoding") == "chunked":
                body = await self._chunks()
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(line.split()[1]), headers, body)

    async def _chunks(self) -> bytes:
        chunks = []
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            chunks.append((await self.reader.readexactly(size + 2))[:-2])
            if not size:
                return b"".join(chunks)

    async def end(self, seconds: float = 5.0) -> bytes:
        """What comes until the server closes. Fails when it does not in time."""
        async with asyncio.timeout(seconds):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def connected(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawClient]:
    """A connection to the server of ``url``."""
    where = urlsplit(url)
    client = RawClient(*await asyncio.open_connection(where.hostname, where.port, ssl=tls))
    try:
        yield client
    finally:
        client.close()


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A request of JSON. ``length``: another than the body's."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()
