"""TLS and mTLS of HTTP, of gRPC and between the services, with files that change."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton.net.certificates import TlsFiles
from baton.net.channels import Dialer, add_port
from baton.net.https import FollowingContext
from baton.process.options import ConfigError
from baton.router.config import RouterConfig
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from baton.worker.config import WorkerConfig
from tests.support.api_server import until
from tests.support.certificates import Authority, Pair
from tests.support.local_worker import LocalWorker, answer, local_ring


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("theirs"), "stranger")


async def _hello(request: Request) -> Response:
    return PlainTextResponse(request.url.scheme)


@asynccontextmanager
async def serving(files: TlsFiles) -> AsyncIterator[int]:
    config = uvicorn.Config(Starlette(routes=[Route("/", _hello)]), port=0, log_level="warning")
    config.load()
    config.ssl = FollowingContext(files)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.pair.certificate))
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


async def get(port: int, context: ssl.SSLContext) -> str:
    async with httpx.AsyncClient(verify=context) as client:
        return (await client.get(f"https://127.0.0.1:{port}/")).text


def replace(files: TlsFiles, pair: Pair) -> None:
    for path, new in ((files.certificate, pair.certificate), (files.key, pair.key)):
        shutil.copy(new, f"{path}.new")
        Path(f"{path}.new").rename(path)


class TestHttp:
    async def test_only_who_trusts_the_authority_connects(
        self, authority: Authority, stranger: Authority
    ) -> None:
        async with serving(authority.files("http-1", mutual=False)) as port:
            assert await get(port, trusting(authority)) == "https"
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await get(port, trusting(stranger))

    async def test_only_known_clients_are_served_with_mtls(
        self, authority: Authority, stranger: Authority
    ) -> None:
        async with serving(authority.files("http-2")) as port:
            assert await get(port, trusting(authority, authority.sign("client"))) == "https"
            for pair in (None, stranger.sign("client")):
                with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                    await get(port, trusting(authority, pair))

    async def test_new_files_are_for_new_connections(
        self, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        files = authority.files("http-3", mutual=False)
        async with serving(files) as port, httpx.AsyncClient(verify=trusting(authority)) as open_before:
            assert (await open_before.get(f"https://127.0.0.1:{port}/")).text == "https"
            await asyncio.to_thread(Path(files.certificate).write_text, "broken")
            assert await get(port, trusting(authority)) == "https", "what was there before is kept"
            assert "cannot be used" in caplog.text
            replace(files, stranger.sign("http"))
            assert await get(port, trusting(stranger)) == "https"
            with pytest.raises(httpx.ConnectError):
                await get(port, trusting(authority))
            # The connection that was open is the same one still.
            assert (await open_before.get(f"https://127.0.0.1:{port}/")).text == "https"

    async def test_an_authority_that_is_replaced_is_trusted_no_longer(
        self, authority: Authority, stranger: Authority
    ) -> None:
        files = authority.files("http-4")
        ca = authority.folder / "clients.crt"
        shutil.copy(authority.pair.certificate, ca)
        async with serving(dataclasses.replace(files, ca=str(ca))) as port:
            ours, theirs = authority.sign("client-4"), stranger.sign("client-4")
            assert await get(port, trusting(authority, ours)) == "https"
            shutil.copy(stranger.pair.certificate, ca)
            assert await get(port, trusting(authority, theirs)) == "https"
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await get(port, trusting(authority, ours))


class _Models(inference_pb2_grpc.InferenceServicer):
    async def ListModels(  # noqa: N802 (the name is the contract's)
        self, request: pb.ListModelsRequest, context: object
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=["m"])

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        raise NotImplementedError


@asynccontextmanager
async def serving_grpc(files: TlsFiles) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(_Models(), server)
    port = add_port(server, "127.0.0.1:0", files)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> list[str]:
    stub = inference_pb2_grpc.InferenceStub(channel)
    return list((await stub.ListModels(pb.ListModelsRequest(), timeout=5)).models)


class TestGrpc:
    async def test_both_sides_must_know_each_other(self, authority: Authority, stranger: Authority) -> None:
        async with serving_grpc(authority.files("grpc-1")) as address:
            async with Dialer(authority.files("caller-1")).channel(address, ()) as channel:
                assert await ask(channel) == ["m"]
            for files in (stranger.files("caller-1"), None):
                async with Dialer(files).channel(address, ()) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await ask(channel)
                    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE

    async def test_the_name_is_compared(self, authority: Authority) -> None:
        caller = authority.files("caller-2")
        async with serving_grpc(authority.files("grpc-2", hosts="DNS:worker.baton")) as address:
            async with Dialer(caller).channel(address, ()) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match=r"127\.0\.0\.1"):
                    await ask(channel)
            named = dataclasses.replace(caller, server_name="worker.baton")
            async with Dialer(named).channel(address, ()) as channel:
                assert await ask(channel) == ["m"]

    async def test_new_files_are_for_new_connections(self, authority: Authority, stranger: Authority) -> None:
        files, caller = authority.files("grpc-3"), authority.files("caller-3")
        ca = authority.folder / "all.crt"
        shutil.copy(authority.pair.certificate, ca)
        files, caller = (dataclasses.replace(each, ca=str(ca)) for each in (files, caller))
        dialer = Dialer(caller)
        async with serving_grpc(files) as address, dialer.channel(address, ()) as before:
            assert await ask(before) == ["m"]
            replace(files, stranger.sign("grpc-3"))
            replace(caller, stranger.sign("caller-3"))
            shutil.copy(stranger.pair.certificate, ca)
            async with dialer.channel(address, (("grpc.use_local_subchannel_pool", 1),)) as after:
                assert await ask(after) == ["m"]
            assert await ask(before) == ["m"], "the connection that was open goes on"


class TestRing:
    async def test_the_services_talk_over_mtls(self, authority: Authority) -> None:
        workers = [LocalWorker(role, tls=authority.files(role)) for role in ("prefill", "decode")]
        async with local_ring(workers, tls=authority.files("router")) as ring:
            tokens = await answer(ring, "r", range(1, 12), 5)
            assert len(tokens) == 5
            assert workers[1].decode.counters.committed == 1, "it was handed on"

    @pytest.mark.deep
    async def test_a_router_of_another_authority_is_told_why(
        self, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "baton.router.fleet.worker_client")
        worker = LocalWorker("both", tls=authority.files("worker"))
        with pytest.raises(TimeoutError):
            async with local_ring([worker], tls=stranger.files("router")):
                pass
        await worker.stop()
        assert "handshake failed" in caplog.text and "certificate" in caplog.text.lower()
        assert len(caplog.records) == 1, "it is said once"


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"ssl_keyfile": "k"}, "--ssl-keyfile: needs --ssl-certfile"),
            ({"ssl_client_auth": "required"}, "--ssl-client-auth: required needs --ssl-certfile"),
            ({"ssl_client_auth": "some"}, "--ssl-client-auth: must be one of none, required"),
            ({"ssl_certfile": "c"}, "--ssl-certfile: needs --ssl-keyfile"),
            ({"worker_tls_certfile": "c", "worker_tls_keyfile": "k"}, "needs --worker-tls-ca-certs"),
            ({"worker_tls_server_name": "n"}, "--worker-tls-server-name: needs --worker-tls-certfile"),
            ({"ssl_certfile": "/no/c", "ssl_keyfile": "k"}, "--ssl-certfile: /no/c: No such file"),
        ],
    )
    def test_what_is_missing_is_told(self, given: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            RouterConfig(workers=("127.0.0.1:1",), **given)  # type: ignore[arg-type]
        if not any("ssl" in option for option in given):
            with pytest.raises(ConfigError, match=message):
                WorkerConfig(role="both", **given)  # type: ignore[arg-type]

    def test_files_that_do_not_fit(self, authority: Authority) -> None:
        one, other = authority.sign("one"), authority.sign("other")
        with pytest.raises(ConfigError, match="cannot be used"):
            RouterConfig(
                workers=("127.0.0.1:1",), ssl_certfile=str(one.certificate), ssl_keyfile=str(other.key)
            )

    def test_no_key_is_in_a_repr(self, authority: Authority) -> None:
        pem = authority.files("secret").read()
        assert "PRIVATE" not in repr(pem)
