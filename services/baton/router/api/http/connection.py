"""What a response may know of the connection it goes out on, and do to it."""

from __future__ import annotations

from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "baton.connection"


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which its requests can find in their scope."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions = cast("dict[str, dict[object, object] | None]", self.scope.setdefault("extensions", {}))
        extensions[_EXTENSION] = {"connection": self}

    @property
    def paused(self) -> bool:
        """The client has not read for so long that what is sent would have to wait."""
        return self.flow.write_paused

    def abort(self) -> None:
        """Close it now, without what is unsent."""
        self.transport.abort()


def connection_of(scope: Scope) -> Connection | None:
    """None: the server is not ours, and nothing is known."""
    found = (scope.get("extensions") or {}).get(_EXTENSION)
    return None if found is None else cast(Connection, found["connection"])
