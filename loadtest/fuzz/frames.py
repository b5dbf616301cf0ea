"""Random bytes and random messages on the gRPC methods of a router and its workers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton.handoff.identity import PROTOCOL
from baton.hub import resolve_model
from baton.v1 import handoff_pb2, inference_pb2, worker_pb2
from baton_kernels.paged import LAYOUT
from loadtest.fuzz.account import Account
from loadtest.fuzz.opening import CONNECT, LINK, Opening
from loadtest.fuzz.protos import frames
from tests.support.ring import CLUSTER_KEY

StreamCall: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, bytes]"
NAME = "fuzz"
HELLO = worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id=NAME)).SerializeToString()
TIMEOUT_S = 20.0
STREAM_S = 0.5
"""The time that a stream is listened to, in seconds: a worker's never ends by itself."""
BUGS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})
"""The statuses that correspond to HTTP's 500."""
UNDECODABLE = "Exception deserializing request!"
"""grpcio's own answer to bytes that are no message: INTERNAL, before any handler sees them."""


def fuzz_router(address: str, examples: int) -> Iterator[Account]:
    """Fuzz the API for clients."""
    for method, descriptor in (
        ("Generate", inference_pb2.GenerateRequest.DESCRIPTOR),
        ("ListModels", inference_pb2.ListModelsRequest.DESCRIPTOR),
    ):
        path = f"/baton.v1.Inference/{method}"
        yield _fuzzed(f"router {path}", address, path, None, descriptor, examples, TIMEOUT_S)


def fuzz_worker(name: str, address: str, examples: int) -> Iterator[Account]:
    """Fuzz the streams for routers and for other workers, with a right beginning and without."""
    open_ = handoff_pb2.PrefillMessage(open=link_open(address)).SerializeToString()
    for path, first, descriptor in (
        (CONNECT, HELLO, worker_pb2.RouterMessage.DESCRIPTOR),
        (LINK, open_, handoff_pb2.PrefillMessage.DESCRIPTOR),
    ):
        yield _fuzzed(f"{name} {path}", address, path, None, descriptor, examples, STREAM_S)
        yield _fuzzed(f"{name} {path}, begun", address, path, first, descriptor, examples, STREAM_S)


def hello_of(address: str) -> worker_pb2.WorkerHello:
    """Return the hello that the worker at ``address`` sends to a router."""
    opening = Opening(CONNECT, CLUSTER_KEY.encode(), NAME, HELLO)
    with grpc.insecure_channel(address) as channel:
        for answer in channel.stream_stream(CONNECT, _as_it_is, _as_it_is)(
            opening.requests([]), timeout=TIMEOUT_S
        ):
            opening.hear(answer)
            told = worker_pb2.WorkerMessage.FromString(answer)
            if told.HasField("hello"):
                return told.hello
    raise RuntimeError(f"the worker at {address} does not say what it is")


def link_open(address: str) -> handoff_pb2.LinkOpen:
    """Return the LinkOpen that a decode worker with the demo model in float32 at ``address`` accepts."""
    told = hello_of(address)
    config = json.loads((resolve_model("demo") / "config.json").read_text())
    heads = config["num_attention_heads"]
    return handoff_pb2.LinkOpen(
        prefill_incarnation=NAME,
        decode_incarnation=told.incarnation,
        connectors=["tcp"],
        prefill_address="127.0.0.1:1",
        compatibility=handoff_pb2.Compatibility(
            protocol=PROTOCOL,
            model=told.model,
            revision=told.revision,
            kv_dtype="float32",
            layout=LAYOUT,
            groups=[
                handoff_pb2.KVGroupSpec(
                    kind="full",
                    heads=config.get("num_key_value_heads", heads),
                    layers=config["num_hidden_layers"],
                    vectors=2,
                    dim=config.get("head_dim") or config["hidden_size"] // heads,
                )
            ],
            block_size=told.block_size,
        ),
    )


def _fuzzed(
    target: str,
    address: str,
    path: str,
    first: bytes | None,
    descriptor: Descriptor,
    examples: int,
    timeout_s: float,
) -> Account:
    """``first``: the message that follows a greeting; None: the method has no greeting."""
    account = Account(target)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.lists(frames(descriptor, _nearer), min_size=1, max_size=1 if timeout_s == TIMEOUT_S else 6))
    def send(sent: list[bytes]) -> None:
        opening = None if first is None else Opening(path, CLUSTER_KEY.encode(), NAME, first)
        told = _told(call, sent, timeout_s, opening)
        account.add(told.split(":")[0])
        if any(told.startswith(code.name) for code in BUGS) and UNDECODABLE not in told:
            account.blame(f"{told}: {[frame.hex() for frame in sent]}")

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path, _as_it_is, _as_it_is)
        send()
    return account


def _nearer(message: Message) -> Message:
    """Return ``message`` with a prompt and a length that are accepted, so that its other fields are
    tested."""
    if isinstance(message, inference_pb2.GenerateRequest):
        message.model = ""
        message.text = message.text or "Paged attention is"
        message.params.max_tokens = 1 + message.params.max_tokens % 8
    elif isinstance(message, worker_pb2.RouterMessage) and message.HasField("submit"):
        submit = message.submit
        submit.prompt_ids[:] = [id_ % 300 for id_ in submit.prompt_ids] or [5, 6, 7]
        submit.params.max_tokens = 1 + submit.params.max_tokens % 8
    return message


def _told(call: StreamCall, sent: Sequence[bytes], timeout_s: float, opening: Opening | None) -> str:
    """Return a call's status and details."""
    try:
        # A stream is kept open until it has been listened to: its end would end its requests.
        requests = _then_wait(sent, timeout_s) if timeout_s == STREAM_S else iter(sent)
        if opening is not None:
            requests = opening.requests(sent, timeout_s)
        for answer in call(requests, timeout=timeout_s):
            if opening is not None:
                opening.hear(answer)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return f"{error.code().name}: {error.details()}"
    return "OK"


def _then_wait(sent: Sequence[bytes], seconds: float) -> Iterator[bytes]:
    yield from sent
    time.sleep(seconds)


def _as_it_is(data: bytes) -> bytes:
    return data
