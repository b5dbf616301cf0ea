"""gRPC's credentials, which follow their files."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from baton.tls.files import Pem, TlsFiles
from baton.tls.following import FollowedFiles

ChannelOptions = Sequence[tuple[str, int | str]]


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a port; gRPC asks for each connection whether there is something new."""
    pem = FollowedFiles(files, files.read)

    def newest() -> grpc.ServerCertificateConfiguration | None:
        return _server_side(pem.now) if pem.follow() else None

    return grpc.dynamic_ssl_server_credentials(
        _server_side(pem.now),
        newest,  # type: ignore[arg-type]  # the hints leave out that None is "nothing new"
        require_client_authentication=files.mutual,
    )


def _server_side(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.ca)


def add_port(server: grpc.aio.Server, address: str, files: TlsFiles | None) -> int:
    """Listen on ``address``, with TLS if there are files for it. Raises RuntimeError, as gRPC does."""
    if files is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(files))


class Dialer:
    """Makes the channels of one service to others."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        """None: they are plain."""
        self._files = files
        self._pem = None if files is None else FollowedFiles(files, files.read)

    def another(self) -> Dialer:
        """One that does the same, for another thread."""
        return Dialer(self._files)

    def channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A new one, with what is in the files now."""
        credentials, options = self._credentials(options)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def blocking_channel(self, address: str, options: ChannelOptions) -> grpc.Channel:
        """Likewise, for a thread without an event loop."""
        credentials, options = self._credentials(options)
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def _credentials(self, options: ChannelOptions) -> tuple[grpc.ChannelCredentials | None, ChannelOptions]:
        """What to prove oneself by, None where connections are plain; and the options with it."""
        if self._pem is None or self._files is None:
            return None, options
        self._pem.follow()
        pem = self._pem.now
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        named = self._files.server_name
        if named is not None:
            options = [*options, ("grpc.ssl_target_name_override", named)]
        return credentials, options
