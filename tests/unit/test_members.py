"""Workers that come, go, differ and fail, behind a router's ring: real services over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc
import pytest
from prometheus_client import CollectorRegistry

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import MalformedGreetingError
from baton.handoff.identity import compatibility_digest
from baton.net.heartbeat import TICK_S
from baton.router.discovery.endpoint import Discovery, Endpoint
from baton.router.discovery.kubernetes import KubernetesDiscovery
from baton.router.discovery.pace import WatchTimings
from baton.router.discovery.static import StaticDiscovery
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import RingError
from baton.router.fleet.compatibility import by_group, check_hello, pairings, unpaired
from baton.router.fleet.members import BEATS_AT_ONCE, Members
from baton.router.fleet.outliers import EjectionRules
from baton.router.fleet.worker_client import WorkerClient
from baton.telemetry.discovery import DiscoveryCounts
from baton.v1 import handoff_pb2, inference_pb2
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from tests.support.deep import all_deep_but
from tests.support.discovery_scripts import greeted
from tests.support.fake_kubernetes import PORT_NAME, FakeKubernetes, pod, serving
from tests.support.greetings import say_hello
from tests.support.local_worker import KEY, LocalWorker, answer, local_ring, until

PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40]
FACTOR = 5.0


def put(server: FakeKubernetes, name: str, worker: LocalWorker, **conditions: bool) -> None:
    """A slice with one worker, which listens where this machine let it."""
    host, port = worker.address.split(":")
    server.put(
        name, [pod(host, name, **conditions)], worker.role, ports=[{"name": PORT_NAME, "port": int(port)}]
    )


def discovery(server: FakeKubernetes) -> Discovery:
    return KubernetesDiscovery(
        server.api(), PORT_NAME, DiscoveryCounts(CollectorRegistry()), WatchTimings().faster(FACTOR)
    )


def served_by(workers: list[LocalWorker]) -> list[int]:
    return [worker.engine.generated_tokens for worker in workers]


class BriefClient(WorkerClient):
    """Its stream ends when it is told to, and in the very moment something else is to happen."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "router", watcher=None)  # type: ignore[arg-type]
        self.ends = asyncio.Event()
        self.then: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        return False

    async def run(self) -> None:
        await self.ends.wait()
        asyncio.get_running_loop().call_soon(self.then)


async def test_a_worker_that_is_back_as_its_stream_ends_is_dialled_again() -> None:
    made: list[BriefClient] = []

    def make(address: str) -> WorkerClient:
        made.append(BriefClient(address))
        return made[-1]

    members, back = Members(make), [Endpoint(address="127.0.0.1:1", uid="a")]
    members.set(back)
    members.start()
    members.set([])
    [leaving] = made
    leaving.then = lambda: members.set(back)
    leaving.ends.set()
    await until(lambda: len(made) == 2)
    assert members.workers == made[1:]
    await members.close()


@pytest.mark.parametrize("how", all_deep_but(1, ["deleted", "terminating", "not ready"]))
async def test_a_worker_that_goes_finishes_its_stream_and_gets_nothing_new(how: str) -> None:
    server = FakeKubernetes(FACTOR)
    workers = [LocalWorker("both", step_s=0.03), LocalWorker("both")]

    def known() -> Discovery:
        put(server, "a", workers[0])
        return discovery(server)

    async with serving(server), local_ring(workers[:1], discovery=known) as ring:
        long = asyncio.create_task(answer(ring, "long", PROMPT, 60))
        await until(lambda: workers[0].engine.generated_tokens)
        await workers[1].start()
        try:
            put(server, "b", workers[1])
            await until(lambda: sum(w.ready for w in ring.fleet.workers) == 2)
            if how == "deleted":
                server.delete("a")
            else:
                conditions = {"terminating": True} if how == "terminating" else {"ready": False}
                put(server, "a", workers[0], **conditions)
            await until(lambda: len(ring.fleet.members.available(time.monotonic())) == 1)
            for number in range(5):
                await answer(ring, f"new{number}", PROMPT, 4)
            assert served_by(workers[1:]) == [20]
            assert len(await long) == 60
            known_or_needed = 1 if how == "deleted" else 2
            await until(lambda: len(ring.fleet.workers) == known_or_needed)
        finally:
            await workers[1].stop()


async def test_a_worker_that_is_gone_is_not_dialled_again() -> None:
    server = FakeKubernetes(FACTOR)
    worker = LocalWorker("both")

    def known() -> Discovery:
        put(server, "a", worker)
        return discovery(server)

    async with serving(server), local_ring([worker], discovery=known) as ring:
        server.delete("a")
        await until(lambda: not ring.fleet.workers)
        assert not ring.ready
        put(server, "a", worker)
        await until(lambda: ring.ready)
        assert len(await answer(ring, "r", PROMPT, 4)) == 4


async def test_a_worker_that_comes_back_keeps_its_stream_and_what_is_open_there() -> None:
    """A second stream of the same router would end the first, and an answer that nothing is wrong with."""
    worker = LocalWorker("both", step_s=0.01)
    async with local_ring([worker]) as ring:
        [client], [endpoint] = ring.fleet.workers, ring.fleet.discovery.known
        long = asyncio.create_task(answer(ring, "long", PROMPT, 60))
        await until(lambda: worker.engine.generated_tokens)
        ring.fleet.members.set([])
        assert client.retired and ring.fleet.workers == [client] and not ring.ready
        ring.fleet.members.set([endpoint])
        assert ring.fleet.workers == [client] and ring.ready
        assert len(await long) == 60
        assert worker.engine.generated_tokens == 60, "nothing was computed twice"
        assert len(await answer(ring, "next", PROMPT, 4)) == 4


async def test_what_a_worker_held_is_forgotten_with_it() -> None:
    worker = LocalWorker("both")
    async with local_ring([worker]) as ring:
        await answer(ring, "r", PROMPT, 4)
        await until(lambda: ring.fleet.placer._prefixes.cached([*PROMPT, 0]))
        ring.fleet.members.set([])
        await until(lambda: not ring.fleet.workers)
        assert not ring.fleet._at and not ring.fleet.placer._prefixes.cached([*PROMPT, 0])


async def test_a_role_of_another_release_is_no_worker_and_hurts_no_other() -> None:
    class Newer(pb_grpc.WorkerServicer):
        async def Connect(  # noqa: N802 (the name is the contract's)
            self, request_iterator: AsyncIterator[pb.RouterMessage], context: object
        ) -> AsyncIterator[pb.WorkerMessage]:
            hello = pb.WorkerHello(role=pb.ROLE_UNSPECIFIED, max_model_len=256)
            async for said in say_hello(request_iterator, KEY, hello):
                yield said
            async for _ in request_iterator:
                pass

        async def SwitchRole(  # noqa: N802
            self, request: pb.SwitchRoleRequest, context: object
        ) -> pb.SwitchRoleReply:
            raise NotImplementedError

    server = grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(Newer(), server)
    newer = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    ring = WorkerRing([newer], "fake", ClusterKeys(KEY))
    ring.start()
    await asyncio.sleep(0.3)
    assert not ring.ready and not any(worker.ready for worker in ring.fleet.workers)
    await ring.close()
    await server.stop(None)


async def test_a_pod_at_the_address_of_another_is_another_worker() -> None:
    ring = WorkerRing(["10.0.0.1:9"], "fake", ClusterKeys(b""))
    [before] = ring.fleet.workers
    [endpoint] = ring.fleet.discovery.known
    ring.fleet.members.set([endpoint])
    assert ring.fleet.workers == [before]
    ring.fleet.members.set([type(endpoint)(address=endpoint.address, uid="new")])
    assert ring.fleet.workers != [before] and before.retired


# --- hundreds of them


def fleet(count: int) -> WorkerRing:
    """Prefill and decode workers in turns."""
    ring = WorkerRing([f"10.0.0.{number}:9" for number in range(count)], "fake", ClusterKeys(b"key"))
    for number, worker in enumerate(ring.fleet.workers):
        role = pb.ROLE_DECODE if number % 2 else pb.ROLE_PREFILL
        worker.hello = pb.WorkerHello(role=role, handoff_address=worker.address, max_model_len=64)
        ring.on_ready(worker)
        ring.on_change(worker)
    return ring


def told(worker: WorkerClient) -> list[pb.RouterMessage]:
    return [worker._outbound.get_nowait() or pb.RouterMessage() for _ in range(worker._outbound.qsize())]


async def test_what_ends_a_worker_s_requests_is_in_its_report_at_once() -> None:
    """Reports are kept until there is news, and requests are placed by them."""
    ring = fleet(2)
    [first, _] = ring.fleet.workers
    hello = first.hello

    def accepts() -> bool:
        assert (first in ring.fleet.members.available(0.0)) is first.usable
        return first.report().accepts

    for stop, go_on in (
        (partial(first.admit, False), partial(first.admit, True)),
        (partial(first.retire), partial(first.retire, False)),
        (partial(first.take_load, pb.Load(draining=True)), partial(first.take_load, pb.Load())),
        (partial(setattr, first, "hello", None), partial(setattr, first, "hello", hello)),
    ):
        assert accepts()
        stop()
        assert not accepts()
        go_on()
    assert accepts()


async def test_those_that_come_at_once_hear_of_each_other_once() -> None:
    """To tell all of all at each one's coming would take seconds for hundreds."""
    ring = fleet(40)
    prefills, decodes = ring.fleet.workers[::2], ring.fleet.workers[1::2]
    assert not any(map(told, prefills))
    ring._tick(TICK_S)
    for worker in prefills:
        [message] = told(worker)
        assert [peer.handoff_address for peer in message.peers.peers] == [w.address for w in decodes]
    ring._tick(TICK_S)
    assert not any(map(told, ring.fleet.workers)), "nothing is new to prefill, and nothing concerns decode"
    decodes[0].hello = None
    ring.on_lost(decodes[0])
    ring._tick(TICK_S)
    assert [[len(message.peers.peers) for message in told(worker)] for worker in prefills] == [[19]] * 20


async def test_heartbeats_are_spread_over_the_time_of_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: dict[object, float] = {}

    def call_later(delay: float, beat: object) -> None:
        delays[beat] = delay

    ring = fleet(40)
    for worker in ring.fleet.workers:
        monkeypatch.setattr(worker, "tick", lambda elapsed: True)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        ring.fleet.members.tick(TICK_S)
    assert len(delays) == 40, "each of them once"
    assert max(Counter(delays.values()).values()) == BEATS_AT_ONCE
    assert min(delays.values()) == 0 and TICK_S / 2 < max(delays.values()) < TICK_S


# --- groups


def hello(
    role: pb.Role.ValueType, model: str = "m", revision: str = "1", block_size: int = 16
) -> WorkerClient:
    worker = greeted("10.0.0.1:9")
    worker.hello = pb.WorkerHello(role=role, model=model, revision=revision, block_size=block_size)
    return worker


def test_groups_are_of_one_model_revision_and_terms() -> None:
    terms = handoff_pb2.Compatibility(protocol=1, model="m", kv_dtype="float32", block_size=16)
    digest = compatibility_digest(terms)
    terms.block_size = 32
    assert compatibility_digest(terms) == digest
    terms.kv_dtype = "bfloat16"
    assert compatibility_digest(terms) != digest
    old, new, other = (
        hello(pb.ROLE_PREFILL),
        hello(pb.ROLE_DECODE, revision="2"),
        hello(pb.ROLE_DECODE, model="n"),
    )
    silent = greeted("10.0.0.2:9")
    silent.hello = None
    assert list(by_group([old, new, other, silent]).values()) == [[old], [new], [other]]


def test_workers_that_convert_take_over_from_other_groups_too() -> None:
    exact, rounded = "1234", "5678"
    prefills = [hello(pb.ROLE_PREFILL), hello(pb.ROLE_PREFILL), hello(pb.ROLE_PREFILL, revision="2")]
    decodes = [hello(pb.ROLE_DECODE), hello(pb.ROLE_DECODE), hello(pb.ROLE_BOTH)]
    for worker, terms in zip([*prefills, *decodes], 3 * [exact, rounded], strict=True):
        assert worker.hello is not None
        worker.hello.compatibility = terms
    first = decodes[0].hello
    assert first is not None
    assert unpaired(prefills) == prefills
    assert unpaired([prefills[0], decodes[0]]) == [prefills[0]]
    first.converts.extend([exact, exact, rounded])
    assert unpaired([*prefills, *decodes]) == [prefills[2]], "another revision is another model"
    assert [(like, set(takers)) for like, takers in pairings([prefills[0], *decodes])] == [
        ([prefills[0], decodes[1]], {decodes[0], decodes[1]}),
        ([decodes[0], decodes[2]], {decodes[0]}),
    ]
    compared = prefills[0].hello
    assert compared is not None
    compared.verifies = True
    assert [(like, set(takers)) for like, takers in pairings([prefills[0], *decodes])][:2] == [
        ([decodes[1]], {decodes[0], decodes[1]}),
        ([prefills[0]], {decodes[1]}),
    ], "nobody converts what is compared"
    assert prefills[0].report().verifies
    assert decodes[0].report().takes_from == (" ".join(("m", "1", exact)),)
    first.incarnation = "d"
    check_hello(first)
    first.converts.extend(["x"] * 8)
    with pytest.raises(MalformedGreetingError, match="converts: at most 8 are allowed, not 11"):
        check_hello(first)


async def test_during_a_rollout_both_releases_serve_each_within_itself() -> None:
    old = [LocalWorker("prefill", tells_terms=True), LocalWorker("decode", tells_terms=True)]
    new = [
        LocalWorker("prefill", revision="2", tells_terms=True),
        LocalWorker("decode", revision="2", tells_terms=True),
    ]
    async with local_ring([*old, *new]) as ring:
        await until(lambda: all(worker.decode.open_links for worker in (old[1], new[1])))
        asked = (answer(ring, f"r{number}", [number, *PROMPT], 5) for number in range(8))
        assert [len(each) for each in await asyncio.gather(*asked)] == [5] * 8
        for prefill, decode in (old, new):
            assert prefill.engine.generated_tokens > 0
            assert decode.engine.generated_tokens == 4 * prefill.engine.generated_tokens
            assert decode.decode.open_links == 1, "only of its own release"


async def test_a_prefill_worker_of_another_release_is_not_paired_and_decode_serves_alone() -> None:
    workers = [
        LocalWorker("prefill", revision="2", tells_terms=True),
        LocalWorker("decode", tells_terms=True),
    ]
    async with local_ring(workers) as ring:
        assert len(await answer(ring, "r", PROMPT, 5)) == 5
        assert served_by(workers) == [0, 5]


# --- failing workers


class Failing(pb_grpc.WorkerServicer):
    """Answers each request with an error, and so looks faster than any other."""

    async def Connect(  # noqa: N802 (the name is the contract's)
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: object
    ) -> AsyncIterator[pb.WorkerMessage]:
        hello = pb.WorkerHello(role=pb.ROLE_BOTH, max_model_len=256, vocab_size=97)
        async for said in say_hello(request_iterator, KEY, hello):
            yield said
        async for message in request_iterator:
            if message.HasField("submit"):
                asked = message.submit
                error = pb.TokenDelta(
                    request_id=asked.request_id,
                    attempt=asked.attempt,
                    finish_reason=inference_pb2.FINISH_REASON_ERROR,
                    error="out of luck",
                )
                load = pb.Load(prefill_tokens_per_s=1e6, step_base_ms=0.001)
                yield pb.WorkerMessage(frame=pb.Frame(deltas=[error], load=load))

    async def SwitchRole(  # noqa: N802
        self, request: pb.SwitchRoleRequest, context: object
    ) -> pb.SwitchRoleReply:
        raise NotImplementedError


async def test_a_worker_that_fails_each_request_is_ejected_and_the_others_serve() -> None:
    server = grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(Failing(), server)
    bad = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    good = LocalWorker("both")

    def known() -> Discovery:
        return StaticDiscovery([bad, good.address])

    async with local_ring([good], discovery=known) as ring:
        await until(lambda: all(worker.ready for worker in ring.fleet.workers))
        failures = 0
        for number in range(40):
            try:
                await answer(ring, f"r{number}", [number, *PROMPT], 2)  # nowhere cached
            except RingError as error:
                assert "out of luck" in str(error)
                failures += 1
        assert failures == EjectionRules().failures
        assert [view.ejected for view in ring.fleet.loads() if view.address == bad] == [True]
        assert ring.fleet.members.ejections["failures"] == 1
    await server.stop(None)
