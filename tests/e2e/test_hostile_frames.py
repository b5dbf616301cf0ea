"""What a fuzzer found on the gRPC ports: the caller is told, and nobody else notices."""

from __future__ import annotations

import grpc
import pytest

from baton.ready import WorkerReady
from baton.v1 import handoff_pb2, worker_pb2
from baton.v1.handoff_pb2_grpc import HandoffStub
from loadtest.fuzz.frames import link_open
from tests.support.ring import Ring

pytestmark = pytest.mark.beside

BROKEN = b"\x0a\xff"
"""A field that is longer than the message."""
HELLO = worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id="stranger"))


def _bytes(data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("begun", [False, True])
def test_bytes_that_are_no_message(demo_ring: Ring, begun: bool) -> None:
    """INVALID_ARGUMENT, not the UNKNOWN that grpcio makes of it; nothing in the log."""
    worker = demo_ring.workers[0]
    assert isinstance(worker.ready, WorkerReady)
    for service, address, path in (
        (demo_ring.router, demo_ring.grpc, "/baton.v1.Inference/Generate"),
        (demo_ring.router, demo_ring.grpc, "/baton.v1.Inference/ListModels"),
        (worker, worker.ready.address, "/baton.v1.Worker/Connect"),
        (worker, worker.ready.address, "/baton.v1.Handoff/Link"),
    ):
        if begun and not path.endswith("Connect"):
            continue
        sent = [HELLO.SerializeToString(), BROKEN] if begun else [BROKEN]
        before = service.log.read_text().count("Traceback")
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(path, _bytes, _bytes)(iter(sent), timeout=10))
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, path
        assert "cannot be read" in (refused.value.details() or "")
        assert service.log.read_text().count("Traceback") == before
    demo_ring.wait_idle()


def test_bytes_that_are_no_message_while_the_greeting_is_on_its_way(demo_ring: Ring) -> None:
    """Each call ends. One in 400 did not while the task that reads ended it beside the one that writes."""
    [worker] = demo_ring.of_role("prefill")
    assert isinstance(worker.ready, WorkerReady)
    for _ in range(300):
        with grpc.insecure_channel(worker.ready.address) as channel, pytest.raises(grpc.RpcError) as refused:
            connect = channel.stream_stream("/baton.v1.Worker/Connect", _bytes, _bytes)
            list(connect(iter([HELLO.SerializeToString(), BROKEN]), timeout=10))
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    demo_ring.wait_idle()


def test_a_link_to_a_worker_that_takes_no_handoffs(demo_ring: Ring) -> None:
    """It is refused by name, however often it is tried; it used to leave a link that was never fenced."""
    [prefill] = demo_ring.of_role("prefill")
    assert isinstance(prefill.ready, WorkerReady)
    opened = link_open(prefill.ready.address, HELLO)
    for _ in range(2):
        with grpc.insecure_channel(prefill.ready.address) as channel:
            messages = iter([handoff_pb2.PrefillMessage(open=opened)])
            [answer] = HandoffStub(channel).Link(messages, timeout=10)
        assert answer.refuse.reason == "this worker takes no handoffs"
