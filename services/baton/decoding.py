"""gRPC messages that are none: the caller's fault, and told so.

grpcio answers bytes that do not parse with UNKNOWN or INTERNAL, and a traceback in the log, as if the
handler were broken. Here they end their call with INVALID_ARGUMENT.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Decode: TypeAlias = Callable[[bytes], object]
Request: TypeAlias = bytes | AsyncIterator[bytes]


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Decodes what comes in, in place of grpcio."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, which is given messages as before."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = cast(Decode, handler.request_deserializer)
        make, behaviour = _parts(handler)
        if inspect.isasyncgenfunction(behaviour):
            generating = cast(Callable[[object, Context], AsyncGenerator[object]], behaviour)

            async def generate(request: Request, context: Context) -> AsyncGenerator[object]:
                given = await _read(request, decode, context)
                with suppress(UnreadableMessageError):
                    async with aclosing(generating(given, context)) as answers:
                        async for answer in answers:
                            yield answer
                await _refuse_the_last(given, context)

            return make(generate, None, handler.response_serializer)
        responding = cast(Callable[[object, Context], Awaitable[object]], behaviour)

        async def respond(request: Request, context: Context) -> object:
            given = await _read(request, decode, context)
            answer = None
            with suppress(UnreadableMessageError):
                answer = await responding(given, context)
            await _refuse_the_last(given, context)
            return answer

        return make(respond, None, handler.response_serializer)


def _parts(handler: Handler) -> tuple[Callable[..., Handler], object]:
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
        self.error: DecodeError | None = None

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> object:
        try:
            message = self._decode(await anext(self._requests))
        except DecodeError as error:
            self.error = error
            raise (StopAsyncIteration if self._begun else UnreadableMessageError) from None
        self._begun = True
        return message


async def _read(request: Request, decode: Decode, context: Context) -> object:
    """The message, or the messages as they come."""
    if not isinstance(request, bytes):
        return _Messages(request, decode)
    try:
        return decode(request)
    except DecodeError as error:
        await _refuse(context, error)


async def _refuse_the_last(given: object, context: Context) -> None:
    """Where it was given messages, and the last could not be read."""
    if isinstance(given, _Messages) and given.error is not None:
        await _refuse(context, given.error)


async def _refuse(context: Context, error: DecodeError) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"The message cannot be read: {error}.")
    raise AssertionError("abort always raises")
