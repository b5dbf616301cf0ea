"""Strangers that reach a worker's ports: gRPC, KV data, metrics."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import grpc

from baton.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from loadtest.hostile import frames
from loadtest.hostile.frames import Parser
from loadtest.hostile.vocabulary import MIB, Attack, Felt, Found, Place, Reached, Setup, Target, Watched
from loadtest.hostile.wire import Line, answer_of, ask, call, loopback, request

GREETING_S = 3.0
CONNECT = "/baton.v1.Worker/Connect"
HELLO, GREETING, PROOF = 1, 40, 41
"""Fields of RouterMessage: not every tree has them all. The answer to a greeting has the same number."""
LET_IN = "let in"
OF_A_ROUTER = (b"\x0a", b"\x12")
"""The first bytes, behind gRPC's five, of a worker's messages that are for routers only: hello and frame."""
NAMES_MIB = (25, 6)
NAMES = 6
SILENT = 400
AT_ONCE = 4
REPLAYS = 6
REPLAY_S = 2.0
FIRST_MESSAGES = 6
DOORS = 200
MAX_REFUSALS = 20
LINKS = 20
OPTIONS = (("grpc.max_send_message_length", 64 * MIB), ("grpc.use_local_subchannel_pool", 1))

Connected: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]"
Raw: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
Linked: TypeAlias = "grpc.aio.StreamStreamCall[handoff_pb2.PrefillMessage, handoff_pb2.DecodeMessage]"


@asynccontextmanager
async def connected(
    place: Place, name: str = "stranger"
) -> AsyncIterator[tuple[Connected, worker_pb2.WorkerHello | None]]:
    """A router's stream opened by a stranger, and the worker's hello; None if the worker does not send
    one."""
    loopback(place.grpc)
    async with grpc.aio.insecure_channel(place.grpc, OPTIONS) as channel:
        stream = worker_pb2_grpc.WorkerStub(channel).Connect(None)
        hello = None
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            await stream.write(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id=name)))
            async with asyncio.timeout(GREETING_S):
                said = await stream.read()
            if isinstance(said, worker_pb2.WorkerMessage) and said.hello.incarnation:
                hello = said.hello
        try:
            yield stream, hello
        finally:
            stream.cancel()


async def _status(stream: Connected, found: Found) -> None:
    """Count the stream's status, or that it is open."""
    try:
        async with asyncio.timeout(1.0):
            found.count((await stream.code()).name)
            found.said = (await stream.details() or "")[:120]
    except TimeoutError:
        found.count("open")


async def submits(target: Target, found: Found) -> None:
    """Send a request without key or handle."""
    for place in target.workers[:2]:
        async with connected(place) as (stream, hello):
            if hello is None:
                await _status(stream, found)
                continue
            name = secrets.token_hex(8)
            submit = worker_pb2.Submit(request_id=name, attempt=1, prompt_ids=[5, 6, 7, 8])
            submit.params.max_tokens, submit.params.ignore_eos, submit.params.seed = 4, True, 1
            with suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(worker_pb2.RouterMessage(submit=submit))
                async with asyncio.timeout(GREETING_S):
                    await _tokens(stream, name, found)
            await _status(stream, found)


async def _tokens(stream: Connected, name: str, found: Found) -> None:
    while isinstance(said := await stream.read(), worker_pb2.WorkerMessage):
        for delta in said.frame.deltas:
            if delta.request_id == name and delta.token_ids:
                found.count("token")
                found.figures["tokens"] = found.figure("tokens") + len(delta.token_ids)
                if delta.finish_reason:
                    return


async def feed(target: Target, found: Found) -> None:
    """Count the digests of tenants' prompts that the worker sends."""
    for place in target.workers[:2]:
        async with connected(place) as (stream, hello):
            if hello is not None:
                with suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    async with asyncio.timeout(GREETING_S):
                        while isinstance(said := await stream.read(), worker_pb2.WorkerMessage):
                            told = len(said.frame.blocks.stored)
                            found.figures["digests"] = found.figure("digests") + told
            await _status(stream, found)


async def peers(target: Target, found: Found) -> None:
    """Have prefill call an address that a stranger names."""
    called = asyncio.Event()
    server = await asyncio.start_server(lambda reader, writer: called.set(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with connected(target.of_role("prefill")) as (stream, hello):
        if hello is not None:
            peer = worker_pb2.DecodePeer(handoff_address=f"127.0.0.1:{port}", incarnation="0" * 32)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(worker_pb2.RouterMessage(peers=worker_pb2.DecodePeers(peers=[peer])))
            with suppress(TimeoutError):
                await asyncio.wait_for(called.wait(), 5.0)
        await _status(stream, found)
    found.figures["dialled"] = float(called.is_set())
    server.close()


async def as_router(target: Target, found: Found) -> None:
    """Connect in the name of the present router, which its worker's log shows."""
    place = target.of_role("decode")
    told = await asyncio.to_thread(_routers_told, Path(place.log))
    if not told:
        found.said = "no router's name is told"
        return
    before = await _resumes(target)
    for _ in range(5):
        async with connected(place, told[-1]) as (_, hello):
            found.count("greeted" if hello is not None else "refused")
            await asyncio.sleep(0.5)
    found.figures["resumes"] = await _resumes(target) - before


def _routers_told(log: Path) -> list[str]:
    return re.findall(r"router ([0-9a-f]{8,}) connected", log.read_text())


async def _resumes(target: Target) -> float:
    """Return the router's resumes so far, for any reason."""
    page = await ask(target.http, request("/metrics"))
    lines = page.body.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("baton_resumes_total"))


async def links(target: Target, found: Found) -> None:
    """Open links in the name of the linked prefill worker, with the layout that refusals reveal field by
    field."""
    names: dict[str, str] = {}
    for place in target.workers[:2]:
        async with connected(place) as (_, hello):
            names[place.role] = hello.incarnation if hello is not None else "0" * 32
    opened = handoff_pb2.LinkOpen(
        prefill_incarnation=names["prefill"],
        decode_incarnation=names["decode"],
        connectors=["tcp"],
        prefill_address=target.of_role("prefill").grpc,
    )
    opened.compatibility.block_size = 16
    before, accepted = await _resumes(target), 0
    for _ in range(MAX_REFUSALS + LINKS):
        said = await _open_link(target.of_role("decode"), opened, found)
        if said is None or accepted >= LINKS:
            break
        if said.HasField("accept"):
            accepted += 1
        elif not _learn(opened, said.refuse):
            found.said = f"{said.refuse.field}: {said.refuse.reason}"[:120]
            break
    found.figures |= {"accepted": accepted, "resumes": await _resumes(target) - before}


def _learn(opened: handoff_pb2.LinkOpen, refuse: handoff_pb2.LinkRefuse) -> bool:
    """Set a field of the next LinkOpen from a refusal such as "layout differs: prefill x, decode y"."""
    told = re.search(r", decode (.*)$", refuse.reason)
    known = handoff_pb2.Compatibility.DESCRIPTOR.fields_by_name
    if told is None or refuse.field not in known:
        return False
    current = getattr(opened.compatibility, refuse.field)
    setattr(opened.compatibility, refuse.field, type(current)(told[1]))
    return True


async def _open_link(
    place: Place, opened: handoff_pb2.LinkOpen, found: Found
) -> handoff_pb2.DecodeMessage | None:
    async with grpc.aio.insecure_channel(loopback_of(place), OPTIONS) as channel:
        link: Linked = handoff_pb2_grpc.HandoffStub(channel).Link(None)
        try:
            await link.write(handoff_pb2.PrefillMessage(open=opened))
            async with asyncio.timeout(GREETING_S):
                said = await link.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            said = None
        except TimeoutError:
            found.count("no answer")
            return None
        if isinstance(said, handoff_pb2.DecodeMessage) and (said.HasField("accept") or said.refuse.reason):
            found.count("accepted" if said.HasField("accept") else "refused")
            return said
        found.count((await link.code()).name)
        found.said = (await link.details() or "")[:120]
        return None


def loopback_of(place: Place) -> str:
    loopback(place.grpc)
    return place.grpc


async def names(target: Target, found: Found) -> None:
    """Send long names, in LinkOpen and RouterHello."""
    place = target.of_role("decode")
    for number in range(NAMES):
        long = "x" * (NAMES_MIB[number % len(NAMES_MIB)] * MIB)
        opened = handoff_pb2.LinkOpen(
            prefill_incarnation=f"{number}{long}", prefill_address=f"{number}{long[:MIB]}"
        )
        await _open_link(place, opened, found)
        async with connected(place, f"{number}{long}") as (_, hello):
            found.count("greeted" if hello is not None else "not greeted")


async def replayed(target: Target, found: Found) -> None:
    """Repeat the router's bytes to its worker on connections of a stranger's: all of them, and their
    beginning alone. (The router, whose stream is ended by that, calls again and ends the stranger's.)"""
    said = await asyncio.to_thread(Path(target.recorded).read_bytes)
    for number in range(REPLAYS):
        found.count(await _replay(target.workers[0], said if number % 2 else _beginning(said)))


def _beginning(said: bytes) -> bytes:
    """Return the first messages of a recorded connection."""
    kept, messages = bytearray(frames.PREFACE), 0
    for frame in Parser().feed(said[len(frames.PREFACE) :]):
        kept += frames.frame(frame.kind, frame.flags, frame.stream, frame.payload)
        messages += frame.kind == frames.DATA
        if messages == FIRST_MESSAGES:
            break
    return bytes(kept)


async def _replay(place: Place, said: bytes) -> str:
    """Return whether the worker sends messages that are for routers only."""
    line = await call(place.grpc)
    line.writer.write(said)
    parser, let_in = Parser(), False
    beats = asyncio.create_task(_acknowledge(line))
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(REPLAY_S):
            while not let_in and (data := await line.reader.read(1 << 16)):
                heard = [frame.payload[5:6] for frame in parser.feed(data) if frame.kind == frames.DATA]
                let_in = any(first in OF_A_ROUTER for first in heard)
    beats.cancel()
    line.close()
    return LET_IN if let_in else "not let in"


async def _acknowledge(line: Line) -> None:
    """Keep the windows open for everything that comes."""
    while not line.writer.transport.is_closing():
        line.writer.write(frames.settings(ack=True) + frames.window_update(0, 1 << 20))
        await asyncio.sleep(0.5)


def _greeting(name: str, nonce: bytes) -> bytes:
    return frames.part(GREETING, frames.part(1, name.encode()) + frames.part(2, nonce))


async def _challenged(stream: Raw, greeting: bytes) -> dict[int, bytes]:
    """Return the worker's answer to a greeting: its nonce (2) and its own proof (3); empty if it sends
    none."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, ValueError):
        await stream.write(greeting)
        async with asyncio.timeout(GREETING_S):
            said = await stream.read()
        if isinstance(said, bytes):
            return frames.parts(frames.parts(said).get(GREETING, b""))
    return {}


async def reflected(target: Target, found: Found) -> None:
    """Greet, and return the worker's own proof as ours: the proof of this stream, or of another one, on which
    the worker was made to prove itself over the nonce that it gave here."""
    for place in target.workers[:2]:
        async with grpc.aio.insecure_channel(loopback_of(place), OPTIONS) as channel:
            connect = channel.stream_stream(CONNECT, None, None)
            for twice in (False, True):
                stream, other = connect(None), connect(None)
                told = await _challenged(stream, _greeting("stranger", secrets.token_bytes(32)))
                if twice and told:
                    told |= await _challenged(other, _greeting("stranger", told[2]))
                found.count(await _proved(stream, told.get(3, b"")))
                stream.cancel()
                other.cancel()


async def _proved(stream: Raw, proof: bytes) -> str:
    """Return the worker's response to the proof: its status, or that it lets a router in."""
    try:
        await stream.write(frames.part(PROOF, frames.part(1, proof)))
        await stream.write(frames.part(HELLO, frames.part(1, b"stranger")))
        async with asyncio.timeout(GREETING_S):
            said = await stream.read()
    except TimeoutError:
        return "no answer"
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        said = None
    return LET_IN if isinstance(said, bytes) else (await stream.code()).name


async def data_port(target: Target, found: Found) -> None:
    """Open connections that send nothing, or nothing valid."""
    lines = []
    for number in range(DOORS):
        try:
            lines.append(await call(target.of_role("decode").data))
        except OSError:
            found.count("refused connection")
            continue
        if number % 2:
            lines[-1].writer.write(secrets.token_bytes(200))
    await asyncio.sleep(6.0)
    open_still = sum(await asyncio.gather(*(line.is_open(0.2) for line in lines)))
    found.figures["still_open"] = open_still
    found.got |= {"still open": open_still, "closed": len(lines) - open_still}


async def metrics_port(target: Target, found: Found) -> None:
    """Open 400 connections that send nothing."""
    place = target.of_role("decode")
    lines: list[Line] = []

    async def begin() -> None:
        try:
            async with asyncio.timeout(5.0):
                lines.append(await call(place.metrics))
        except (OSError, TimeoutError):
            found.count("refused connection")

    for _ in range(SILENT // AT_ONCE):  # the accept queue is short
        await asyncio.gather(*(begin() for _ in range(AT_ONCE)))
        await asyncio.sleep(0.05)
    await asyncio.sleep(8.0)
    open_still = sum(await asyncio.gather(*(line.is_open(0.2) for line in lines)))
    began = time.monotonic()
    line = await call(place.metrics, source=None)
    line.writer.write(request("/metrics"))
    page = await answer_of(line, began, 5)
    found.figures |= {"still_open": open_still, "scrape_s": round(page.seconds, 3)}
    found.got |= {"still open": open_still, "closed": len(lines) - open_still}


def _some(figure: str, least: float = 1.0) -> Reached:
    def reached(found: Found, watched: Watched, felt: Felt) -> bool:
        return found.figure(figure) >= least

    return reached


def _let_in(found: Found, watched: Watched, felt: Felt) -> bool:
    return LET_IN in found.got


def _grew(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.worker_grew > 50


def _threads(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.worker_threads_grew > 300 or found.figure("still_open") > 300


ATTACKS = (
    Attack(
        name="worker-submit",
        finding="S5",
        aim="a stranger gets tokens of a worker",
        run=submits,
        reached=_some("tokens"),
    ),
    Attack(
        name="worker-feed",
        finding="S5",
        aim="a stranger reads digests of cached blocks",
        run=feed,
        reached=_some("digests"),
    ),
    Attack(
        name="worker-peers",
        finding="S5",
        aim="prefill dials an address that a stranger names",
        run=peers,
        reached=_some("dialled"),
    ),
    Attack(
        name="worker-as-router",
        finding="S5",
        aim="requests of the router whose name was used start anew",
        run=as_router,
        reached=_some("resumes"),
    ),
    Attack(
        name="worker-link",
        finding="S5",
        aim="a link is accepted in a victim's name",
        run=links,
        reached=_some("accepted"),
    ),
    Attack(
        name="worker-names",
        finding="S5",
        aim="names of 6 and 25 MiB take 50 MiB of a worker",
        run=names,
        reached=_grew,
    ),
    Attack(
        name="worker-replay",
        finding="S5",
        aim="a router's recorded words open its stream again",
        run=replayed,
        reached=_let_in,
        setup=Setup(recorded=True),
    ),
    Attack(
        name="worker-reflect",
        finding="",
        aim="a worker takes its own proof for a router's",
        run=reflected,
        reached=_let_in,
    ),
    Attack(
        name="data-port",
        finding="",
        aim="connections without a token are open after 6 s",
        run=data_port,
        reached=_some("still_open"),
    ),
    Attack(
        name="metrics-port",
        finding="S15",
        aim="300 silent connections stay open, or have 300 threads",
        run=metrics_port,
        reached=_threads,
        max_s=40,
    ),
)
