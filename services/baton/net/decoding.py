"""Decoding of gRPC messages, so that one that cannot be read is reported as the caller's fault.

grpcio answers bytes that do not parse with UNKNOWN or INTERNAL, and a traceback in the log, as if the
handler were broken. Here a message that does not parse, or holds too much, ends its call with
INVALID_ARGUMENT, and a message in parts that is too long with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from baton.net.message_bounds import MessageBounds, check_bounds
from baton.net.message_parts import MessageTooLongError
from baton.net.rpc_status import Context, end_with

Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Decode: TypeAlias = Callable[[bytes], object]
Request: TypeAlias = bytes | AsyncIterator[bytes]


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Decodes requests, in place of grpcio."""

    def __init__(
        self,
        bounds: Mapping[str, tuple[Descriptor, MessageBounds]] | None = None,
        decoders: Mapping[str, Callable[[], Decode]] | None = None,
    ) -> None:
        """``bounds``: what the messages of a method, by its full name, may hold; the messages of other
        methods are bounded by their size alone. ``decoders``: for methods whose messages may come in parts,
        by full name, a function that makes the decoder of one call. That decoder returns None for a part that
        completes no message."""
        self._bounds = bounds or {}
        self._decoders = decoders or {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the method's handler, wrapped to decode its messages."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method
        bounded = self._bounded(method, cast(Decode, handler.request_deserializer))
        decoder = self._decoders.get(method, lambda: bounded)
        make, behaviour = handler_parts(handler)
        if inspect.isasyncgenfunction(behaviour):
            generating = cast(Callable[[object, Context], AsyncGenerator[object]], behaviour)

            async def generate(request: Request, context: Context) -> AsyncGenerator[object]:
                given = _read(request, decoder())
                if not isinstance(given, Unreadable):
                    with suppress(UnreadableMessageError):
                        async with aclosing(generating(given, context)) as answers:
                            async for answer in answers:
                                yield answer
                _refuse_unreadable(given, context)

            return make(generate, None, handler.response_serializer)
        responding = cast(Callable[[object, Context], Awaitable[object]], behaviour)

        async def respond(request: Request, context: Context) -> object:
            given = _read(request, decoder())
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
    """Return the function that makes handlers of this kind, and the behaviour of ``handler``."""
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


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The reason a message cannot be read. The error itself would hold the message by its traceback."""

    reason: str
    status: grpc.StatusCode


class _Messages:
    """The messages of a call, as they come. A message that cannot be read is the last. If it is also the
    first, :class:`UnreadableMessageError` is raised.

    Only the call's own task may end the call. Handlers read in another task, and a status that is sent from
    there while an answer is being written may be lost in grpcio: the caller would wait for ever.
    """

    def __init__(self, requests: AsyncIterator[bytes], decode: Decode) -> None:
        self._requests = requests
        self._decode = decode
        self._begun = False
        self.error: Unreadable | None = None

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> object:
        message = None
        while message is None:  # more parts are to come
            message = _decoded(await anext(self._requests), self._decode)
        if isinstance(message, Unreadable):
            self.error = message
            raise StopAsyncIteration if self._begun else UnreadableMessageError
        self._begun = True
        return message


def _read(request: Request, decode: Decode) -> object:
    """Return the message, or the messages as they come, or why the message cannot be read."""
    return _decoded(request, decode) if isinstance(request, bytes) else _Messages(request, decode)


def _decoded(message: bytes, decode: Decode) -> object:
    try:
        return decode(message)
    except MessageTooLongError as error:
        return Unreadable(str(error), grpc.StatusCode.RESOURCE_EXHAUSTED)
    except DecodeError as error:
        return Unreadable(str(error), grpc.StatusCode.INVALID_ARGUMENT)


def _refuse_unreadable(given: object, context: Context) -> None:
    """End the call with an error if its message, or the last of its messages, could not be read."""
    why = given.error if isinstance(given, _Messages) else given
    if isinstance(why, Unreadable):
        end_with(context, why.status, f"The message cannot be read: {why.reason}.")
