"""TLS 1.3 without sockets, for the connectors' data connections, which move the bytes themselves.

Both sides authenticate by the certificates that services have for gRPC (``--worker-tls-...``). Sessions are
not resumed: no ticket follows the handshake, so that bytes that come while none are due mean the end.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from baton.net.certificates import TlsFiles
from baton.net.tls_context import FollowedFiles


class TlsSession:
    """One end of one connection. The caller feeds received bytes and takes the bytes to send; one thread at a
    time. Raises ssl.SSLError, an OSError, when the peer breaks the protocol or cannot be authenticated."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        """``server_name``: the name of the server to reach. None: this end is the server."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )

    def feed(self, received: bytes | memoryview) -> None:
        self._incoming.write(received)

    def take(self) -> bytes:
        """Return the bytes to send now."""
        return self._outgoing.read()

    def greet(self) -> bool:
        """Advance the handshake as far as the received bytes allow. Returns whether this end has finished
        it."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read(self, size: int) -> bytes | None:
        """Return up to ``size`` bytes from the peer: empty when the peer has ended the session, None until
        more is received."""
        try:
            return self._tls.read(size)
        except ssl.SSLWantReadError:
            return None

    def read_into(self, view: memoryview) -> int | None:
        """Read into ``view``, from its beginning. Returns the number of bytes: 0 when the peer has ended the
        session, None until more is received."""
        try:
            return self._tls.read(view.nbytes, view)  # type: ignore[return-value]  # a count, with a buffer
        except ssl.SSLWantReadError:
            return None

    def write(self, data: bytes | memoryview) -> None:
        """Encrypt all of ``data``. Nothing has to be received for that."""
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[self._tls.write(rest) :]


@dataclass(frozen=True, slots=True)
class _Contexts:
    called: ssl.SSLContext
    calling: ssl.SSLContext


class DataTls:
    """Makes the sessions of one process, with the current contents of the files. Open sessions stay as they
    are."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._contexts = FollowedFiles(files, lambda: _contexts(files))

    def called(self) -> TlsSession:
        """Return the session of a connection that was accepted."""
        self._contexts.follow()
        return TlsSession(self._contexts.now.called, None)

    def calling(self, host: str) -> TlsSession:
        """Return the session of a connection to ``host``. The peer's certificate must be for that host,
        unless the options give another name."""
        self._contexts.follow()
        # A zone has a meaning on this machine alone.
        name = self._files.server_name or host.partition("%")[0]
        return TlsSession(self._contexts.now.calling, name)


def _contexts(files: TlsFiles) -> _Contexts:
    called, calling = files.context(), files.client_context()
    for context in (called, calling):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    called.num_tickets = 0
    return _Contexts(called, calling)
