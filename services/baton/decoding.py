"""gRPC messages that are none, or that hold more than they may: the caller's fault, and told so.

grpcio answers bytes that do not parse with UNKNOWN or INTERNAL, and a traceback in the log, as if the
handler were broken. Here they end their call with INVALID_ARGUMENT.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import TypeAlias, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from baton.message_bounds import MessageBounds, check_bounds
from baton.rpc_status import Context, end_with

Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Decode: TypeAlias = Callable[[bytes], object]
Request: TypeAlias = bytes | AsyncIterator[bytes]


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Decodes what comes in, in place of grpcio."""

    def __init__(self, bounds: Mapping[str, tuple[Descriptor, MessageBounds]] | None = None) -> None:
        """``bounds``: what the messages of a method, by its full name, may hold; others may hold what
        has room in a message."""
        self._bounds = bounds or {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, which is given messages as before."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = self._bounded(handler_call_details.method, cast(Decode, handler.request_deserializer))
        make, behaviour = handler_parts(handler)
        if inspect.isasyncgenfunction(behaviour):
            generating = cast(Callable[[object, Context], AsyncGenerator[object]], behaviour)

            async def generate(request: Request, context: Context) -> AsyncGenerator[object]:
                given = _read(request, decode)
                if not isinstance(given, Unreadable):
                    with suppress(UnreadableMessageError):
                        async with aclosing(generating(given, context)) as answers:
                            async for answer in answers:
                                yield answer
                _refuse_unreadable(given, context)

            return make(generate, None, handler.response_serializer)
        responding = cast(Callable[[object, Context], Awaitable[object]], behaviour)

        async def respond(request: Request, context: Context) -> object:
            given = _read(request, decode)
            answer = None
            if not isinstance(given, Unreadable):
                with suppress(UnreadableMessageError):
                    answer = await responding(given, context)
            _refuse_unreadable(given, context)
            return answer

        return make(respond, None, handler.response_serializer)

    def _bounded(self, method: str, decode: Decode) -> Decode:
        found = self._bounds.get(method)
        if found is None:
            return decode
        descriptor, bounds = found

        def decode_bounded(message: bytes) -> object:
            check_bounds(message, descriptor, bounds)
            return decode(message)

        return decode_bounded


def handler_parts(handler: Handler) -> tuple[Callable[..., Handler], object]:
    """What makes a handler of this kind, and what this one does."""
    for make, behaviour in (
        (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    ):
        if behaviour is not None:
            return cast(Callable[..., Handler], make), behaviour
    raise AssertionError("a handler does something")


class UnreadableMessageError(Exception):
    """The first message of a call cannot be read."""


class Unreadable(str):
    """Says why a message cannot be read. The error itself would hold the message by its traceback."""

    __slots__ = ()


class _Messages:
    """The messages of a call, as they come. One that cannot be read is the last; as the first, it raises
    :class:`UnreadableMessageError`.

    Only the call's own task may end the call: handlers read in another, and a status that is sent from there
    while an answer is being written may be lost in grpcio, and the caller waits for ever.
    """

    def __init__(self, requests: AsyncIterator[bytes], decode: Decode) -> None:
        self._requests = requests
        self._decode = decode
        self._begun = False
        self.error: Unreadable | None = None

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> object:
        message = _decoded(await anext(self._requests), self._decode)
        if isinstance(message, Unreadable):
            self.error = message
            raise StopAsyncIteration if self._begun else UnreadableMessageError
        self._begun = True
        return message


def _read(request: Request, decode: Decode) -> object:
    """The message, or the messages as they come, or why the message cannot be read."""
    return _decoded(request, decode) if isinstance(request, bytes) else _Messages(request, decode)


def _decoded(message: bytes, decode: Decode) -> object:
    try:
        return decode(message)
    except DecodeError as error:
        return Unreadable(error)


def _refuse_unreadable(given: object, context: Context) -> None:
    """Let the call end where its message, or the last of its messages, could not be read."""
    why = given.error if isinstance(given, _Messages) else given
    if isinstance(why, Unreadable):
        end_with(context, grpc.StatusCode.INVALID_ARGUMENT, f"The message cannot be read: {why}.")
