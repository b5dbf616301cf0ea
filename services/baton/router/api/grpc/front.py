"""Checks of a gRPC call, and bounds on it, before its message is read.

grpcio reads a message whole before it calls the method, and has no bound on how many messages are under way.
Here the key is checked by the call's metadata alone, a call that is refused ends without its message, and
only a few messages are read at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import resource
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias, cast

import grpc

from baton.net.addresses import counted_peer
from baton.net.decoding import DecodingInterceptor, Handler, handler_parts
from baton.net.message_bounds import MessageBounds
from baton.net.rpc_status import Context
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError
from baton.router.api.grpc.errors import Ending
from baton.router.api.grpc.messages import MessageRoom
from baton.router.api.grpc.probes import PROBES, WATCH, ProbeRoom
from baton.router.api.service import CompletionService
from baton.router.security.client import Client
from baton.v1 import inference_pb2 as pb

MAX_CALLS = 16_384
"""The most calls that are open at a time but for probes, streams of tokens included."""

MAX_STREAMS = 128
"""The most calls of one connection that are open at a time; further ones wait in the client, and a client
with more opens another connection. A client that opens calls and resets them at once has the same bound: with
4,096 one such connection took seconds from all others."""
MAX_METADATA_BYTES = 16 * 1024
HANDSHAKE_MS = 10_000
"""The time from the opening of a connection within which HTTP/2 must be spoken on it, in milliseconds."""
IDLE_MS = 120_000
"""The time without a call after which a connection is closed, in milliseconds; clients open another one with
their next call."""
DESCRIPTORS_SHARE = 4
"""The process's file descriptors per descriptor that connections may have."""
MAX_CONNECTIONS = 16_384

_Given: TypeAlias = bytes | AsyncIterator[bytes]

_GENERATE = f"{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
"""The endpoint whose requests are counted, and written to the audit log."""


def connection_options() -> list[tuple[str, int]]:
    """Return options for ``grpc.aio.server`` that bound what connections may take, with a key or without."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_allowed_incoming_connections", min(descriptors // DESCRIPTORS_SHARE, MAX_CONNECTIONS)),
    ]


def interceptors_for(*services: CompletionService) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
    """Return the interceptors of a server of ``services``."""
    bounds = {f"/{_GENERATE}": (pb.GenerateRequest.DESCRIPTOR, MessageBounds())}
    return [FrontInterceptor(Catalogue(services)), DecodingInterceptor(bounds)]


class FrontInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls without a known key, where there are keys, and bounds what other calls may send at a
    time. Must be the first of a server's interceptors."""

    def __init__(
        self, catalogue: Catalogue, room: MessageRoom | None = None, probes: ProbeRoom | None = None
    ) -> None:
        self._catalogue = catalogue
        self._room = room or MessageRoom()
        self._probes = probes or ProbeRoom()
        self._calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the method's handler with bounds before it, or a handler that ends the call unread."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        try:
            client = self._admit(method, text_of(handler_call_details.invocation_metadata))
        except ApiError as error:
            return self._refusing(method, Ending.of(error))
        return self._bounded(handler, method, client)

    def _admit(self, method: str, metadata: dict[str, str]) -> Client | None:
        """Return who calls; None for a probe, from anybody. Raises ApiError."""
        if method in PROBES:
            return None
        if self._calls >= MAX_CALLS:
            raise _busy(f"{MAX_CALLS} calls are open")
        authentication = self._catalogue.authentication
        return authentication.client(metadata.get("authorization"), metadata.get("x-api-key"))

    def _refusing(self, method: str, ending: Ending) -> Handler:
        """Return a handler that ends its call without reading what was sent."""

        async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
            self._note(method, ending.status, None, context)
            ending.end(context)

        return cast(Handler, grpc.stream_stream_rpc_method_handler(refuse, None, None))

    def _note(self, method: str, status: int, client: Client | None, context: Context) -> None:
        """Count a request that reaches no method."""
        if method != f"/{_GENERATE}":
            return
        self._catalogue.metrics.requests.labels(_GENERATE, str(status)).inc()
        if (audit := self._catalogue.audit) is not None:
            address = counted_peer(context.peer())
            record = audit.begin(f"grpc-{uuid.uuid4().hex}", endpoint=_GENERATE, address=address)
            record.status, record.client = status, client
            audit.end(record)

    def _bounded(self, handler: Handler, method: str, client: Client | None) -> Handler:
        """Return ``handler`` with its calls counted, and a single message, if it takes one, read here."""
        _, behaviour = handler_parts(handler)
        streams = handler.request_streaming
        serialize = handler.response_serializer
        if inspect.isasyncgenfunction(behaviour):
            generating = cast(Callable[[_Given, Context], AsyncGenerator[object]], behaviour)

            async def generate(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[object]:
                async with self._call(method, client, context):
                    given = requests if streams else await self._message(requests, client, context)
                    if given is not None:
                        async with aclosing(generating(given, context)) as answers:
                            async for answer in answers:
                                yield answer

            return cast(Handler, grpc.stream_stream_rpc_method_handler(generate, None, serialize))
        responding = cast(Callable[[_Given, Context], Awaitable[object]], behaviour)

        async def respond(requests: AsyncIterator[bytes], context: Context) -> object:
            async with self._call(method, client, context):
                given = requests if streams else await self._message(requests, client, context)
                if given is None:  # not even an answer of nothing: gRPC would log its attempt to write it
                    raise ApiError(400, "The call has no message.", code="missing_message")
                return await responding(given, context)
            return None

        to_many = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if to_many else grpc.stream_unary_rpc_method_handler
        return cast(Handler, make(respond, None, serialize))

    async def _message(
        self, requests: AsyncIterator[bytes], client: Client | None, context: Context
    ) -> bytes | None:
        if client is None:
            return await self._probes.read(requests, context.peer())
        return await self._room.read(requests, client.tenant.name)

    @asynccontextmanager
    async def _call(self, method: str, client: Client | None, context: Context) -> AsyncIterator[None]:
        """Count an open call, and end it with the errors of what comes before its method."""
        counted = method not in PROBES
        self._calls += counted
        ending: Ending | None = None
        try:
            async with asyncio.timeout(None) as timeout:
                if method == WATCH:
                    with self._probes.watch(context.peer(), timeout):
                        yield
                else:
                    yield
        except TimeoutError:
            ending = Ending.of(_busy("the call has lasted long enough; ask again"))
        except ApiError as error:
            ending = Ending.of(error)
        finally:
            self._calls -= counted
        if ending is not None:
            self._note(method, ending.status, client, context)
            ending.end(context)


def text_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the call's metadata as far as it is text."""
    return {name: value for name, value in metadata or () if isinstance(value, str)}


def _busy(why: str) -> ApiError:
    return ApiError(503, f"The router takes no more calls: {why}.", code="too_many_calls")
