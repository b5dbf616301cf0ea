"""Bounds of what a worker's gRPC port accepts from callers that have proved nothing: message size, open
calls, and time.

gRPC has one bound of message size for a whole port (``baton.net.message_parts``), which is more than an
unproved caller needs, and no bound of open calls. This module sees messages as bytes, so that a message of an
unproved caller that is too long is never decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias, cast

import grpc

from baton.greeting.entrance import CallerRefusedError
from baton.greeting.places import NoPlaceError, Places
from baton.greeting.proofs import CALLERS_MESSAGES, GREETING_S, MAX_GREETING_BYTES
from baton.net.message_parts import CONNECT, LINK
from baton.net.rpc_status import end_with

GREETED = frozenset({CONNECT, LINK})
"""The methods whose streams begin with a greeting."""
OPEN = frozenset(
    {"/grpc.health.v1.Health/Check", "/baton.v1.Worker/SwitchRole", "/baton.v1.RouterPulse/Beat"}
)
"""The unary methods without a greeting: probes, and calls that carry a proof of their own."""
OPEN_STREAMS = frozenset({"/grpc.health.v1.Health/Watch"})
MAX_OPEN_BYTES = 4096
MAX_OPEN = 256
MAX_OPEN_FROM_ONE = 16

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, object]"
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, object]"
Answering: TypeAlias = Callable[[bytes, Context], Awaitable[object]]
Streaming: TypeAlias = Callable[[bytes | AsyncIterator[bytes], Context], AsyncGenerator[object]]


class StrangersInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Applies the bounds to callers that have proved nothing. Comes before ``DecodingInterceptor``, whose
    handlers take bytes."""

    def __init__(self) -> None:
        self._calls = Places(MAX_OPEN, MAX_OPEN_FROM_ONE)
        self._streams = Places(MAX_OPEN, MAX_OPEN_FROM_ONE)

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
    """The serialized messages of a stream that begins with a greeting, whose messages must be short."""

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self._messages = messages
        self._left = CALLERS_MESSAGES

    def __aiter__(self) -> _ShortAtFirst:
        return self

    async def __anext__(self) -> bytes:
        message = await anext(self._messages)
        if self._left:
            self._left -= 1
            _check_size("a message of a greeting", message, MAX_GREETING_BYTES)
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
    """Handle a call of one message as a call of a stream of which one message is read: gRPC would read a
    unary call's message before it asked any handler."""
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
    """Return the one message of a call. Raises CallerRefusedError."""
    try:
        async with asyncio.timeout(GREETING_S):
            message = await anext(aiter(messages), None)
    except TimeoutError:
        reason = f"no message came within {GREETING_S:g} s"
        raise CallerRefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from None
    if message is None:
        raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, "a message is missing")
    _check_size("the message", message, MAX_OPEN_BYTES)
    return message
