"""A server's TLS context that follows its files."""

from __future__ import annotations

import ssl

from baton.net.certificates import TlsFiles
from baton.net.tls_context import FollowedFiles


class FollowingContext(ssl.SSLContext):
    """A context that begins each connection with the current contents of the files. Open connections stay as
    they are. While the files cannot be used, new connections get the last usable contents.

    Event loops wrap a connection with ``wrap_bio``, so this method checks the files. A context changed in
    place would still trust an authority that was removed from the file.
    """

    def __new__(cls, files: TlsFiles) -> FollowingContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles) -> None:
        self._contexts = FollowedFiles(files, files.context)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        self._contexts.follow()
        return self._contexts.now.wrap_bio(incoming, outgoing, server_side, server_hostname, session)
