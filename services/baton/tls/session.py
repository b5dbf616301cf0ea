"""TLS 1.3 of connections whose sockets somebody else moves the bytes of: the connectors' data connections.

Both sides prove themselves, by the certificates that services have for gRPC (``--worker-tls-...``). Sessions
are not resumed: no ticket comes behind the greeting, so that what a side hears when nothing is to be said is
the end.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from baton.tls.files import TlsFiles
from baton.tls.following import FollowedFiles


class TlsSession:
    """One end of one connection. What is to be sent comes out, what was received goes in; a session is used
    by one thread at a time. ssl.SSLError, an OSError, when the peer breaks the protocol or proves nothing."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        """``server_name``: whom a caller wants to reach. None: this is the one who is called."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )

    def feed(self, received: bytes | memoryview) -> None:
        self._incoming.write(received)

    def take(self) -> bytes:
        """What is to be sent now."""
        return self._outgoing.read()

    def greet(self) -> bool:
        """As much of the greeting as what was received allows. Whether this end is through with it."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read(self, size: int) -> bytes | None:
        """Up to so many bytes of what the peer said: none when it has ended, None before more is received."""
        try:
            return self._tls.read(size)
        except ssl.SSLWantReadError:
            return None

    def read_into(self, view: memoryview) -> int | None:
        """Likewise: how many bytes, which are in ``view`` from its beginning."""
        try:
            return self._tls.read(view.nbytes, view)  # type: ignore[return-value]  # a count, with a buffer
        except ssl.SSLWantReadError:
            return None

    def write(self, data: bytes | memoryview) -> None:
        """All of it; nothing has to be received for that."""
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[self._tls.write(rest) :]


@dataclass(frozen=True, slots=True)
class _Contexts:
    called: ssl.SSLContext
    calling: ssl.SSLContext


class DataTls:
    """Makes the sessions of one process, with what is in the files then. Who is connected stays so."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._contexts = FollowedFiles(files, lambda: _contexts(files))

    def called(self) -> TlsSession:
        """For a connection that was accepted."""
        self._contexts.follow()
        return TlsSession(self._contexts.now.called, None)

    def calling(self, host: str) -> TlsSession:
        """For a connection to ``host``, which the peer's certificate must be for, unless the options give
        another name."""
        self._contexts.follow()
        # A zone is this machine's own business.
        name = self._files.server_name or host.partition("%")[0]
        return TlsSession(self._contexts.now.calling, name)


def _contexts(files: TlsFiles) -> _Contexts:
    called, calling = files.context(), files.client_context()
    for context in (called, calling):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    called.num_tickets = 0
    return _Contexts(called, calling)
