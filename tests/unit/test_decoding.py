"""Messages that cannot be read, on methods of every kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from baton.net.decoding import DecodingInterceptor
from baton.v1 import inference_pb2 as pb

GOOD = pb.ListModelsResponse(models=["a"]).SerializeToString()
BROKEN = b"\x0a\xff"


async def unary(request: pb.ListModelsResponse, context: object) -> pb.ListModelsResponse:
    return request


async def generated(request: pb.ListModelsResponse, context: object) -> AsyncIterator[pb.ListModelsResponse]:
    yield request
    yield request


async def written(
    request: pb.ListModelsResponse,
    context: grpc.aio.ServicerContext[pb.ListModelsResponse, pb.ListModelsResponse],
) -> None:
    await context.write(request)
    await context.write(request)


async def joined(requests: AsyncIterator[pb.ListModelsResponse], context: object) -> pb.ListModelsResponse:
    return pb.ListModelsResponse(models=[name async for request in requests for name in request.models])


async def echoed(
    requests: AsyncIterator[pb.ListModelsResponse], context: object
) -> AsyncIterator[pb.ListModelsResponse]:
    async for request in requests:
        yield request


METHODS: dict[str, tuple[Callable[..., grpc.RpcMethodHandler[Any, Any]], Callable[..., object], int]] = {
    "unary": (grpc.unary_unary_rpc_method_handler, unary, 1),
    "generated": (grpc.unary_stream_rpc_method_handler, generated, 2),
    "written": (grpc.unary_stream_rpc_method_handler, written, 2),
    "joined": (grpc.stream_unary_rpc_method_handler, joined, 1),
    "echoed": (grpc.stream_stream_rpc_method_handler, echoed, 2),
}


@pytest.mark.parametrize("name", METHODS)
async def test_a_message_that_cannot_be_read(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, method, answers = METHODS[name]
    server = grpc.aio.server(interceptors=[DecodingInterceptor()])
    handler = make(method, pb.ListModelsResponse.FromString, pb.ListModelsResponse.SerializeToString)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    takes_many = name in ("joined", "echoed")

    async def ask(*sent: bytes) -> list[bytes]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/s/m", None, None)(iter(sent))
            return [answer async for answer in call]

    try:
        good = await ask(GOOD, GOOD) if takes_many else await ask(GOOD)
        assert len(good) == answers and all(answer.startswith(GOOD) for answer in good)
        for sent in ([BROKEN], [GOOD, BROKEN] if takes_many else [BROKEN]):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(*sent)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "cannot be read" in (refused.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await channel.unary_unary("/s/none", None, None)(GOOD)
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)
    assert "Traceback" not in caplog.text
