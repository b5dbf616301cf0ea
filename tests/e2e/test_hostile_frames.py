"""What a fuzzer found on the gRPC ports: the caller is told, and nobody else notices."""

from __future__ import annotations

import grpc
import pytest

from baton.process.ready import WorkerReady
from baton.v1 import handoff_pb2
from loadtest.fuzz.frames import HELLO, NAME, link_open
from loadtest.fuzz.opening import CONNECT, LINK, Opening
from tests.support.ring import CLUSTER_KEY, Ring

pytestmark = [pytest.mark.beside, pytest.mark.deep]

BROKEN = b"\x0a\xff"
"""A field that is longer than the message."""
KEY = CLUSTER_KEY.encode()


def begun(address: str, *sent: bytes) -> None:
    """A router's stream to the worker at ``address`` that is begun as it should be; raises when it ends."""
    opening = Opening(CONNECT, KEY, NAME, HELLO)
    with grpc.insecure_channel(address) as channel:
        for answer in channel.stream_stream(CONNECT, _bytes, _bytes)(opening.requests(sent), timeout=10):
            opening.hear(answer)


def _bytes(data: bytes) -> bytes:
    return data


def test_bytes_that_are_no_message(demo_ring: Ring) -> None:
    """INVALID_ARGUMENT, not the UNKNOWN that grpcio makes of it; nothing in the log."""
    worker = demo_ring.workers[0]
    assert isinstance(worker.ready, WorkerReady)
    for service, address, path in (
        (demo_ring.router, demo_ring.grpc, "/baton.v1.Inference/Generate"),
        (demo_ring.router, demo_ring.grpc, "/baton.v1.Inference/ListModels"),
        (worker, worker.ready.address, "/baton.v1.Worker/Connect"),
        (worker, worker.ready.address, "/baton.v1.Handoff/Link"),
    ):
        before = service.log.read_text().count("Traceback")
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(path, _bytes, _bytes)(iter([BROKEN]), timeout=10))
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, path
        assert "cannot be read" in (refused.value.details() or "")
        assert service.log.read_text().count("Traceback") == before
    demo_ring.wait_idle()


def test_bytes_that_are_no_message_while_the_hello_is_on_its_way(demo_ring: Ring) -> None:
    """Each call ends. One in 400 did not while the task that reads ended it beside the one that writes."""
    [worker] = demo_ring.of_role("prefill")
    assert isinstance(worker.ready, WorkerReady)
    before = worker.log.read_text().count("Traceback")
    for _ in range(300):
        with pytest.raises(grpc.RpcError) as refused:
            begun(worker.ready.address, BROKEN)
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be read" in (refused.value.details() or "")
    assert worker.log.read_text().count("Traceback") == before
    demo_ring.wait_idle()


def test_a_link_to_a_worker_that_takes_no_handoffs(demo_ring: Ring) -> None:
    """It is refused by name, however often it is tried; it used to leave a link that was never fenced."""
    [prefill] = demo_ring.of_role("prefill")
    assert isinstance(prefill.ready, WorkerReady)
    opened = handoff_pb2.PrefillMessage(open=link_open(prefill.ready.address)).SerializeToString()
    for _ in range(2):
        opening = Opening(LINK, KEY, NAME, opened)
        with grpc.insecure_channel(prefill.ready.address) as channel:
            answers: list[bytes] = []
            for answer in channel.stream_stream(LINK, _bytes, _bytes)(opening.requests([], 1.0), timeout=10):
                opening.hear(answer)
                answers.append(answer)
        _, refused = map(handoff_pb2.DecodeMessage.FromString, answers)
        assert refused.refuse.reason == "this worker takes no handoffs"
