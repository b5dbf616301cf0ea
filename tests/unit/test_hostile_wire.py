"""HTTP/2 and protobuf by hand (`loadtest.hostile`): what is built is what servers take."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from baton.v1 import inference_pb2 as pb
from loadtest.hostile import frames
from loadtest.hostile.bodies import EVERY, Repeated
from loadtest.hostile.floods import PARAMS, many_messages
from loadtest.hostile.frames import Frame, Parser
from loadtest.hostile.wire import call, free_port, loopback, request


@pytest.mark.parametrize(
    ("value", "bits", "written"), [(10, 5, "0a"), (1337, 5, "1f9a0a"), (42, 8, "2a"), (31, 5, "1f00")]
)
def test_integers_are_those_of_hpack(value: int, bits: int, written: str) -> None:
    """The examples of RFC 7541, C.1."""
    assert frames.hpack_integer(value, bits).hex() == written


def test_a_literal_field_is_that_of_hpack() -> None:
    """RFC 7541, C.2.2, but for a name that is spelled out."""
    assert frames.field("custom-key", "custom-value").hex() == (
        "000a" + b"custom-key".hex() + "0c" + b"custom-value".hex()
    )


def test_frames_are_parsed_as_they_were_built_whatever_the_pieces() -> None:
    sent = (
        frames.settings({4: 65535})
        + frames.headers(1, b"head", whole=False)
        + frames.continuation(1, b"more", whole=True)
        + frames.data(1, b"body", end=True)
        + frames.reset(3)
        + frames.ping(7)
        + frames.window_update(0, 9)
    )
    expected = [
        Frame(frames.SETTINGS, 0, 0, bytes.fromhex("00040000ffff")),
        Frame(frames.HEADERS, 0, 1, b"head"),
        Frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"more"),
        Frame(frames.DATA, frames.END_STREAM, 1, b"body"),
        Frame(frames.RST_STREAM, 0, 3, bytes.fromhex("00000008")),
        Frame(frames.PING, 0, 0, bytes.fromhex("0000000000000007")),
        Frame(frames.WINDOW_UPDATE, 0, 0, bytes.fromhex("00000009")),
    ]
    for step in (1, 7, len(sent)):
        parser = Parser()
        assert [f for at in range(0, len(sent), step) for f in parser.feed(sent[at : at + step])] == expected


async def test_a_call_by_hand_is_taken_by_a_grpc_server() -> None:
    """Its message arrives, and the answer's is in a DATA frame."""
    heard: list[bytes] = []

    async def echo(message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        heard.append(message)
        return b"told " + message

    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("by.Hand", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        line = await call(f"127.0.0.1:{port}")
        line.writer.write(
            frames.PREFACE
            + frames.settings()
            + frames.headers(1, frames.grpc_head("/by.Hand/Call"))
            + frames.data(1, frames.grpc_message(b"this"), end=True)
        )
        parser, came = Parser(), list[Frame]()
        async with asyncio.timeout(60):
            while not any(f.flags & frames.END_STREAM and f.stream for f in came):
                came += parser.feed(await line.reader.read(4096))
        line.close()
    finally:
        await server.stop(None)
    assert heard == [b"this"]
    assert [f.payload for f in came if f.kind == frames.DATA and f.payload] == [
        frames.grpc_message(b"told this")
    ]


def test_many_messages_are_a_request_of_as_many() -> None:
    parsed = pb.GenerateRequest.FromString(many_messages(3000))
    assert len(parsed.params.bad_word_ids) == 1000
    assert frames.part(PARAMS, b"") == pb.GenerateRequest(params=pb.SamplingParams()).SerializeToString()


def test_parts_are_read_as_they_were_written() -> None:
    message = frames.part(1, b"a") + frames.part(40, frames.part(3, b"x" * 300)) + frames.part(1, b"b")
    assert frames.parts(message) == {1: b"b", 40: frames.part(3, b"x" * 300)}
    for broken in (message[:-1], b"\x08\x01", b"\xff"):
        with pytest.raises(ValueError, match=r"cut short|no message"):
            frames.parts(broken)


@pytest.mark.parametrize("each", EVERY, ids=lambda each: f"{each.path} {each.name}")
def test_bodies_are_as_long_as_wanted_and_json(each: Repeated) -> None:
    body = each.body(100_000)
    assert 100_000 - len(each.element) - 2 <= len(body) <= 100_000
    if each.name != "nesting":
        json.loads(body)


@pytest.mark.parametrize("address", ["10.0.0.1:80", "[::2]:80", "93.184.216.34:443", "0.0.0.0:80"])
def test_nothing_but_loopback_is_attacked(address: str) -> None:
    with pytest.raises(ValueError, match="not on loopback"):
        loopback(address)


async def test_attackers_call_from_an_address_of_their_own() -> None:
    called: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set_result(writer.get_extra_info("peername")[0])
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        line = await call(f"127.0.0.1:{port}")
        assert await called == "127.0.0.2"
        assert not await line.is_open(2.0)
        line.close()


def test_a_request_may_say_another_length_than_its_body_has() -> None:
    sent = request("/x", b"{}", key="k", length=5, headers={"host": "other"})
    head, _, body = sent.partition(b"\r\n\r\n")
    assert body == b"{}"
    assert b"content-length: 5" in head
    assert b"authorization: Bearer k" in head
    assert b"host: other" in head and b"127.0.0.1" not in head
