"""gRPC messages that are none: the caller's fault, and told so.

grpcio answers bytes that do not parse with UNKNOWN or INTERNAL, and a traceback in the log, as if the
handler were broken. Here they end their call with INVALID_ARGUMENT.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Decode: TypeAlias = Callable[[bytes], object]


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Decodes what comes in, in place of grpcio."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, which is given messages as before."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = handler.request_deserializer
        make, behaviour = _parts(handler)
        decoded = _decoded_all if handler.request_streaming else _decoded_one
        if inspect.isasyncgenfunction(behaviour):

            async def generate(request: object, context: Context) -> AsyncGenerator[object]:
                async with aclosing(behaviour(await decoded(request, decode, context), context)) as answers:
                    async for answer in answers:
                        yield answer

            return make(generate, None, handler.response_serializer)

        async def respond(request: object, context: Context) -> object:
            return await behaviour(await decoded(request, decode, context), context)

        return make(respond, None, handler.response_serializer)


def _parts(
    handler: grpc.RpcMethodHandler,
) -> tuple[Callable[..., grpc.RpcMethodHandler], Callable[..., object]]:
    """What makes a handler of this kind, and what this one does."""
    for make, behaviour in (
        (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    ):
        if behaviour is not None:
            return make, behaviour
    raise AssertionError("a handler does something")


async def _decoded_one(request: bytes, decode: Decode, context: Context) -> object:
    try:
        return decode(request)
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"The message cannot be read: {error}.")
        raise AssertionError("abort always raises") from None


async def _decoded_all(
    requests: AsyncIterator[bytes], decode: Decode, context: Context
) -> AsyncIterator[object]:
    return _each(requests, decode, context)


async def _each(requests: AsyncIterator[bytes], decode: Decode, context: Context) -> AsyncIterator[object]:
    async for request in requests:
        yield await _decoded_one(request, decode, context)
