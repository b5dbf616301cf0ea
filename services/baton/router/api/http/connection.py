"""What a response may know of the connection it goes out on, and do to it."""

from __future__ import annotations

import weakref
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "baton.exchange"


class Connection(HttpToolsProtocol):
    """uvicorn's connection, whose requests can find their exchange in their scope."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # not so when the connection is to become another protocol's
            extensions = self.scope.setdefault("extensions", {})
            # The cycle has the scope: with a strong reference every request would leave garbage behind.
            extensions[_EXTENSION] = {"connection": self, "cycle": weakref.ref(self.cycle)}


class Exchange:
    """One request on a connection, and its answer."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        """Send a piece of the body as ASGI's ``send`` would, but for the layers that wrap it: there is a
        piece for every token. False: it would have to wait, as the client has not read for so long, or it
        cannot be sent so. The head must have been sent."""
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
    """Of the request of ``scope``, which must be under way. None: the server is not ours, and nothing is
    known."""
    found = (scope.get("extensions") or {}).get(_EXTENSION)
    if found is None:
        return None
    cycle = cast("weakref.ref[RequestResponseCycle]", found["cycle"])()
    return None if cycle is None else Exchange(cast(Connection, found["connection"]), cycle)
