"""What a gRPC call must show, and wait for, before its message is read.

grpcio reads a message whole before a method hears of the call, and has no bound for how many are under way.
Here the key is looked at by the call's metadata alone, a call that is refused ends without its message, and
messages are read by a few calls at a time.
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

from baton.decoding import DecodingInterceptor, Handler, handler_parts
from baton.message_bounds import MessageBounds
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError
from baton.router.api.service import CompletionService
from baton.router.grpc_errors import Ending
from baton.router.grpc_messages import MessageRoom
from baton.rpc_status import Context
from baton.v1 import inference_pb2 as pb

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""Methods for probes, which have no key."""

MOST_CALLS = 16_384
"""Calls that are open at a time, streams of tokens included."""
MOST_OPEN_CALLS = 256
"""Calls of `OPEN_METHODS` among them."""
OPEN_CALL_S = 600.0
"""How long one of those may last. Whoever watches the health then asks again, as gRPC's clients do."""

MOST_STREAMS = 128
"""Calls of one connection that are open at a time; further ones wait in the client, and a client with more
opens another connection. Whoever opens calls and resets them at once is held to as many at a time: with 4,096
one such connection took seconds from all others."""
MOST_METADATA_BYTES = 16 * 1024
HANDSHAKE_MS = 10_000
"""From the opening of a connection until HTTP/2 is spoken on it."""
IDLE_MS = 120_000
"""After so long without a call a connection is closed; clients open another one with their next call."""
DESCRIPTORS_SHARE = 4
"""Connections may have one of so many of the process's descriptors."""
MOST_CONNECTIONS = 16_384

_Given: TypeAlias = bytes | AsyncIterator[bytes]

_GENERATE = f"{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
"""The endpoint whose requests are counted, and told to the audit log."""


def connection_options() -> list[tuple[str, int]]:
    """Options for ``grpc.aio.server`` that bound what connections may take, key or none."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MOST_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_allowed_incoming_connections", min(descriptors // DESCRIPTORS_SHARE, MOST_CONNECTIONS)),
    ]


def interceptors_for(*services: CompletionService) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
    """What stands before the methods of a server of ``services``."""
    bounds = {f"/{_GENERATE}": (pb.GenerateRequest.DESCRIPTOR, MessageBounds())}
    return [FrontInterceptor(Catalogue(services)), DecodingInterceptor(bounds)]


class FrontInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets nobody in without a known key, where there are keys, and bounds what those that come in may send
    at a time. To be the first of a server's interceptors."""

    def __init__(self, catalogue: Catalogue, room: MessageRoom | None = None) -> None:
        self._catalogue = catalogue
        self._room = room or MessageRoom()
        self._calls = 0
        self._open_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler with bounds before it, or one that ends the call unread."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        try:
            tenant = self._admit(method, text_of(handler_call_details.invocation_metadata))
        except ApiError as error:
            return self._refusing(method, Ending.of(error))
        return self._bounded(handler, method, tenant)

    def _admit(self, method: str, metadata: dict[str, str]) -> str | None:
        """The name of the tenant that calls; None: a probe, whoever it is. Raises ApiError."""
        if self._calls >= MOST_CALLS:
            raise _busy(f"{MOST_CALLS} calls are open")
        if method in OPEN_METHODS:
            if self._open_calls >= MOST_OPEN_CALLS:
                raise _busy(f"{MOST_OPEN_CALLS} calls of the health service are open")
            return None
        authentication = self._catalogue.authentication
        return authentication.client(metadata.get("authorization"), metadata.get("x-api-key")).tenant.name

    def _refusing(self, method: str, ending: Ending) -> Handler:
        """A handler that ends its call without reading what was sent."""
        if method == f"/{_GENERATE}":
            self._note(ending.status)

        async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
            ending.end(context)

        return cast(Handler, grpc.stream_stream_rpc_method_handler(refuse, None, None))

    def _note(self, status: int) -> None:
        """Count a request that no method hears of."""
        self._catalogue.metrics.requests.labels(_GENERATE, str(status)).inc()
        if (audit := self._catalogue.audit) is not None:
            record = audit.begin(f"grpc-{uuid.uuid4().hex}", endpoint=_GENERATE)
            record.status = status
            audit.end(record)

    def _bounded(self, handler: Handler, method: str, tenant: str | None) -> Handler:
        """``handler`` as one that is counted, and for which a single message is read here."""
        _, behaviour = handler_parts(handler)
        streams = handler.request_streaming
        serialize = handler.response_serializer
        if inspect.isasyncgenfunction(behaviour):
            generating = cast(Callable[[_Given, Context], AsyncGenerator[object]], behaviour)

            async def generate(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[object]:
                async with self._call(method, context):
                    given = requests if streams else await self._room.read(requests, tenant)
                    if given is not None:
                        async with aclosing(generating(given, context)) as answers:
                            async for answer in answers:
                                yield answer

            return cast(Handler, grpc.stream_stream_rpc_method_handler(generate, None, serialize))
        responding = cast(Callable[[_Given, Context], Awaitable[object]], behaviour)

        async def respond(requests: AsyncIterator[bytes], context: Context) -> object:
            async with self._call(method, context):
                given = requests if streams else await self._room.read(requests, tenant)
                return None if given is None else await responding(given, context)
            return None

        to_many = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if to_many else grpc.stream_unary_rpc_method_handler
        return cast(Handler, make(respond, None, serialize))

    @asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[None]:
        """A call that is open: counted, and ended by the errors of what comes before its method."""
        probe = method in OPEN_METHODS
        self._calls += 1
        self._open_calls += probe
        ending: Ending | None = None
        try:
            async with asyncio.timeout(OPEN_CALL_S if probe else None):
                yield
        except TimeoutError:
            ending = Ending.of(_busy(f"the call has lasted {OPEN_CALL_S:g} s"))
        except ApiError as error:
            ending = Ending.of(error)
        finally:
            self._calls -= 1
            self._open_calls -= probe
        if ending is not None:
            if method == f"/{_GENERATE}":
                self._note(ending.status)
            ending.end(context)


def text_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """What a call brings besides its message, as far as that is text."""
    return {name: value for name, value in metadata or () if isinstance(value, str)}


def _busy(why: str) -> ApiError:
    return ApiError(503, f"The router takes no more calls: {why}.", code="too_many_calls")
