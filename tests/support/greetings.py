"""Greetings of pretended workers and bare callers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import Called, Caller
from baton.v1 import handoff_pb2
from baton.v1 import worker_pb2 as pb

RouterCall = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]
LinkCall = grpc.aio.StreamStreamCall[handoff_pb2.PrefillMessage, handoff_pb2.DecodeMessage]


async def say_hello(
    messages: AsyncIterator[pb.RouterMessage], key: bytes, hello: pb.WorkerHello
) -> AsyncIterator[pb.WorkerMessage]:
    """What a worker with this hello says to a router that greets it, with the hello at the end. It has an
    incarnation from here on."""
    hello.incarnation = hello.incarnation or "pretended"
    first = await anext(messages)
    called = Called(ClusterKeys(key), "router", hello.incarnation, first.greeting)
    yield pb.WorkerMessage(challenge=called.challenge)
    second = await anext(messages, None)
    if second is None:  # it only wanted to know who is here
        return
    called.check(second.proof)
    assert (await anext(messages)).hello.router_id == first.greeting.name
    yield pb.WorkerMessage(hello=hello)


async def greet_worker(
    call: RouterCall, key: bytes, router_id: str, beat_nonce: bytes = b""
) -> pb.WorkerHello:
    """As a router does. Returns the worker's hello."""
    caller = Caller(ClusterKeys(key), "router", router_id)
    await call.write(pb.RouterMessage(greeting=caller.greeting))
    answer = await call.read()
    assert isinstance(answer, pb.WorkerMessage)
    await call.write(pb.RouterMessage(proof=caller.prove(answer.challenge)))
    hello = pb.RouterHello(router_id=router_id, beat_nonce=beat_nonce)
    await call.write(pb.RouterMessage(hello=hello))
    first = await call.read()
    assert isinstance(first, pb.WorkerMessage)
    return first.hello


async def greet_decode(call: LinkCall, key: bytes, incarnation: str) -> str:
    """As a prefill worker of this incarnation does. Returns decode's."""
    caller = Caller(ClusterKeys(key), "prefill", incarnation)
    await call.write(handoff_pb2.PrefillMessage(greeting=caller.greeting))
    answer = await call.read()
    assert isinstance(answer, handoff_pb2.DecodeMessage)
    await call.write(handoff_pb2.PrefillMessage(proof=caller.prove(answer.challenge)))
    return answer.challenge.incarnation
