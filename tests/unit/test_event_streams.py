"""Streams as bytes: what goes past ASGI is framed as its server would have done it."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections import Counter
from urllib.parse import urlsplit

import h11
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from baton.router.api.http.app import app_for
from baton.router.api.http.server.connection import Exchange
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving_app, until
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

TOKENS = 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def app(tokenizer: Tokenizer) -> Starlette:
    ring = FakeRing(lambda call: [70 + call.prompt_ids[0] % 10], delay=0.001)
    return app_for(CompletionService(ring, tokenizer, ApiSettings(), RouterMetrics(CollectorRegistry())))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pieces of bodies that went past ASGI."""
    pieces: list[bytes] = []
    write = Exchange.write

    def noted(self: Exchange, data: bytes) -> bool:
        went = write(self, data)
        if went:
            pieces.append(data)
        return went

    monkeypatch.setattr(Exchange, "write", noted)
    return pieces


def request(token: int) -> tuple[h11.Request, bytes]:
    body = json.dumps({"prompt": [token], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}).encode()
    head = [("host", "x"), ("content-type", "application/json"), ("content-length", str(len(body)))]
    return h11.Request(method="POST", target="/v1/completions", headers=head), body


async def answers(url: str, tokens: list[int]) -> list[bytes]:
    """The bodies that answer requests which were all sent at once, on one connection."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    for token in tokens:
        asked = h11.Connection(h11.CLIENT)
        head, body = request(token)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(asked.send(event) or b"")
    parser = h11.Connection(h11.CLIENT)
    bodies = []
    for token in tokens:
        head, body = request(token)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            parser.send(event)
        bodies.append(await _body(parser, reader))
        parser.start_next_cycle()
    assert parser.trailing_data == (b"", False)
    writer.close()
    await writer.wait_closed()
    return bodies


async def _body(parser: h11.Connection, reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(await asyncio.wait_for(reader.read(65536), 10))
        elif isinstance(event, h11.Response):
            assert event.status_code == 200
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body


def text_of(body: bytes) -> str:
    *events, done, end = body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


async def test_each_answer_of_a_connection_is_whole(app: Starlette, written: list[bytes]) -> None:
    async with serving_app(app) as url:
        bodies = await answers(url, [1, 2, 3])
    texts = [text_of(body) for body in bodies]
    assert len(set(texts)) == 3 and all(len(text) == TOKENS for text in texts)
    assert b"".join(written) == b"".join(bodies), "none of it went another way"


async def test_another_server_says_the_same(app: Starlette, written: list[bytes]) -> None:
    async with serving_app(app) as url:
        [ours] = await answers(url, [4])
    assert written
    written.clear()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    [theirs] = await answers(f"http://127.0.0.1:{listener.getsockname()[1]}", [4])
    server.should_exit = True
    await task
    assert text_of(theirs) == text_of(ours) and not written


async def test_requests_leave_no_garbage(app: Starlette) -> None:
    """To look for cycles among thousands of streams holds them all up."""
    async with serving_app(app) as url:
        await answers(url, [1, 2])
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(5):
                await answers(url, [1, 2])
            gc.collect()
            left = Counter(f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    ours = {
        name: count for name, count in left.items() if name.startswith(("baton.", "uvicorn.", "fastapi."))
    }
    assert not ours, "neither do their connections"


async def test_nothing_is_no_chunk(app: Starlette) -> None:
    """An empty chunk would end the answer."""
    async with serving_app(app) as url:
        write = Exchange.write

        def with_nothing(self: Exchange, data: bytes) -> bool:
            return write(self, b"") and write(self, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Exchange, "write", with_nothing)
            [body] = await answers(url, [5])
    assert len(text_of(body)) == TOKENS
