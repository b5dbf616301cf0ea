"""What stands before the methods of the router's gRPC port: keys, bounds, and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from baton.net.message_bounds import MessageBounds
from baton.router.api.authentication import Authentication
from baton.router.api.catalogue import Catalogue
from baton.router.api.grpc import front as grpc_front
from baton.router.api.grpc.front import FrontInterceptor, interceptors_for
from baton.router.api.grpc.messages import MessageLimits, MessageRoom
from baton.router.api.grpc.probes import CHECK, ProbeLimits, ProbeRoom
from baton.router.api.grpc.service import SERVICE_NAME, add_services, server_options
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.client import Client
from baton.router.shared.limits import Limits, Tenant
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import until
from tests.support.deep import all_deep_but
from tests.support.fake_ring import Call, FakeRing, busy
from tests.support.leftovers import leftovers
from tests.support.tiny_tokenizers import byte_level_tokenizer

GENERATE = f"/{SERVICE_NAME}/Generate"
KEYS = {
    "of-acme": Client(tenant=Tenant("acme"), key="a"),
    "of-other": Client(tenant=Tenant("other"), key="o", models=frozenset({"another"})),
    "of-slow": Client(tenant=Tenant("slow", limits=Limits(requests_per_minute=1)), key="s"),
}
ACME = (("authorization", "Bearer of-acme"),)
ASKED = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), params=pb.SamplingParams(max_tokens=2))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring(tokenizer: Tokenizer) -> FakeRing:
    return FakeRing(lambda call: tokenizer.encode("fox"), ends=True)


def service_of(ring: FakeRing, tokenizer: Tokenizer, *, keys: bool = True) -> CompletionService:
    authentication = Authentication(KEYS.get if keys else None, Tenant("everybody"))
    metrics = RouterMetrics(CollectorRegistry())
    return CompletionService(ring, tokenizer, ApiSettings(), metrics, authentication=authentication)


@asynccontextmanager
async def serving(
    service: CompletionService, room: MessageRoom | None = None, probes: ProbeRoom | None = None
) -> AsyncIterator[str]:
    """The address of a server."""
    interceptors = interceptors_for(service)
    interceptors[0] = FrontInterceptor(Catalogue([service]), room, probes)
    server = grpc.aio.server(interceptors=interceptors, options=server_options(service.settings))
    add_services(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def channel_to(
    service: CompletionService, room: MessageRoom | None = None, probes: ProbeRoom | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(service, room, probes) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


async def refusal(call: AsyncIterable[object]) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(60):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
    return refused.value


def raw(
    channel: grpc.aio.Channel, metadata: Iterable[tuple[str, str]] = ()
) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """A call of Generate whose message is for the test to write."""
    return channel.stream_stream(GENERATE, None, None)(None, metadata=tuple(metadata))


async def test_a_key_is_looked_at_before_the_message_comes(ring: FakeRing, tokenizer: Tokenizer) -> None:
    service = service_of(ring, tokenizer)
    async with channel_to(service) as channel:
        for metadata in ((), (("authorization", "Bearer unknown"),)):
            error = await refusal(raw(channel, metadata))  # nothing was written
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        counted = service.metrics.requests.labels(GENERATE.lstrip("/"), "401")
        assert counted._value.get() == 2
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="API key"):
            await stub.ListModels(pb.ListModelsRequest())
        assert [_ async for _ in stub.Generate(ASKED, metadata=ACME)]
        assert list((await stub.ListModels(pb.ListModelsRequest(), metadata=ACME)).models) == ["tiny"]


async def test_a_silent_connection_is_closed(
    ring: FakeRing, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_front, "HANDSHAKE_MS", 300)
    monkeypatch.setattr(grpc_front, "IDLE_MS", 300)
    service = service_of(ring, tokenizer)
    server = grpc.aio.server(interceptors=interceptors_for(service), options=server_options(service.settings))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    try:
        for said in (b"", preface):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            async with asyncio.timeout(60):
                await reader.read()
            writer.close()
    finally:
        await server.stop(0)


async def test_connections_leave_descriptors_for_others(
    ring: FakeRing, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_front, "MAX_CONNECTIONS", 3)
    service = service_of(ring, tokenizer)
    server = grpc.aio.server(interceptors=interceptors_for(service), options=server_options(service.settings))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, _ in taken:
            async with asyncio.timeout(60):
                await reader.readexactly(9)  # the server's settings: it has taken the connection
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        for _, other in (*taken, (reader, writer)):
            other.close()
    finally:
        await server.stop(0)


async def test_reflection_needs_a_key_and_health_none(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with channel_to(service_of(ring, tokenizer)) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        error = await refusal(reflection.ServerReflectionInfo(iter(asked)))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        told = [_ async for _ in reflection.ServerReflectionInfo(iter(asked), metadata=ACME)]
        assert told[0].list_services_response.service
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1


async def test_what_a_message_may_hold(ring: FakeRing, tokenizer: Tokenizer) -> None:
    """Millions of empty messages have room in one of 8 MiB."""
    many = pb.GenerateRequest(params=pb.SamplingParams(bad_word_ids=[pb.TokenIds()] * 20_000))
    longest = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (MessageBounds().packed_bytes + 1)))
    cases = {
        many.SerializeToString(): "more than 16384 fields and entries of lists",
        longest.SerializeToString(): "ids has 4194305 bytes; at most 4194304 are allowed",
    }
    ids = [1] * 2000
    for params, why in (
        (pb.SamplingParams(stop_token_ids=ids), "stop_token_ids has 2000 ids"),
        (pb.SamplingParams(allowed_token_ids=ids), "allowed_token_ids has 2000 ids"),
        (pb.SamplingParams(bad_word_ids=[pb.TokenIds(ids=ids)]), "bad_word_ids[0] has 2000 token ids"),
    ):
        cases[pb.GenerateRequest(text="a", params=params).SerializeToString()] = why
    too_long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    cases[too_long.SerializeToString()] = "but the prompt has 2000"
    async with channel_to(service_of(ring, tokenizer)) as channel:
        for message, why in cases.items():
            call = channel.unary_stream(GENERATE, None, None)(message, metadata=ACME)
            error = await refusal(call)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert why in (error.details() or ""), error.details()
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert [_ async for _ in stub.Generate(ASKED, metadata=ACME)], "others are answered as before"


async def test_a_message_must_be_whole_in_time(ring: FakeRing, tokenizer: Tokenizer) -> None:
    room = MessageRoom(MessageLimits(message_s=0.2))
    async with channel_to(service_of(ring, tokenizer), room) as channel:
        error = await refusal(raw(channel, ACME))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "was not whole within 0.2 s" in (error.details() or "")


@pytest.mark.parametrize("whose", ["its own tenant's", "anybody's"])
async def test_who_sends_slowly_makes_room_for_others(
    ring: FakeRing, tokenizer: Tokenizer, whose: str
) -> None:
    own = whose == "its own tenant's"
    limits = MessageLimits(
        readers=9 if own else 2, tenant_readers=2 if own else 9, message_s=60, undisturbed_s=0.2
    )
    other = ACME if own else (("authorization", "Bearer of-slow"),)
    room = MessageRoom(limits)
    async with channel_to(service_of(ring, tokenizer), room) as channel:
        slow = [raw(channel, ACME) for _ in range(2)]
        await until(lambda: room.under_way == 2, 10)
        stub = inference_pb2_grpc.InferenceStub(channel)
        async with asyncio.timeout(60):
            assert [_ async for _ in stub.Generate(ASKED, metadata=other)]
            ended, _ = await asyncio.wait(
                [asyncio.create_task(call.code()) for call in slow], return_when=asyncio.FIRST_COMPLETED
            )
        assert [task.result() for task in ended] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        [displaced] = [call for call in slow if call.done()]  # only as many as must
        assert "others waited" in await displaced.details()
        for call in slow:
            call.cancel()


def probe(channel: grpc.aio.Channel, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """A probe whose message is for the test to write."""
    return channel.stream_stream(method, None, None)(None)


async def test_a_check_is_answered_however_many_strangers_probe(ring: FakeRing, tokenizer: Tokenizer) -> None:
    """Strangers have 256 watches open, and 60 checks that send no message."""
    probes = ProbeRoom(ProbeLimits(message_s=60))
    own = [("grpc.use_local_subchannel_pool", 1)]

    async def watch(health: health_pb2_grpc.HealthStub) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in health.Watch(health_pb2.HealthCheckRequest()):
                pass

    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(service_of(ring, tokenizer), None, probes))
        connections = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=own)) for _ in range(6)
        ]
        honest = health_pb2_grpc.HealthStub(connections.pop())
        silent = [probe(connections[-1], CHECK) for _ in range(60)]
        watches = [
            asyncio.create_task(watch(health_pb2_grpc.HealthStub(connections[number % 4])))
            for number in range(256)
        ]
        ends = [asyncio.create_task(call.read()) for call in silent]
        await until(lambda: sum(end.done() for end in ends) >= 60 - ProbeLimits().readers, 20)
        for _ in range(20):
            assert (await honest.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1
        assert probes.watching <= ProbeLimits().address_watches
        for call in silent:
            call.cancel()
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, *ends, return_exceptions=True)


async def test_a_check_that_sends_nothing_ends_in_time(ring: FakeRing, tokenizer: Tokenizer) -> None:
    probes = ProbeRoom(ProbeLimits(message_s=0.2))
    async with channel_to(service_of(ring, tokenizer), None, probes) as channel:
        assert (await refusal(probe(channel, CHECK))).code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_watch_makes_room_for_a_newer_one(ring: FakeRing, tokenizer: Tokenizer) -> None:
    probes = ProbeRoom(ProbeLimits(address_watches=3, watch_s=2.0))
    async with channel_to(service_of(ring, tokenizer), None, probes) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(4):
            watches.append(health.Watch(health_pb2.HealthCheckRequest()))
            assert (await watches[-1].read()).status == 1
        assert await watches[0].code() == grpc.StatusCode.UNAVAILABLE
        assert probes.watching == 3
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert [_ async for _ in stub.Generate(ASKED, metadata=ACME)]
        assert await watches[1].code() == grpc.StatusCode.UNAVAILABLE, "it has lasted long enough"
        for watch in watches:
            watch.cancel()
    await until(lambda: not probes.watching, 10)


async def test_the_oldest_watch_of_the_fullest_address_leaves_first() -> None:
    room = ProbeRoom(ProbeLimits(watches=4, address_watches=3))
    left: list[str] = []

    async def watch(name: str, peer: str) -> None:
        try:
            async with asyncio.timeout(None) as timeout:
                with room.watch(peer, timeout):
                    await asyncio.Event().wait()
        except TimeoutError:
            left.append(name)

    calls: list[asyncio.Task[None]] = []
    for name, peer in (
        ("a", "ipv4:10.0.0.1:1"),
        ("b", "ipv6:%5B2001:db8::1%5D:1"),
        ("c", "ipv6:[2001:db8::2]:2"),  # of the same network
        ("d", "ipv4:10.0.0.3:1"),
        ("e", "ipv4:10.0.0.4:1"),
        ("f", "ipv4:10.0.0.4:2"),
    ):
        calls.append(asyncio.create_task(watch(name, peer)))
        await asyncio.sleep(0.01)
    assert left == ["b", "a"], "first the network with two; then each address has one, and the oldest leaves"
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert not room.watching


REFUSED: dict[str, tuple[Sequence[tuple[str, str]], pb.GenerateRequest | bytes, grpc.StatusCode]] = {
    "no key": ((), ASKED, grpc.StatusCode.UNAUTHENTICATED),
    "not this model": (
        (("authorization", "Bearer of-other"),),
        ASKED,
        grpc.StatusCode.NOT_FOUND,
    ),
    "no such model": (ACME, pb.GenerateRequest(model="none", text="a"), grpc.StatusCode.NOT_FOUND),
    "bad field": (
        ACME,
        pb.GenerateRequest(text="a", params=pb.SamplingParams(top_p=-1)),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "too long": (
        ACME,
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 5000)),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "too many fields": (
        ACME,
        pb.GenerateRequest(params=pb.SamplingParams(bad_words=[""] * 20_000)),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "limit": ((("authorization", "Bearer of-slow"),), ASKED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "busy": (ACME, ASKED, grpc.StatusCode.UNAVAILABLE),
    "unreadable": (ACME, b"\x0a\xff", grpc.StatusCode.INVALID_ARGUMENT),
}


@pytest.mark.parametrize("why", all_deep_but(2, REFUSED))
async def test_a_refused_call_leaves_no_garbage(tokenizer: Tokenizer, why: str) -> None:
    """What it sent would stay until somebody looks for cycles, which a busy router does seldom."""
    metadata, asked, code = REFUSED[why]
    ring = FakeRing(lambda call: tokenizer.encode("fox"), ends=True)
    if why == "busy":
        ring = FakeRing(raise_busy)
    message = asked if isinstance(asked, bytes) else asked.SerializeToString()
    async with channel_to(service_of(ring, tokenizer)) as channel:

        async def refused() -> None:
            call = channel.unary_stream(GENERATE, None, None)(message, metadata=metadata)
            assert await call.code() == code

        if why == "limit":
            call = channel.unary_stream(GENERATE, None, None)(message, metadata=metadata)
            assert [_ async for _ in call]
        left = await leftovers(refused)
    assert not left


def raise_busy(call: Call) -> list[int]:
    raise busy()
