"""gRPC messages that are none: the caller's fault, and told so.

grpcio answers bytes that do not parse with UNKNOWN or INTERNAL, and a traceback in the log, as if the
handler were broken. Here they end their call with INVALID_ARGUMENT.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias, cast

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
                async with aclosing(generating(await _read(request, decode, context), context)) as answers:
                    async for answer in answers:
                        yield answer

            return make(generate, None, handler.response_serializer)
        responding = cast(Callable[[object, Context], Awaitable[object]], behaviour)

        async def respond(request: Request, context: Context) -> object:
            return await responding(await _read(request, decode, context), context)

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


async def _read(request: Request, decode: Decode, context: Context) -> object:
    """The message, or the messages as they come."""
    return (
        await _one(request, decode, context)
        if isinstance(request, bytes)
        else _each(request, decode, context)
    )


async def _one(request: bytes, decode: Decode, context: Context) -> object:
    try:
        return decode(request)
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"The message cannot be read: {error}.")
        raise AssertionError("abort always raises") from None


async def _each(requests: AsyncIterator[bytes], decode: Decode, context: Context) -> AsyncGenerator[object]:
    async for request in requests:
        yield await _one(request, decode, context)
