"""What a worker's gRPC port takes from callers that have proved nothing: short messages, few at once, in
time.

gRPC has one bound of a message's size for a whole port, which must let the longest prompt pass, and none for
how many calls are open. Here messages are still bytes: too long a one of a stranger is never decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias, cast

import grpc

from baton.greeting.entrance import CallerRefusedError
from baton.greeting.places import NoPlaceError, Places
from baton.greeting.proofs import GREETING_S, MOST_GREETING_BYTES
from baton.rpc_status import end_with

GREETED = frozenset({"/baton.v1.Worker/Connect", "/baton.v1.Handoff/Link"})
"""Streams that begin with a greeting: two messages of the caller."""
OPEN = frozenset(
    {"/grpc.health.v1.Health/Check", "/baton.v1.Worker/SwitchRole", "/baton.v1.RouterPulse/Beat"}
)
"""Calls that begin with none: for probes, and with a proof of their own."""
OPEN_STREAMS = frozenset({"/grpc.health.v1.Health/Watch"})
MOST_OPEN_BYTES = 4096
MOST_OPEN = 256
MOST_OPEN_FROM_ONE = 16

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, object]"
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, object]"
Answering: TypeAlias = Callable[[bytes, Context], Awaitable[object]]
Streaming: TypeAlias = Callable[[bytes | AsyncIterator[bytes], Context], AsyncGenerator[object]]


class StrangersInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Comes before ``DecodingInterceptor``, whose handlers take bytes."""

    def __init__(self) -> None:
        self._calls = Places(MOST_OPEN, MOST_OPEN_FROM_ONE)
        self._streams = Places(MOST_OPEN, MOST_OPEN_FROM_ONE)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:  # there is no such service here
            return handler
        if method in GREETED:
            return _short_at_first(handler)
        if method in OPEN:
            make, behaviour = grpc.stream_unary_rpc_method_handler, handler.unary_unary
            return _in_place(make, behaviour, handler.response_serializer, self._calls)
        if method in OPEN_STREAMS:  # a coroutine that writes, not a generator
            make, behaviour = grpc.stream_stream_rpc_method_handler, handler.unary_stream
            return _in_place(make, behaviour, handler.response_serializer, self._streams)
        return handler


class _ShortAtFirst:
    """The messages of a stream that begins with a greeting, as bytes."""

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self._messages = messages
        self._left = 2

    def __aiter__(self) -> _ShortAtFirst:
        return self

    async def __anext__(self) -> bytes:
        message = await anext(self._messages)
        if self._left:
            self._left -= 1
            _check_size("a message of a greeting", message, MOST_GREETING_BYTES)
        return message


def _check_size(what: str, message: bytes, most: int) -> None:
    if len(message) > most:
        reason = f"{what} has {len(message)} bytes; at most {most} are allowed"
        raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, reason)


def _short_at_first(handler: Handler) -> Handler:
    streaming = cast(Streaming, handler.stream_stream)

    async def stream(messages: AsyncIterator[bytes], context: Context) -> AsyncGenerator[object]:
        async with aclosing(streaming(_ShortAtFirst(messages), context)) as answers:
            async for answer in answers:
                yield answer

    return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)


def _in_place(make: Callable[..., Handler], behaviour: object, serializer: object, places: Places) -> Handler:
    """A call of one message, as one of a stream of messages of which one is read: gRPC would read it whole
    before it asked anybody."""
    answering = cast(Answering, behaviour)

    async def answer(messages: AsyncIterator[bytes], context: Context) -> object:
        try:
            with places.one_for(context.peer()):
                return await answering(await _only(messages), context)
        except NoPlaceError as error:
            end_with(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except CallerRefusedError as error:
            end_with(context, error.status, str(error))
        return None

    return make(answer, None, serializer)


async def _only(messages: AsyncIterator[bytes]) -> bytes:
    """The one message of a call. Raises CallerRefusedError."""
    try:
        async with asyncio.timeout(GREETING_S):
            message = await anext(aiter(messages), None)
    except TimeoutError:
        reason = f"no message came within {GREETING_S:g} s"
        raise CallerRefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from None
    if message is None:
        raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, "a message is missing")
    _check_size("the message", message, MOST_OPEN_BYTES)
    return message
