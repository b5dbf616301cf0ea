"""Routers and workers that drain, fall silent, come back or refuse: nobody's request is lost on the way."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import queue
import time
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry

from baton.core.role import Role
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.sequence import Sequence
from baton.greeting.cluster_key import ClusterKeys
from baton.handoff.decode import RETIRE_AFTER_S
from baton.handoff.messages import AbortReason, First
from baton.net.heartbeat import Tempo
from baton.process.ending import end_process_after
from baton.roles import prefill as role
from baton.roles.prefill_links import DecodePeer
from baton.router.dispatch.retries import Retries, RetryPolicy
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import RingError
from baton.router.fleet.worker_client import WorkerClient
from baton.router.placement.options import NoPrefill, PlacementOptions
from baton.telemetry.resumes import ResumeMetrics
from baton.transport.ranks.endpoint import LocalLink
from baton.transport.tcp import TcpSendingLink
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from baton.v1.handoff_pb2 import LinkOpen
from baton.worker import routers
from baton.worker.engine_loop import EngineLoop
from tests.support.fake_engine import fake_engine
from tests.support.greetings import greet_worker, say_hello
from tests.support.local_worker import KEY, LocalWorker, answer, local_ring, until

IDLE = Tempo(heartbeat_s=0.1, busy_silence_s=0.3, idle_silence_s=1.0)
BUSY = Tempo(heartbeat_s=0.1, busy_silence_s=0.3, idle_silence_s=60.0)
"""Only what is busy is found in time for a test."""
PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40]
TOKENS = 12


async def expected(prompt: list[int] = PROMPT, max_tokens: int = TOKENS) -> list[int]:
    """What one worker answers alone."""
    async with local_ring([LocalWorker("both")]) as ring:
        return await answer(ring, "alone", prompt, max_tokens)


# --- links


def connections_to(worker: LocalWorker) -> int:
    """Return how many TCP connections of this process lead to a worker's port."""
    port = int(worker.address.rpartition(":")[2])
    found = psutil.Process().net_connections(kind="tcp")
    return sum(bool(one.raddr) and one.raddr.port == port and one.status == "ESTABLISHED" for one in found)


@pytest.mark.parametrize("lost", ["the link", "the stream"])
async def test_a_stream_that_has_ended_leaves_no_connection(lost: str) -> None:
    """Without a turn of the garbage collector, on prefill's side or the router's."""
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        links = prefill.prefill.links
        (client,) = (each for each in ring.fleet.workers if each.address == decode.address)
        await until(lambda: links._open and connections_to(decode) == 2)
        gc.disable()
        try:
            for _ in range(3):
                if lost == "the link":
                    (peer,) = links._open.values()
                    peer.close()
                    await peer.ended.wait()
                    del peer
                    await until(lambda: links._open)
                else:
                    assert client._reading is not None
                    client._reading.cancel()
                    await until(lambda: not client.ready)
                    await until(lambda: client.ready)
                await until(lambda: connections_to(decode) == 2)
        finally:
            gc.enable()


async def test_a_link_idle_for_longer_than_its_silence_bound_stays_and_carries_a_handoff(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "baton.roles.prefill_links")
    prefill, decode = LocalWorker("prefill", tempo=IDLE), LocalWorker("decode", tempo=IDLE)
    async with local_ring([prefill, decode], IDLE) as ring:
        await until(lambda: decode.decode.open_links)
        await asyncio.sleep(4 * IDLE.idle_silence_s)
        assert await answer(ring, "r", PROMPT, TOKENS) == await expected()
        assert decode.engine.generated_tokens == TOKENS - 1, "the first token is prefill's"
        said = [
            record.getMessage() for record in caplog.records if record.name == "baton.roles.prefill_links"
        ]
        assert len(said) == 1 and "epoch 1" in said[0], said


@pytest.mark.parametrize("no_prefill", ["queue", "fail"])
async def test_a_mismatch_is_the_clients_reason_and_is_not_dialled_again(no_prefill: NoPrefill) -> None:
    prefill, decode = LocalWorker("prefill", revision="1"), LocalWorker("decode", revision="2")
    placement = PlacementOptions("always", no_prefill=no_prefill)
    policy = RetryPolicy(queue_timeout=0.5)
    async with local_ring([prefill, decode], policy=policy, placement=placement) as ring:
        for number in range(2):
            with pytest.raises(RingError, match="revision differs: prefill 1, decode 2") as refused:
                await answer(ring, f"r{number}", PROMPT, TOKENS)
            assert refused.value.status == 503


async def test_a_decode_worker_that_nobody_can_link_to_computes_prompts_itself() -> None:
    prefill, decode = LocalWorker("prefill", revision="1"), LocalWorker("decode", revision="2")
    metrics = ResumeMetrics(CollectorRegistry())
    async with local_ring([prefill, decode], metrics=metrics) as ring:
        answers = [await answer(ring, f"r{number}", PROMPT, TOKENS) for number in range(3)]
        assert answers == 3 * [await expected()]
        assert ring.unlinked_pairs() == {"revision": 1}
        assert metrics.attempts._value.get() == 4, "one attempt of the first request was refused"


async def test_a_decode_worker_that_prefill_cannot_link_to_is_avoided() -> None:
    prefill = LocalWorker("prefill")
    decodes = [LocalWorker("decode", revision="2"), LocalWorker("decode")]
    async with local_ring([prefill, *decodes]) as ring:
        answers = [await answer(ring, f"r{number}", PROMPT, TOKENS) for number in range(4)]
        assert answers == 4 * [await expected()]
        assert decodes[1].engine.generated_tokens == 4 * (TOKENS - 1)


async def test_a_link_that_is_closed_as_soon_as_it_is_made_ends_all_the_same() -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]):
        greeting = LinkOpen(
            prefill_incarnation="another",
            decode_incarnation=decode.incarnation,
            compatibility=prefill.wiring.compatibility,
            connectors=["tcp"],
            prefill_address=prefill.address,
        )
        lost: list[DecodePeer] = []
        peer = DecodePeer(decode.address, prefill.wiring, lambda link, message: None, lost.append)
        await peer.open(greeting)
        peer.close()
        peer.close()
        await asyncio.wait_for(peer.ended.wait(), 5)
        assert lost == [peer]


async def test_a_link_that_cannot_be_closed_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]):
        await until(lambda: decode.decode.open_links)

        async def fail(link: TcpSendingLink) -> None:
            raise OSError("no such connection")

        with monkeypatch.context() as fault:
            fault.setattr(TcpSendingLink, "close", fail)
            await decode.stop()
            await asyncio.wait_for(prefill.crashed.wait(), 5)


@pytest.mark.deep
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_worker_that_stood_still_fences_before_it_retires(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = LocalLink.close

    async def slow_close(link: LocalLink) -> None:
        await asyncio.sleep(60.0 if hangs else 0.1)
        await close(link)

    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]):
        await until(lambda: decode.decode.open_links)
        [peer] = decode.decode._peers.values()
        with monkeypatch.context() as fault:
            fault.setattr(LocalLink, "close", slow_close)
            decode.decode.fence_all()
            time.sleep(1.5 * RETIRE_AFTER_S)  # noqa: ASYNC251 (nobody's turn comes)
            if hangs:
                await asyncio.wait_for(decode.crashed.wait(), 5)
            else:
                await asyncio.wait_for(peer.fenced.wait(), 5)
                assert not decode.crashed.is_set()


async def test_prefill_hears_of_no_receive_before_it_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another rank's process are posted when it says so."""
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        await until(lambda: decode.decode.open_links)
        posted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(LocalLink, "in_place", lambda link: None if posted.done() else posted)
        asked = asyncio.create_task(answer(ring, "r", PROMPT, TOKENS))
        await until(lambda: decode.decode.open_handoffs)
        await asyncio.sleep(0.2)
        assert prefill.prefill.holds().blocks == decode.engine.generated_tokens == 0
        posted.set_result(None)
        assert await asked == await expected()


async def test_details_that_cannot_be_read_break_the_handoff_and_not_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, firsts = role._first, [First(1, b"\xff")]
    monkeypatch.setattr(role, "_first", lambda answer: firsts.pop() if firsts else right(answer))
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        assert await answer(ring, "r", PROMPT, TOKENS) == await expected()
        assert decode.decode.counters.aborted == {AbortReason.MANIFEST: 1}
        assert not (firsts or decode.crashed.is_set())
        await until(lambda: not (prefill.held or decode.held))


# --- routers that do not read


async def test_a_router_that_does_not_read_is_cut_off_and_its_requests_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once: nothing is kept for it from then on."""
    monkeypatch.setattr(routers, "MAX_QUEUED_FRAMES", 8)
    worker = LocalWorker("both", step_s=0.01)
    async with local_ring([worker]) as ring:
        stream = worker.service._welcome("deaf")
        params = ResolvedSampling(max_tokens=200, temperature=0.0, ignore_eos=True)
        submit = pb.Submit(request_id="r", attempt=0, prompt_ids=PROMPT, params=params.to_proto())
        worker.service._take("deaf", pb.RouterMessage(submit=submit))
        await until(lambda: worker.engine.has_any_of("deaf"))
        await until(lambda: not worker.routers.connected("deaf"))
        assert not worker.engine.has_any_of("deaf")
        for turn in range(20):
            stream.deliver(pb.TokenDelta(request_id="r", first_seq=turn, token_ids=[1]))
            await asyncio.sleep(0)
        stream.end()
        assert [stream.frames.get_nowait()] == [None]
        assert stream.frames.empty()
        await until(lambda: not worker.held)
        assert await answer(ring, "r2", PROMPT, TOKENS) == await expected()


# --- drains


@pytest.mark.parametrize("roles", [("decode", "decode"), ("prefill", "prefill", "decode"), ("both", "both")])
async def test_a_request_that_meets_a_drain_is_placed_elsewhere(roles: tuple[Role, ...]) -> None:
    workers = [LocalWorker(role) for role in roles]
    async with local_ring(workers) as ring:
        draining = [min(workers[:2], key=lambda worker: worker.address)]  # whom an idle ring chooses
        draining[0].service.drain()
        # In the same turn of the event loop: the router cannot know yet.
        assert await answer(ring, "r", PROMPT, TOKENS) == await expected()
        assert draining[0].engine.generated_tokens == 0
        assert next(c for c in ring.fleet.workers if c.address == draining[0].address).draining


async def test_a_worker_does_not_end_before_its_routers_have_heard_of_it() -> None:
    workers = [LocalWorker("both"), LocalWorker("both")]
    async with local_ring(workers) as ring:
        first = min(workers, key=lambda worker: worker.address)

        async def end() -> None:
            await first.drain.run(None)
            await first.stop()

        ended = asyncio.create_task(end())
        await asyncio.sleep(0)  # it drains now, and the router has not heard of it
        answers = await asyncio.gather(*(answer(ring, f"r{n}", PROMPT, TOKENS) for n in range(8)))
        assert answers == 8 * [await expected()]
        await ended


def stand_still_until_idle(engine: Engine) -> None:
    while engine.has_work:
        time.sleep(0.001)


async def test_what_was_computed_is_published_before_a_worker_is_settled() -> None:
    engine, published = fake_engine(), list[SequenceOutput]()
    loop = EngineLoop(engine, published.extend, lambda: pytest.fail("crashed"), lambda _: None)
    loop.start()
    params = ResolvedSampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.add(Sequence("r", 0, tuple(PROMPT), params))
    stand_still_until_idle(engine)  # nothing can be published meanwhile
    await loop.settled()
    assert sum(len(output.new_tokens) for output in published) == 3
    loop.stop()


async def test_without_another_worker_the_client_hears_of_the_drain() -> None:
    worker = LocalWorker("both")
    async with local_ring([worker], policy=RetryPolicy(queue_timeout=0.1)) as ring:
        worker.service.drain()
        with pytest.raises(RingError, match="draining; no worker that can decode is ready") as refused:
            await answer(ring, "r", PROMPT, TOKENS)
        assert refused.value.status == 503
        assert not ring.ready


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_drain_waits_for_what_is_open_and_the_end_loses_nothing(role: str) -> None:
    workers = [LocalWorker("prefill", step_s=0.3), LocalWorker("decode", step_s=0.01)]
    draining = next(worker for worker in workers if worker.role == role)
    async with local_ring(workers) as ring:
        prompts = [[*PROMPT, number] for number in range(4)]
        asked = [asyncio.create_task(answer(ring, f"r{p[-1]}", p, 40)) for p in prompts]
        await until(lambda: draining.service.open_work().sequences)
        drained = asyncio.create_task(draining.drain.run(None))
        await asyncio.sleep(0.05)
        assert not drained.done()
        assert await drained
        assert not draining.service.open_work()
        assert draining.held == 0
        await draining.stop()
        assert await asyncio.gather(*asked) == [await expected(prompt, 40) for prompt in prompts]


async def test_prefill_may_be_gone_before_decode_has_said_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.05), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        late: list[pb.Frame] = []
        on_frame = ring.on_frame

        def delay_decode(worker: WorkerClient, frame: pb.Frame) -> None:
            if worker.address == decode.address:
                late.append(frame)
            else:
                on_frame(worker, frame)

        monkeypatch.setattr(ring, "on_frame", delay_decode)
        asked = asyncio.create_task(answer(ring, "r", PROMPT, TOKENS))
        await until(lambda: prefill.service.open_work().requests)
        assert await prefill.drain.run(None)
        await prefill.stop()
        clients = {client.address: client for client in ring.fleet.workers}
        await until(lambda: not clients[prefill.address].ready)
        monkeypatch.undo()
        for frame in late:
            on_frame(clients[decode.address], frame)
        assert await asked == await expected()


async def test_a_drain_that_takes_too_long_is_cut_short() -> None:
    worker = LocalWorker("both", step_s=0.02)
    async with local_ring([worker], policy=RetryPolicy(queue_timeout=0.1)) as ring:
        asked = asyncio.create_task(answer(ring, "r", PROMPT, 100))
        await until(lambda: worker.service.open_work().sequences)
        assert not await worker.drain.run(0.1)
        await worker.stop()
        with pytest.raises(RingError, match="lost"):
            await asked


async def test_a_decode_worker_drains_when_no_prefill_worker_can_ask_any_more() -> None:
    prefills, decodes = (
        [LocalWorker("prefill"), LocalWorker("prefill")],
        [LocalWorker("decode") for _ in "ab"],
    )
    async with local_ring([*prefills, *decodes]):
        await until(lambda: all(worker.decode.open_links == 2 for worker in decodes))
        assert await decodes[0].drain.run(5)
        assert decodes[0].decode.open_links == 0
        assert decodes[1].decode.open_links == 2


async def test_a_worker_that_hangs_at_its_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = queue.SimpleQueue[int]()
    backstop: list[float] = []
    monkeypatch.setattr(os, "_exit", ends.put)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda after, **_: backstop.append(after))
    end_process_after(0.01, 75)
    assert await asyncio.to_thread(ends.get, timeout=60) == 75
    assert "test_a_worker_that_hangs_at_its_end_is_ended" in caplog.text  # where its task waits
    assert backstop and backstop[0] > 1


# --- silence


class SilentRouter:
    """A router that connects and submits, and then says nothing, not even a heartbeat."""

    def __init__(self, worker: LocalWorker, *messages: pb.RouterMessage, router_id: str = "silent") -> None:
        self._worker = worker
        self._router_id = router_id
        self._messages = messages
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with grpc.aio.insecure_channel(self._worker.address) as channel:
            stream = pb_grpc.WorkerStub(channel).Connect(None)
            await greet_worker(stream, KEY, self._router_id)
            for message in self._messages:
                await stream.write(message)
            while isinstance(await stream.read(), pb.WorkerMessage):
                pass


def submit(request_id: str, max_tokens: int) -> pb.RouterMessage:
    message = pb.RouterMessage(submit=pb.Submit(request_id=request_id, prompt_ids=PROMPT))
    message.submit.params.max_tokens = max_tokens
    message.submit.params.ignore_eos = True
    return message


@pytest.fixture
async def slow() -> AsyncIterator[LocalWorker]:
    worker = LocalWorker("both", step_s=0.02, tempo=BUSY)
    await worker.start()
    yield worker
    await worker.stop()


async def test_a_silent_routers_requests_are_cancelled_and_their_blocks_freed(slow: LocalWorker) -> None:
    router = SilentRouter(slow, submit("r", 200))
    await until(lambda: slow.held)
    await until(lambda: not slow.held)
    assert 0 < slow.engine.generated_tokens < 200
    assert not slow.routers.connected("silent")
    await asyncio.wait_for(router.reading, 60)


async def test_an_idle_silent_router_is_parted_with_later() -> None:
    worker = LocalWorker("both", tempo=IDLE)
    await worker.start()
    router = SilentRouter(worker)
    await until(lambda: worker.routers.connected("silent"))
    began = time.monotonic()
    await until(lambda: not worker.routers.connected("silent"))
    assert time.monotonic() - began > 2 * IDLE.busy_silence_s
    await asyncio.wait_for(router.reading, 60)
    await worker.stop()


async def test_a_router_that_connects_again_has_given_up_its_old_requests(slow: LocalWorker) -> None:
    old = SilentRouter(slow, submit("r", 200))
    await until(lambda: slow.held)
    new = SilentRouter(slow)
    await asyncio.wait_for(old.reading, 60)
    await until(lambda: not slow.held)
    assert slow.engine.generated_tokens < 200
    assert slow.routers.connected("silent")
    new.reading.cancel()


class SilentWorker(pb_grpc.WorkerServicer):
    """Greets, and says nothing more."""

    def __init__(self) -> None:
        self.streams = 0

    async def Connect(  # noqa: N802 (the name is the contract's)
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: object
    ) -> AsyncIterator[pb.WorkerMessage]:
        self.streams += 1
        hello = pb.WorkerHello(role=pb.ROLE_BOTH, max_model_len=256, vocab_size=97)
        async for said in say_hello(request_iterator, KEY, hello):
            yield said
        await asyncio.Event().wait()

    async def SwitchRole(  # noqa: N802
        self, request: pb.SwitchRoleRequest, context: object
    ) -> pb.SwitchRoleReply:
        raise NotImplementedError


@pytest.mark.parametrize("busy", [True, False])
async def test_a_silent_worker_is_given_up_and_dialled_again(busy: bool) -> None:
    worker, server = SilentWorker(), grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    tempo = BUSY if busy else IDLE
    ring = WorkerRing([address], "fake", ClusterKeys(KEY), tempo, Retries(RetryPolicy(max_attempts=1)))
    ring.start()
    await until(lambda: ring.ready)
    began = time.monotonic()
    if busy:
        with pytest.raises(RingError, match="lost"):
            await asyncio.wait_for(answer(ring, "r", PROMPT, TOKENS), 5)
    else:
        await until(lambda: not ring.ready)
        assert time.monotonic() - began > 2 * IDLE.busy_silence_s
    await until(lambda: worker.streams == 2)
    await ring.close()
    await server.stop(None)


# --- what is known of one that has just come


async def test_a_worker_that_has_reported_nothing_yet_does_not_pass_for_a_full_one() -> None:
    async with local_ring([LocalWorker("both")]) as ring:
        [client] = ring.fleet.workers
        assert client.hello is not None and client.hello.num_blocks
        client.take_load(pb.Load())  # as before the first report
        assert client.report().blocks_spare is None
        client.take_load(pb.Load(blocks_free=7, blocks_cached=2, blocks_reserved=4))
        assert client.report().blocks_spare == 5
        client.take_load(pb.Load(blocks_held=9))
        assert client.report().blocks_spare == 0
