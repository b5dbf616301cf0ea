"""Who has no cluster key gets no further than a greeting, on any stream of a worker, and hurts nobody."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.sampling_params import ResolvedSampling
from baton.greeting import bounds, entrance
from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import Called, Caller, Kind
from baton.handoff.decode import DecodeHandoffs
from baton.handoff.messages import LinkId
from baton.net.message_parts import MAX_WHOLE_BYTES, PIECE_BYTES, Joiner, in_parts
from baton.planner.switch_role import SwitchError, switch_role
from baton.router.dispatch.retries import RetryPolicy
from baton.router.fleet.worker_client import WorkerClient
from baton.v1 import handoff_pb2, handoff_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from baton.v1.greeting_pb2 import Challenge, Greeting, Proof
from baton.v1.parts_pb2 import MessagePart
from baton.worker import routers, server, service
from baton.worker.server import max_message
from tests.support.greetings import LinkCall, RouterCall, greet_decode, greet_worker
from tests.support.local_worker import KEY, KEYS, LocalWorker, answer, local_ring, until

PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40]
PARAMS = ResolvedSampling(max_tokens=5, temperature=0.0, ignore_eos=True)
OTHER_KEY = b"the key of somebody else"
S = grpc.StatusCode


@dataclass(frozen=True)
class Port:
    """One of a worker's streams, as a stranger calls it."""

    kind: Kind
    sends: type[pb.RouterMessage] | type[handoff_pb2.PrefillMessage]
    wanted: Message
    """What a stranger is after: it follows the greeting."""

    def call(self, channel: Any) -> Any:
        """The method, on a channel of either of gRPC's APIs."""
        if self.kind == "router":
            return pb_grpc.WorkerStub(channel).Connect
        return handoff_pb2_grpc.HandoffStub(channel).Link


SUBMIT = pb.RouterMessage(submit=pb.Submit(request_id="r", prompt_ids=PROMPT, params=PARAMS.to_proto()))
PEERS = pb.RouterMessage(
    peers=pb.DecodePeers(peers=[pb.DecodePeer(handoff_address="127.0.0.1:1", incarnation="d")])
)
PORTS = [
    Port("router", pb.RouterMessage, SUBMIT),
    Port("router", pb.RouterMessage, PEERS),
    Port("router", pb.RouterMessage, pb.RouterMessage(snapshot_wanted=pb.SnapshotWanted())),
    Port("router", pb.RouterMessage, pb.RouterMessage(hello=pb.RouterHello(router_id="r"))),
    Port("prefill", handoff_pb2.PrefillMessage, handoff_pb2.PrefillMessage(open=handoff_pb2.LinkOpen())),
]
IDS = ["submit", "peers", "feed", "hello", "link"]


@pytest.fixture
async def worker() -> AsyncIterator[LocalWorker]:
    found = LocalWorker("both")
    await found.start()
    yield found
    await found.stop()


async def refusal(
    port: Port, address: str, *sent: Message, challenged: Callable[[Challenge], Message] | None = None
) -> tuple[S, str]:
    """How the worker ends a stream on which this is sent; what ``challenged`` makes of its challenge comes
    after the first message."""
    return await asyncio.to_thread(_refusal, port, address, sent, challenged)


def _refusal(
    port: Port, address: str, sent: Sequence[Message], challenged: Callable[[Challenge], Message] | None
) -> tuple[S, str]:
    # Not over gRPC's asyncio API: a write that comes too late hides there what the worker has said.
    challenges: queue.SimpleQueue[Challenge] = queue.SimpleQueue()
    over = threading.Event()

    def messages() -> Iterator[Message]:
        for number, message in enumerate(sent):
            yield message
            if not number and challenged is not None:
                yield challenged(challenges.get(timeout=5))
        over.wait(5)

    with grpc.insecure_channel(address) as channel:
        heard = 0
        try:
            for answer in port.call(channel)(messages(), timeout=5):
                heard += 1
                challenges.put(answer.challenge)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            assert heard <= 1, "nothing but a challenge is told to a stranger"
            return error.code(), error.details() or ""
        finally:
            over.set()
    raise AssertionError("the stream has ended as it should not")


def greeting(port: Port, key: bytes = OTHER_KEY, name: str = "stranger") -> tuple[Caller, Message]:
    caller = Caller(ClusterKeys(key), port.kind, name)
    return caller, port.sends(greeting=caller.greeting)


def nothing_is_left(worker: LocalWorker) -> None:
    assert not worker.routers._streams and not worker.service.open_work()
    assert worker.service._entrance.unproved == worker.decode._entrance.unproved == 0
    assert not worker.decode._peers and worker.decode._machine._last_epoch == 0
    assert not worker.prefill.links and worker.held == 0


@pytest.mark.parametrize("port", PORTS, ids=IDS)
async def test_without_a_greeting_nothing_is_looked_at(worker: LocalWorker, port: Port) -> None:
    code, details = await refusal(port, worker.address, port.wanted)
    assert (code, "the first message must be a Greeting" in details) == (S.UNAUTHENTICATED, True)
    _, greeted = greeting(port)
    code, details = await refusal(port, worker.address, greeted, port.wanted)
    assert (code, details) == (S.UNAUTHENTICATED, "the second message must be a Proof")
    nothing_is_left(worker)


@pytest.mark.parametrize("port", PORTS, ids=IDS)
async def test_another_key_is_refused_by_name(
    worker: LocalWorker, port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    caller, greeted = greeting(port)

    def prove(challenge: Challenge) -> Message:
        theirs = Called(
            ClusterKeys(OTHER_KEY), port.kind, challenge.incarnation, caller.greeting, challenge.nonce
        )
        return port.sends(proof=caller.prove(theirs.challenge))

    code, details = await refusal(port, worker.address, greeted, port.wanted, challenged=prove)
    assert (code, "another cluster key (--cluster-key, BATON_CLUSTER_KEY)" in details) == (
        S.PERMISSION_DENIED,
        True,
    )
    nothing_is_left(worker)
    assert worker.service.stats().refused_callers[port.kind] == {"PERMISSION_DENIED": 1}
    assert f"a {port.kind} at ipv4:127.0.0.1:" in caplog.text and "was refused" in caplog.text


@pytest.mark.parametrize("port", PORTS[-2:], ids=IDS[-2:])
async def test_replay_reflection_and_proofs_for_others(worker: LocalWorker, port: Port) -> None:
    """Each made with the right key, for another stream: its nonce, caller, kind or worker is another."""
    caller, greeted = greeting(port, KEY)
    heard: list[Message] = []

    def true_proof(challenge: Challenge) -> Message:
        heard.append(port.sends(proof=caller.prove(challenge)))
        return heard[0]

    async with grpc.aio.insecure_channel(worker.address) as channel:  # an honest stream, overheard
        call = port.call(channel)(None)
        await call.write(greeted)
        challenge = (await call.read()).challenge
        await call.write(true_proof(challenge))
    another = "prefill" if port.kind == "router" else "router"

    def proof_of(kind: Kind, name: str, incarnation: str) -> Callable[[Challenge], Message]:
        def make(challenge: Challenge) -> Message:
            author = Caller(ClusterKeys(KEY), kind, name, caller.greeting.nonce)
            theirs = Called(
                ClusterKeys(KEY), kind, incarnation or challenge.incarnation, author.greeting, challenge.nonce
            )
            return port.sends(proof=author.prove(theirs.challenge))

        return make

    attacks: dict[str, Callable[[Challenge], Message]] = {
        "replayed": lambda _: heard[0],
        "reflected": lambda challenge: port.sends(proof=Proof(proof=challenge.proof)),
        "of another kind": proof_of(another, "stranger", ""),  # type: ignore[arg-type]
        "of another caller": proof_of(port.kind, "another", ""),
        "to another worker": proof_of(port.kind, "stranger", "another"),
        "empty": lambda _: port.sends(proof=Proof()),
    }
    for attack, challenged in attacks.items():
        code, details = await refusal(port, worker.address, greeted, port.wanted, challenged=challenged)
        assert (code, details[:6]) == (S.PERMISSION_DENIED, "proof:"), attack
    assert proof_of(port.kind, "stranger", "")(challenge) == heard[0], "what they are made of is right"
    nothing_is_left(worker)


@pytest.mark.parametrize("port", PORTS[-2:], ids=IDS[-2:])
async def test_fields_of_a_greeting_are_bounded(
    worker: LocalWorker, port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    for broken, says in (
        (
            Greeting(name="a\nb", nonce=b"n" * 32),
            "greeting.name: must be 1 to 128 visible ASCII characters, not 'a\\nb'",
        ),
        (Greeting(name="x" * 129, nonce=b"n" * 32), "greeting.name: must be 1 to 128 visible ASCII"),
        (Greeting(nonce=b"n" * 32), "greeting.name: "),
        (Greeting(name="r", nonce=b"n" * 31), "greeting.nonce: must be 32 bytes, not 31"),
        (Greeting(name="x" * 5000, nonce=b"n" * 32), "a message of a greeting has 5"),
    ):
        code, details = await refusal(port, worker.address, port.sends(greeting=broken))
        assert (code, details[: len(says)]) == (S.INVALID_ARGUMENT, says)
    _, greeted = greeting(port, KEY)
    long = port.sends(proof=Proof(proof=b"p" * 5000))
    code, details = await refusal(port, worker.address, greeted, long)
    assert code is S.INVALID_ARGUMENT and "at most 512 are allowed" in details
    assert all("\n" not in record.getMessage() for record in caplog.records)
    nothing_is_left(worker)


@pytest.mark.parametrize("port", PORTS[-2:], ids=IDS[-2:])
async def test_a_greeting_that_never_ends(
    worker: LocalWorker, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    for door in (worker.service._entrance, worker.decode._entrance):
        monkeypatch.setattr(door, "_greeting_s", 0.2)
    _, greeted = greeting(port, KEY)
    for sent in ([], [greeted]):
        code, details = await refusal(port, worker.address, *sent)
        assert (code, details) == (S.DEADLINE_EXCEEDED, "the greeting took longer than 0.2 s")
    nothing_is_left(worker)


@pytest.mark.parametrize("port", PORTS[-2:], ids=IDS[-2:])
async def test_streams_that_have_proved_nothing_are_few(worker: LocalWorker, port: Port) -> None:
    """Those of another address are not kept out by them, and places come free again."""
    door = worker.service._entrance if port.kind == "router" else worker.decode._entrance
    channels = [
        grpc.aio.insecure_channel(worker.address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(2)
    ]
    calls = [port.call(channels[number % 2])(None) for number in range(entrance.MAX_UNPROVED_FROM_ONE)]
    try:
        for call in calls:
            await call.write(greeting(port)[1])
        await until(lambda: door.unproved == entrance.MAX_UNPROVED_FROM_ONE)
        code, details = await refusal(port, worker.address, greeting(port)[1])
        assert (code, "at most 32 from one address" in details) == (S.RESOURCE_EXHAUSTED, True)
        with door._places.one_for("ipv4:10.0.0.9:1"):
            pass
    finally:
        for call in calls:
            call.cancel()
        for channel in channels:
            await channel.close(None)
    await until(lambda: not door.unproved)
    nothing_is_left(worker)


async def test_a_stranger_does_not_end_the_stream_of_the_router_it_names() -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.01), LocalWorker("decode", step_s=0.01)
    async with local_ring([prefill, decode]) as ring:
        await until(lambda: decode.decode.open_links)
        [router_id] = decode.routers._streams
        [link] = decode.decode._peers
        asked = [asyncio.create_task(answer(ring, f"r{n}", [*PROMPT, n], 30)) for n in range(4)]
        await until(lambda: decode.held)
        before = dict(decode.routers._streams), decode.decode.counters.fences
        for _ in range(10):
            for port, name in ((PORTS[3], router_id), (PORTS[4], link.prefill)):
                _, greeted = greeting(port, OTHER_KEY, name)
                forged = lambda challenge, port=port: port.sends(proof=Proof(proof=challenge.proof))  # noqa: E731
                code, _ = await refusal(port, decode.address, greeted, port.wanted, challenged=forged)
                assert code is S.PERMISSION_DENIED
        assert (decode.routers._streams, decode.decode.counters.fences) == before
        assert list(decode.decode._peers) == [link]
        assert [len(tokens) for tokens in await asyncio.gather(*asked)] == [30] * 4
        assert not prefill.decode.counters.fences and decode.decode.counters.committed == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"prefill_incarnation": "another"},
            "prefill_incarnation: must be the name that this prefill has greeted by",
        ),
        ({"prefill_address": "10.0.0.1:9\nbaton_up 1"}, "prefill_address: must be 1 to 128 visible ASCII"),
        ({"prefill_address": "x" * 100_000}, "prefill_address: must be 1 to 128 visible ASCII"),
        ({"prefill_address": "nowhere"}, "prefill_address: 'nowhere' is not an address"),
        ({"decode_incarnation": ""}, "decode_incarnation: must be"),
        ({"connectors": ["t\ncp"]}, "connectors: must be"),
        ({"connectors": ["tcp"] * 17}, "connectors: at most 16 are allowed, not 17"),
        ({"ranks": [handoff_pb2.KVShard()] * 5000}, "ranks: at most 4096 are allowed, not 5000"),
        (
            {"compatibility": handoff_pb2.Compatibility(model="m" * 200)},
            "compatibility.model: must be at most 128",
        ),
    ],
)
async def test_what_a_link_says_of_itself_is_bounded(
    worker: LocalWorker, change: dict[str, object], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that has the key: a name that is not its own is refused, and none is repeated in a log."""
    fields = {
        "prefill_incarnation": "p",
        "decode_incarnation": worker.incarnation,
        "prefill_address": "127.0.0.1:1",
        "connectors": ["tcp"],
        **change,
    }
    opened = handoff_pb2.LinkOpen(**fields)  # type: ignore[arg-type]
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call = handoff_pb2_grpc.HandoffStub(channel).Link(None)
        await greet_decode(call, KEY, "p")
        await call.write(handoff_pb2.PrefillMessage(open=opened))
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            await call.read()
    nothing_is_left(worker)
    assert len(caplog.text) < 4096


async def bare(worker: LocalWorker, channels: list[grpc.aio.Channel], router_id: str = "bare") -> RouterCall:
    """The stream of a router that has proved who it is."""
    channels.append(grpc.aio.insecure_channel(worker.address))
    call = pb_grpc.WorkerStub(channels[-1]).Connect(None)
    await greet_worker(call, KEY, router_id)
    return call


@pytest.fixture
async def channels() -> AsyncIterator[list[grpc.aio.Channel]]:
    made: list[grpc.aio.Channel] = []
    yield made
    for channel in made:
        await channel.close(None)


async def error_of(call: RouterCall) -> pb.TokenDelta:
    while isinstance(message := await asyncio.wait_for(call.read(), 5), pb.WorkerMessage):
        for delta in message.frame.deltas:
            if delta.error:
                return delta
    raise AssertionError("the stream has ended")


async def answered(call: RouterCall, request_id: str) -> None:
    """Wait for a token of a request, which may be over before anyone looks at the engine."""
    while isinstance(message := await asyncio.wait_for(call.read(), 5), pb.WorkerMessage):
        if any(delta.request_id == request_id and delta.token_ids for delta in message.frame.deltas):
            return
    raise AssertionError("the stream has ended")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"request_id": "a\nb"}, "request_id: must be 1 to 128 visible ASCII characters, not 'a\\nb'"),
        ({"request_id": "x" * 100_000}, "request_id: must be 1 to 128 visible ASCII characters, not 100000"),
        ({"cache_salt": b"s" * 65}, "cache_salt: must have at most 64 bytes, not 65"),
        ({"forks": [pb.Fork(request_id="a b")]}, "forks.request_id: must be"),
    ],
)
async def test_names_of_requests_are_bounded(
    worker: LocalWorker, channels: list[grpc.aio.Channel], change: dict[str, object], says: str
) -> None:
    call = await bare(worker, channels)
    submit = pb.Submit(**{"request_id": "r", "prompt_ids": PROMPT, "params": PARAMS.to_proto(), **change})  # type: ignore[arg-type]
    await call.write(pb.RouterMessage(submit=submit))
    assert (await error_of(call)).error.startswith(says)
    buried = worker.prefill._machine._tombstones._ended
    await call.write(pb.RouterMessage(cancel=pb.Cancel(request_id="y" * 100_000)))
    await call.write(pb.RouterMessage(cancel=pb.Cancel(request_id="known")))
    await until(lambda: "known" in buried)
    assert list(buried) == ["known"], "what is no name is not remembered"


async def test_requests_of_one_router_are_bounded_and_others_may_submit(
    worker: LocalWorker, channels: list[grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_SUBMITS", 3)
    greedy, modest = await bare(worker, channels, "greedy"), await bare(worker, channels, "modest")
    params = ResolvedSampling(max_tokens=200, temperature=0.0, ignore_eos=True).to_proto()
    for number in range(4):
        submit = pb.Submit(request_id=f"g{number}", prompt_ids=PROMPT, params=params)
        await greedy.write(pb.RouterMessage(submit=submit))
    refused = await error_of(greedy)
    assert (refused.request_id, refused.refused) == ("g3", True)
    assert refused.error == "3 requests of this router are here, as many as are allowed"
    await modest.write(pb.RouterMessage(submit=pb.Submit(request_id="m", prompt_ids=PROMPT, params=params)))
    await until(lambda: worker.engine.has_any_of("modest"))


async def test_a_router_ends_no_request_of_another_router(
    worker: LocalWorker, channels: list[grpc.aio.Channel]
) -> None:
    owner, other = await bare(worker, channels, "owner"), await bare(worker, channels, "other")
    params = ResolvedSampling(max_tokens=200, temperature=0.0, ignore_eos=True).to_proto()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a link that is never made
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        target = pb.DecodeTarget(handoff_address=address, incarnation="nobody")
        submits = [
            pb.Submit(
                request_id="here", prompt_ids=PROMPT, params=params, forks=[pb.Fork(request_id="fork")]
            ),
            pb.Submit(request_id="on-its-way", prompt_ids=PROMPT, params=params, decode=target),
        ]
        for submit in submits:
            await owner.write(pb.RouterMessage(submit=submit))
        await until(lambda: worker.engine.owner_of("fork") and worker.prefill.open_requests)
        for call in (other, owner):
            for name in ("here", "on-its-way"):
                cancel = pb.Cancel(request_id=name, fork_ids=["fork"] if name == "here" else [])
                await call.write(pb.RouterMessage(cancel=cancel))
            marker = "behind-the-owner" if call is owner else "behind-the-other"
            await call.write(pb.RouterMessage(cancel=pb.Cancel(request_id=marker)))
            await until(lambda: marker in worker.prefill._machine._tombstones._ended)  # noqa: B023
            ends = call is owner
            assert (worker.engine.owner_of("here") is None) == ends
            assert (worker.engine.owner_of("fork") is None) == ends
            assert (worker.prefill.open_requests == 0) == ends


async def test_a_handoff_is_cancelled_by_its_own_router_alone() -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.02), LocalWorker("decode", step_s=0.02)
    async with local_ring([prefill, decode]) as ring:
        asked = asyncio.create_task(answer(ring, "r", PROMPT, 40))
        await until(lambda: decode.engine.owner_of("r") or decode.decode.owner_of("r"))
        cancel = pb.RouterMessage(cancel=pb.Cancel(request_id="r", attempt=9))
        for worker in (prefill, decode):
            worker.service._take("another", cancel)
        assert len(await asked) == 40
        assert prefill.engine.generated_tokens + decode.engine.generated_tokens == 40, "in one attempt"


async def proved(worker: LocalWorker, name: str, *sent: Message) -> tuple[S, str]:
    """How the stream of a caller ends that has proved to be ``name``, and goes on with this."""
    caller, greeted = greeting(PORTS[3], KEY, name)
    return await refusal(
        PORTS[3],
        worker.address,
        greeted,
        *sent,
        challenged=lambda challenge: pb.RouterMessage(proof=caller.prove(challenge)),
    )


async def test_routers_are_bounded(
    worker: LocalWorker, channels: list[grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "MAX_ROUTERS", 2)
    for name in ("a", "b", "a"):  # the last one calls again
        await bare(worker, channels, name)
    code, details = await proved(worker, "c", pb.RouterMessage(hello=pb.RouterHello(router_id="c")))
    assert code is S.RESOURCE_EXHAUSTED and "routers are connected" in details
    assert set(worker.routers._streams) == {"a", "b"}


async def test_a_router_under_another_name_than_it_greeted_by(worker: LocalWorker) -> None:
    code, details = await proved(worker, "honest", pb.RouterMessage(hello=pb.RouterHello(router_id="victim")))
    assert code is S.PERMISSION_DENIED
    assert details == "router_id: must be the name that this router has greeted by"
    assert worker.service.stats().refused_callers["router"] == {"PERMISSION_DENIED": 1}
    code, details = await proved(worker, "honest", SUBMIT)
    assert (code, details) == (S.INVALID_ARGUMENT, "the message after the greeting must be RouterHello")
    nothing_is_left(worker)


async def test_peers_that_cannot_be_are_left_out(
    worker: LocalWorker, channels: list[grpc.aio.Channel]
) -> None:
    call = await bare(worker, channels)
    peers = [("127.0.0.1:1", "d" * 129), ("127.0.0.1\n:1", "d"), ("nowhere", "d"), ("127.0.0.1:9", "right")]
    told = [pb.DecodePeer(handoff_address=address, incarnation=name) for address, name in peers]
    await call.write(pb.RouterMessage(peers=pb.DecodePeers(peers=told)))
    known = worker.prefill.links._known
    await until(lambda: known.by_incarnation())
    assert list(known.by_incarnation()) == ["right"]


async def test_a_worker_with_another_key_is_no_worker_and_the_router_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other, ours = LocalWorker("both", keys=ClusterKeys(OTHER_KEY)), LocalWorker("both")
    await other.start()
    try:
        async with local_ring([ours], policy=RetryPolicy(max_attempts=1)) as ring:
            caplog.set_level(logging.WARNING)
            stranger = WorkerClient(other.address, "r", ring, keys=ClusterKeys(KEY))
            calling = asyncio.create_task(stranger.run())
            await asyncio.sleep(1.0)
            assert not stranger.ready and not other.routers._streams
            told = [
                r
                for r in caplog.records
                if other.address in r.getMessage() and r.name == "baton.router.fleet.worker_client"
            ]
            assert [r.getMessage().partition(": ")[2] for r in told] == [
                "it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)"
            ]
            calling.cancel()
            assert len(await answer(ring, "r", PROMPT, 5)) == 5
    finally:
        await other.stop()


NEW = ClusterKeys(b"the key that comes after", KEY)


@pytest.mark.parametrize("router", [KEYS, NEW], ids=["old router", "new router"])
@pytest.mark.parametrize("prefill", [KEYS, NEW], ids=["old prefill", "new prefill"])
@pytest.mark.parametrize("decode", [KEYS, NEW], ids=["old decode", "new decode"])
async def test_two_generations_serve_together_while_the_key_is_replaced(
    router: ClusterKeys, prefill: ClusterKeys, decode: ClusterKeys
) -> None:
    """Greetings, handles, the link, heartbeats, a change of role. The old generation knows one key only."""
    workers = LocalWorker("prefill", keys=prefill), LocalWorker("decode", keys=decode)
    async with local_ring(workers, policy=RetryPolicy(max_attempts=1), keys=router) as ring:
        assert len(await answer(ring, "r", PROMPT, 5)) == 5
        assert workers[1].decode.counters.committed == 1
        await asyncio.to_thread(ring.beats.send)
        await until(lambda: all(beats_heard(worker) == 1 for worker in workers))
        ring.beats.rest()
        await switch_role(workers[0].address, "both", router)


def beats_heard(worker: LocalWorker) -> float | None:
    return worker.registry.get_sample_value("baton_router_beats_total", {"result": "heard"})


async def test_the_key_before_is_worth_nothing_once_it_is_left_out() -> None:
    worker = LocalWorker("both", keys=ClusterKeys(NEW.current))
    await worker.start()
    with pytest.raises(SwitchError, match="another cluster key"):
        await switch_role(worker.address, "decode", KEYS)
    await worker.stop()


async def test_prefill_sends_nothing_to_a_decode_worker_with_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode", keys=ClusterKeys(OTHER_KEY))
    async with local_ring([prefill, LocalWorker("decode")]) as ring:
        await decode.start()
        try:
            peer = pb.DecodePeer(handoff_address=decode.address, incarnation=decode.incarnation)
            target = pb.DecodeTarget(handoff_address=decode.address, incarnation=decode.incarnation)
            submit = pb.Submit(request_id="r", prompt_ids=PROMPT, params=PARAMS.to_proto(), decode=target)
            [router_id] = prefill.routers._streams
            heard: list[pb.TokenDelta] = []
            monkeypatch.setattr(prefill.routers._streams[router_id], "deliver", heard.append)
            prefill.service._take(router_id, pb.RouterMessage(peers=pb.DecodePeers(peers=[peer])))
            prefill.service._take(router_id, pb.RouterMessage(submit=submit))
            await until(lambda: heard)
            assert heard[0].refused and "cannot be reached" in heard[0].error
            assert decode.decode.open_links == 0 and not prefill.prefill.links._open.get(decode.incarnation)
        finally:
            await decode.stop()
        del ring


async def test_releases_before_there_were_greetings_are_refused_by_name() -> None:
    class Older(pb_grpc.WorkerServicer):
        async def Connect(  # noqa: N802 (the name is the contract's)
            self, request_iterator: AsyncIterator[pb.RouterMessage], context: object
        ) -> AsyncIterator[pb.WorkerMessage]:
            yield pb.WorkerMessage(
                hello=pb.WorkerHello(role=pb.ROLE_BOTH, incarnation="w", max_model_len=256)
            )
            async for _ in request_iterator:
                pass

        async def SwitchRole(  # noqa: N802
            self, request: pb.SwitchRoleRequest, context: object
        ) -> pb.SwitchRoleReply:
            raise NotImplementedError

    server = grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(Older(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with pytest.raises(SwitchError, match="no challenge: is it of an older release"):
        await switch_role(address, "decode", ClusterKeys(KEY))
    await server.stop(None)


async def test_asking_who_is_here_makes_no_router_and_no_noise(
    worker: LocalWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SwitchError, match="another cluster key"):
        await switch_role(worker.address, "decode", ClusterKeys(OTHER_KEY))
    await switch_role(worker.address, "both", ClusterKeys(KEY))
    await until(lambda: not worker.service._entrance.unproved)
    assert not worker.routers._streams and "refused" not in caplog.text
    assert worker.service.stats().refused_callers["router"] == {}


async def test_without_a_key_roles_stay() -> None:
    worker = LocalWorker("decode", keys=ClusterKeys())
    await worker.start()
    with pytest.raises(SwitchError, match="this worker has no cluster key") as refused:
        await switch_role(worker.address, "prefill", ClusterKeys())
    assert refused.value.status is S.PERMISSION_DENIED
    await worker.stop()


# --- what is open to everybody


async def test_probes_need_no_key_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_OPEN_FROM_ONE", 3)
    worker = LocalWorker("both")
    await worker.start()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        one_more = health.Watch(health_pb2.HealthCheckRequest())
        assert await one_more.code() is S.RESOURCE_EXHAUSTED
        for _ in range(10):  # they have places of their own
            assert (await health.Check(health_pb2.HealthCheckRequest())).status
        with pytest.raises(grpc.aio.AioRpcError, match="at most 4096 are allowed"):
            await health.Check(health_pb2.HealthCheckRequest(service="x" * 5000))
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service="x"))
        assert unknown.value.code() is S.NOT_FOUND
        for watch in watches:
            watch.cancel()
    await worker.stop()


# --- long messages


def submit_of(num_bytes: int) -> pb.RouterMessage:
    """A request that is refused when it is here, as its salt is too long."""
    submit = pb.Submit(
        request_id="r", prompt_ids=PROMPT, params=PARAMS.to_proto(), cache_salt=bytes(num_bytes)
    )
    return pb.RouterMessage(submit=submit)


async def in_pieces(call: RouterCall, message: pb.RouterMessage) -> None:
    for part in in_parts(message):
        await call.write(pb.RouterMessage.FromString(part))


async def end_of(call: RouterCall | LinkCall) -> tuple[S, str]:
    """How the worker ends a stream."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with asyncio.timeout(10):
            while isinstance(await call.read(), Message):
                pass
    return refused.value.code(), refused.value.details() or ""


@pytest.mark.parametrize("port", [PORTS[0], PORTS[4]], ids=["router", "prefill"])
async def test_no_message_of_a_stranger_is_longer_than_a_part(worker: LocalWorker, port: Port) -> None:
    """It is refused by its length, before it is here."""
    _, greeted = greeting(port, OTHER_KEY, "x" * (MAX_WHOLE_BYTES + 1))
    code, details = await refusal(port, worker.address, greeted)
    assert code is S.RESOURCE_EXHAUSTED and f"vs. {MAX_WHOLE_BYTES}" in details
    nothing_is_left(worker)


@pytest.mark.parametrize("port", [PORTS[0], PORTS[4]], ids=["router", "prefill"])
async def test_a_stranger_sends_no_parts(worker: LocalWorker, port: Port) -> None:
    """Neither first nor in place of its proof, and what it sends is not waited for."""
    _, greeted = greeting(port, KEY)
    part = port.sends(part=MessagePart(data=greeted.SerializeToString(), last=True))
    code, details = await refusal(port, worker.address, part)
    assert code is S.UNAUTHENTICATED and "must be a Greeting" in details
    code, details = await refusal(port, worker.address, greeted, challenged=lambda _: part)
    assert (code, details) == (S.UNAUTHENTICATED, "the second message must be a Proof")
    nothing_is_left(worker)


async def test_a_router_sends_more_in_parts_than_goes_whole(
    worker: LocalWorker, channels: list[grpc.aio.Channel]
) -> None:
    call = await bare(worker, channels)
    await in_pieces(call, submit_of(1 << 20))
    assert (await error_of(call)).error == f"cache_salt: must have at most 64 bytes, not {1 << 20}"
    await in_pieces(call, SUBMIT)
    await answered(call, "r")


async def test_no_message_is_longer_than_the_longest_request(
    worker: LocalWorker, channels: list[grpc.aio.Channel]
) -> None:
    """Neither whole nor in parts."""
    most = max_message(256)
    for sends, says in (
        (lambda call: call.write(submit_of(MAX_WHOLE_BYTES)), f"vs. {MAX_WHOLE_BYTES}"),
        (lambda call: in_pieces(call, submit_of(most)), f"at most {most} are allowed"),
    ):
        call = await bare(worker, channels)
        sending = asyncio.create_task(sends(call))
        code, details = await end_of(call)
        assert code is S.RESOURCE_EXHAUSTED and says in details
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: not worker.routers._streams)


async def test_parts_that_make_no_message_end_their_stream(
    worker: LocalWorker, channels: list[grpc.aio.Channel]
) -> None:
    part = pb.RouterMessage(part=MessagePart(data=b"\x0a\xff"))
    broken = pb.RouterMessage(part=MessagePart(last=True))
    beat = pb.RouterMessage(heartbeat=pb.RouterHeartbeat())
    for second, says in ((beat, "must come before heartbeat"), (broken, "cannot be read: Error parsing")):
        call = await bare(worker, channels)
        await call.write(part)
        await call.write(second)
        code, details = await end_of(call)
        assert code is S.INVALID_ARGUMENT and says in details
        await until(lambda: not worker.routers._streams)


async def test_a_links_parts_are_bounded_and_ordered(
    worker: LocalWorker, channels: list[grpc.aio.Channel]
) -> None:
    beat = handoff_pb2.PrefillMessage(heartbeat=handoff_pb2.Heartbeat())
    part = handoff_pb2.PrefillMessage(part=MessagePart(data=bytes(PIECE_BYTES)))
    opened = handoff_pb2.LinkOpen(prefill_incarnation="p", decode_incarnation=worker.incarnation)
    opened.compatibility.CopyFrom(worker.wiring.compatibility)
    opened.prefill_address, opened.connectors[:] = "127.0.0.1:1", ["tcp"]
    count = max_message(256) // PIECE_BYTES + 1
    for sent, expected in (([part, beat], S.INVALID_ARGUMENT), ([part] * count, S.RESOURCE_EXHAUSTED)):
        channels.append(grpc.aio.insecure_channel(worker.address))
        call = handoff_pb2_grpc.HandoffStub(channels[-1]).Link(None)
        await greet_decode(call, KEY, "p")
        await call.write(handoff_pb2.PrefillMessage(open=opened))
        answer = await call.read()
        assert isinstance(answer, handoff_pb2.DecodeMessage) and answer.HasField("accept"), answer
        for message in sent:
            await call.write(message)
        code, details = await end_of(call)
        assert code is expected and "The message cannot be read: part: " in details


async def test_nothing_is_left_of_a_message_whose_last_part_never_comes(
    worker: LocalWorker, channels: list[grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a turn of the garbage collector."""
    made: list[weakref.ref[Joiner[pb.RouterMessage]]] = []

    class WatchedJoiner(Joiner[pb.RouterMessage]):
        def __init__(self, kind: type[pb.RouterMessage], most: int, unjoined: int) -> None:
            super().__init__(kind, most, unjoined)
            made.append(weakref.ref(self))

    monkeypatch.setattr(server, "Joiner", WatchedJoiner)
    call = await bare(worker, channels)
    await call.write(pb.RouterMessage(part=MessagePart(data=bytes(PIECE_BYTES))))
    await until(lambda: (joiner := made[-1]()) is not None and joiner._begun)
    gc.disable()
    try:
        call.cancel()
        await until(lambda: made[-1]() is None)
    finally:
        gc.enable()


def test_epochs_are_remembered_for_no_link() -> None:
    """However many have come: the machine of decode is as small as before."""
    machine = DecodeHandoffs("d", room=None, drained_is_proof=True)  # type: ignore[arg-type]
    before = {name: len(value) for name, value in vars(machine).items() if isinstance(value, dict)}
    links: list[LinkId] = []
    for number in range(1000):
        link = machine.open_link(f"p{number % 3}")
        assert link is not None and link not in links
        links.append(link)
        machine.link_lost(link, 0.0)
        machine.link_fenced(link, 0.0)
    assert {name: len(value) for name, value in vars(machine).items() if isinstance(value, dict)} == before
