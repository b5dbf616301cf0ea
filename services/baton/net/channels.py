"""gRPC channels and ports, with credentials that follow their files."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from baton.net.certificates import Pem, TlsFiles
from baton.net.tls_context import FollowedFiles

ChannelOptions = Sequence[tuple[str, int | str]]

STREAM_OPTIONS: ChannelOptions = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A worker that is started again at the address of a dead worker is called at once. The channels of a
    # process otherwise share the backoff of an address: up to two minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
"""The channel options of a long-lived stream to a worker."""


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return the credentials of a port. gRPC asks at each connection whether the files have changed."""
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
    """Listen on ``address``, with TLS if ``files`` are given, and return the port. Raises RuntimeError, as
    gRPC does."""
    if files is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(files))


class Dialer:
    """Makes the channels of one service to other services."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        """``files``: None for channels without TLS."""
        self._files = files
        self._pem = None if files is None else FollowedFiles(files, files.read)

    def another(self) -> Dialer:
        """Return a dialer with the same files, for another thread."""
        return Dialer(self._files)

    def channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """Return a new channel, with the current contents of the files."""
        credentials, options = self._credentials(options)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def blocking_channel(self, address: str, options: ChannelOptions) -> grpc.Channel:
        """Return a new channel for a thread without an event loop."""
        credentials, options = self._credentials(options)
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def _credentials(self, options: ChannelOptions) -> tuple[grpc.ChannelCredentials | None, ChannelOptions]:
        """Return the credentials, None without TLS, and the options completed for them."""
        if self._pem is None or self._files is None:
            return None, options
        self._pem.follow()
        pem = self._pem.now
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        named = self._files.server_name
        if named is not None:
            options = [*options, ("grpc.ssl_target_name_override", named)]
        return credentials, options
