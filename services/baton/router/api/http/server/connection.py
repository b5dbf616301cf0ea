"""One HTTP connection: bounds on what it may send before a request, and on what an answer may cost.

Every bound here holds before a key is seen: bytes and lines of a head, the time until the head is complete,
what follows a request that is not answered yet, and what is read of a body that is not wanted.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterator
from typing import cast

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.router.api.errors import ApiError
from baton.router.api.http.server.refusals import Refusal, answer_of
from baton.router.api.http.server.slots import Slot
from baton.telemetry.http import HttpMetrics

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""The most bytes of a request line and its headers; and of whatever else comes between two pieces of a
body."""
MAX_HEAD_LINES = 100
"""The most headers, the trailers of a chunked body included."""
HEAD_S = 10.0
"""The time from a connection's beginning, or from the first byte of a later request, to a complete head, in
seconds."""
MIN_BODY_RATE = 8 << 10
"""The least mean rate at which a body must come after ``BODY_GRACE_S`` seconds, in bytes per second."""
BODY_GRACE_S = 10.0
BODY_PATIENCE_S = 30.0
"""The time that a body may stand still, however fast it came before, in seconds: what has come is held
meanwhile."""
MAX_UNWANTED_BYTES = 64 << 20
"""The most bytes of a body whose request is answered that are read so that the client may see the answer."""
MAX_AHEAD_BYTES = 64 << 10
MAX_AHEAD_REQUESTS = 32
"""The most that may be sent before the answer to an earlier request is complete. Reading goes on meanwhile,
as nothing else shows that a client has left: so what comes must be bounded here."""
LINGER_S = 2.0
MAX_LINGER_BYTES = 1 << 20
"""The most bytes that a refused client may still send, within ``LINGER_S`` seconds: closed at once, the
client might never see why."""

_EXTENSION = "baton.exchange"

_HEAD_BYTES = Refusal(
    "head_bytes",
    ApiError(431, f"The request's head has more than {MAX_HEAD_BYTES} bytes.", code="head_too_large"),
)
_HEAD_LINES = Refusal(
    "head_lines",
    ApiError(431, f"The request has more than {MAX_HEAD_LINES} headers.", code="head_too_large"),
)
_SLOW_HEAD = Refusal(
    "slow_head",
    ApiError(408, f"The request's head was not complete in {HEAD_S:g} s.", code="request_timeout"),
)
_NOT_ONE_HOST = Refusal(
    "malformed",
    ApiError(400, "A request of HTTP/1.1 must have one header Host.", param="host", code="invalid_http"),
)
_MALFORMED = Refusal("malformed", ApiError(400, "The request is not valid HTTP.", code="invalid_http"))


def body_due(before: float, now: float, size: int) -> float:
    """Return when more of a body is due after ``size`` bytes of it have come, if it was due at ``before``
    until then."""
    return min(before + size / MIN_BODY_RATE, now + BODY_PATIENCE_S)


class _RefusedError(Exception):
    """Ends the parsing of refused input."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with bounds, whose requests can find their exchange in their scope."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        slot: Slot,
        metrics: HttpMetrics,
        refusal: ApiError | None = None,
    ) -> None:
        """``refusal``: the only answer that the client gets; None: requests are answered."""
        super().__init__(config, server_state, app_state, _loop)
        self._slot = slot
        self._metrics = metrics
        self._unwelcome = refusal
        self._refused = False
        self._refusal: Refusal | None = None
        """Why parsing was ended."""
        self._answering: RequestResponseCycle | None = None
        """The request whose answer is under way; later requests wait in ``pipeline``."""
        self._message_open = False
        self._head_since: float | None = None
        """The time since which a head is awaited; None: the head is complete, or none has begun."""
        self._lines = 0
        self._fed = 0
        """The bytes that the parser was fed since its last result: the parser keeps the bytes of a head."""
        self._ahead = 0
        self._unwanted_due = 0.0
        self._unwanted = 0
        self._lingering: asyncio.TimerHandle | None = None

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._slot.close = self.abort
        self._head_since = self.loop.time()
        if self._unwelcome is not None:
            self._answer_refusal(self._unwelcome)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_all()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._lingering is not None:
            self._lingering.cancel()
        self._slot.release()
        # Requests refer to their connection. If the connection still referred to them, each would be left to
        # the collector, which runs seldom, with whatever a stranger has put into its head.
        self._answering = self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def never_made(self) -> None:
        """Release the slot of a connection whose TLS handshake failed."""
        self.parser = None  # type: ignore[assignment] # the parser refers to this
        self._slot.release()

    def abort(self) -> None:
        """Close now, without what is unsent."""
        self._leave_all()
        self.transport.abort()

    def look(self, now: float) -> None:
        """End what takes too long. Called about once a second."""
        if self._refused or self._answering is not None:
            return
        if self._head_since is not None:
            if now - self._head_since > HEAD_S:
                self._head_is_late()
        elif self._message_open and (now > self._unwanted_due or self._unwanted > MAX_UNWANTED_BYTES):
            self._metrics.refused.labels("unwanted_body").inc()
            self.transport.close()

    def _head_is_late(self) -> None:
        if self._fed:
            self._refuse(_SLOW_HEAD)
            return
        # The client sent nothing: it could take an answer for that to a request which is on its way.
        self._metrics.refused.labels("silent").inc()
        self.transport.close()

    def _open_cycles(self) -> Iterator[RequestResponseCycle]:
        if self._answering is not None:
            yield self._answering
        for cycle, _ in self.pipeline:
            yield cycle

    def _leave_all(self) -> None:
        """Tell all requests that their client has left. Requests that wait will never start."""
        for cycle in self._open_cycles():
            cycle.disconnected = True
            cycle.message_event.set()
        for cycle, _ in self.pipeline:
            cycle.on_response = _nothing  # the old one refers to this connection
        self.pipeline.clear()

    # --- input

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refused:
            self._linger(len(data))
            return
        if self._answering is not None and not self._answering.more_body:
            self._ahead += len(data)
            if self._ahead > MAX_AHEAD_BYTES:
                self._cut_off_ahead()
                return
        elif self._head_since is None and not self._message_open:
            self._head_since = self.loop.time()
        while data and not self._refused:
            # The parser holds nothing of what it has dealt with: this many bytes may come without a result.
            room = MAX_HEAD_BYTES - self._fed
            self._feed(data if len(data) <= room else data[:room])
            data = data[room:]
        self._slot.hold_head(self._fed if self._head_since is not None else 0)

    def _feed(self, data: bytes) -> None:
        self._fed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or _MALFORMED)
        except httptools.HttpParserUpgrade:
            log.debug("%s asks for another protocol: it is answered in HTTP/1.1", self.client)
        else:
            if self._fed >= MAX_HEAD_BYTES and not self._refused:
                self._refuse(_HEAD_BYTES)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message_open = True
        self._lines = 0
        if self._head_since is None:
            self._head_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if self._lines > MAX_HEAD_LINES:
            self._stop_parsing(_HEAD_LINES)
        if self._head_since is not None:  # else a trailer: headers are checked before the body is read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):  # RFC 9112, 3.2
            self._stop_parsing(_NOT_ONE_HOST)
        before = self.cycle
        super().on_headers_complete()
        self._fed = 0
        self._head_since = None
        if self.cycle is before:
            return
        extensions = self.scope.setdefault("extensions", {})
        # The cycle has the scope: with a strong reference every request would need the collector.
        extensions[_EXTENSION] = {"connection": self, "cycle": weakref.ref(self.cycle)}
        if self.pipeline:
            self.flow.resume_reading()
            if len(self.pipeline) > MAX_AHEAD_REQUESTS:
                self._cut_off_ahead()
                raise _RefusedError

    def on_body(self, body: bytes) -> None:
        self._fed = 0
        if self._answering is None:
            self._unwanted += len(body)
            self._unwanted_due = body_due(self._unwanted_due, self.loop.time(), len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fed = 0
        self._message_open = False
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False  # nothing here speaks another protocol

    # --- answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering = cycle
        self._slot.asks()
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        self._answering = None
        if not self.pipeline:
            self._ahead = 0
            now = self.loop.time()
            self._unwanted_due, self._unwanted = now + BODY_GRACE_S, 0
            if self._head_since is not None:
                self._head_since = now
            self._slot.rests()
        super().on_response_complete()

    # --- refusals

    def _stop_parsing(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _RefusedError

    def _cut_off_ahead(self) -> None:
        """Close a connection that sends too much while an answer is under way: no error can be told, and the
        input is not kept."""
        log.debug("%s sends too much ahead of its answer", self.client)
        self._refused = True
        self._metrics.refused.labels("sent_ahead").inc()
        self.abort()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer the input with an error, if the client can tell what the answer is for, and read nothing
        more."""
        if self._refused:
            return
        log.debug("%s is refused: %s", self.client, refusal.error.message)
        self._metrics.refused.labels(refusal.reason).inc()
        self._refused = True
        cycle = self._answering
        if cycle is None:
            told = self._head_since is None  # input of a body whose request has been answered
        else:
            told = cycle is not self.cycle or not cycle.more_body or cycle.response_started
        if told:
            self.abort()
        else:
            self._answer_refusal(refusal.error)

    def _answer_refusal(self, error: ApiError) -> None:
        self._refused = True
        self._leave_all()
        if self.transport.is_closing():
            return
        path = "" if self.scope is None else self.url.decode("latin-1").partition("?")[0]
        self.transport.write(answer_of(error, path, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._unwanted = 0
        self._lingering = self.loop.call_later(LINGER_S, self.transport.abort)

    def _linger(self, size: int) -> None:
        self._unwanted += size
        if self._unwanted > MAX_LINGER_BYTES:
            self.transport.abort()


class Exchange:
    """One request on a connection, and its answer."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        """Send a piece of the body as ASGI's ``send`` would, without the layers that wrap it: there is a
        piece for every token. The head must have been sent.

        Returns False if the piece would have to wait, as the client has not read for long, or cannot be sent
        this way.
        """
        cycle = self._cycle
        if self._connection.flow.write_paused or not cycle.chunked_encoding:
            return False
        if data and not cycle.disconnected:  # an empty chunk would end the body
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def abort(self) -> None:
        """Close the connection now, without what is unsent."""
        self._connection.transport.abort()


def exchange_of(scope: Scope) -> Exchange | None:
    """Return the exchange of the request of ``scope``, which must be under way; None if another server runs
    the application."""
    found = _found(scope)
    return None if found is None else Exchange(*found)


def has_whole_body(scope: Scope) -> bool:
    """Whether the whole body of the request of ``scope`` has come. False if another server runs the
    application."""
    found = _found(scope)
    return found is not None and not found[1].more_body


def _found(scope: Scope) -> tuple[Connection, RequestResponseCycle] | None:
    found = (scope.get("extensions") or {}).get(_EXTENSION)
    if found is None:
        return None
    cycle = cast("weakref.ref[RequestResponseCycle]", found["cycle"])()
    return None if cycle is None else (cast(Connection, found["connection"]), cycle)


def _nothing() -> None:
    pass
