"""The client of Redis: how its connections are dialled, shared, authenticated and dropped. Imported only if
Redis is used: the package is large."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit
from weakref import WeakSet

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, RedisSSLContext, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError

from baton.net.file_watcher import WatchedFiles
from baton.process.options import ConfigError

PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD"
CONNECTIONS = 32
MAX_PASSWORD = 64 << 10
"""Most bytes of a password's file. A longer file is not a password."""
DIAL_S = 1.0
"""The time in which a connection must be made, its host's lookup and TLS included, in seconds. No call waits
so long."""
FRESH_S = 2.0
"""The time for which a connection or a lookup that was too late for one call can be used by the next, in
seconds."""

_Ends: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ResolvedNames:
    """The addresses of Redis's host, found by one lookup at a time, however many dials wait for it.

    A lookup does not end with the dial that began it. Otherwise a slow lookup would be begun again and again,
    each in a thread, and its failure would be lost with the dial.
    """

    def __init__(self) -> None:
        self._lookup: asyncio.Task[list[str]] | None = None
        self._answered_at = 0.0

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return all addresses of ``host``, in the resolver's order. Raises OSError; gaierror for a name that
        does not exist."""
        if _is_address(host):
            return [host]
        loop = asyncio.get_running_loop()
        lookup = self._lookup
        if lookup is None or (lookup.done() and loop.time() - self._answered_at > FRESH_S):
            lookup = self._lookup = loop.create_task(self._ask(host, port), name="redis lookup")
            lookup.add_done_callback(self._answered)
        try:
            return await asyncio.shield(lookup)
        finally:
            if lookup.done() and self._lookup is lookup:
                self._lookup = None

    @staticmethod
    async def _ask(host: str, port: int) -> list[str]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def _answered(self, lookup: asyncio.Task[list[str]]) -> None:
        self._answered_at = lookup.get_loop().time()
        if not lookup.cancelled():
            lookup.exception()  # marks it as retrieved: if no dial waits any more, asyncio must not log it


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class SharedContext:
    """The TLS context of all connections. Making it blocks the event loop for 20 ms, most of the time that a
    dial has, so it is made once, and again when a file that the URL names has changed."""

    def __init__(self) -> None:
        self._context: ssl.SSLContext | None = None
        self._watch: WatchedFiles | None = None

    def get(self, settings: RedisSSLContext) -> ssl.SSLContext:
        """Return the context. ``settings``: those of any connection, as all are alike. Raises OSError."""
        if self._watch is None:
            named = (settings.ca_certs, settings.certfile, settings.keyfile)
            self._watch = WatchedFiles([path for path in named if path is not None])
        if self._context is None or self._watch.changed():
            settings.context = None
            self._context = settings.get()
        return self._context


class _Dialled(Connection):
    """A connection that is dialled in a task apart from the call that needs it.

    A call has some 30 ms, and a dial may take longer when a name is looked up, or a busy machine checks
    certificates. The dial goes on when the call is over, and the next call gets its result. Nor does each
    call abort a handshake, which uvloop logs with a traceback.
    """

    def __init__(self, *, names: ResolvedNames, **options: Any) -> None:
        super().__init__(**options)
        self._names = names
        self._dial: asyncio.Task[_Ends] | None = None
        self._dialled_at = 0.0

    async def _connect(self) -> None:
        dial = self._dial
        if dial is None or self._stale(dial):
            self.hang_up()
            dial = self._dial = asyncio.create_task(self._open(), name="redis dial")
            dial.add_done_callback(self._dialled)
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                reader, writer = await asyncio.shield(dial)
        except BaseException:
            if dial.done() and (dial.cancelled() or dial.exception() is not None):
                self._dial = None
            raise
        self._dial = None
        self._reader, self._writer = reader, writer

    def hang_up(self) -> None:
        """Drop a dialled connection that no call has taken."""
        dial, self._dial = self._dial, None
        if dial is not None:
            dial.add_done_callback(_close)

    def _stale(self, dial: asyncio.Task[_Ends]) -> bool:
        if not dial.done():
            return False
        return dial.cancelled() or dial.exception() is not None or _now() - self._dialled_at > FRESH_S

    async def _open(self) -> _Ends:
        async with asyncio.timeout(DIAL_S):
            addresses = await self._names.addresses(self.host, self.port)
            for address in addresses[:-1]:
                with contextlib.suppress(OSError):
                    return await self._open_at(address)
            return await self._open_at(addresses[-1])

    async def _open_at(self, address: str) -> _Ends:
        reader, writer = await asyncio.open_connection(**{**self._connection_arguments(), "host": address})
        found = writer.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return reader, writer

    def _dialled(self, dial: asyncio.Task[_Ends]) -> None:
        self._dialled_at = _now()
        if not dial.cancelled():
            dial.exception()  # marks it as retrieved: if no call waits any more, asyncio must not log it


def _close(dial: asyncio.Task[_Ends]) -> None:
    if not dial.cancelled() and dial.exception() is None:
        dial.result()[1].close()


def _now() -> float:
    return asyncio.get_running_loop().time()


class _DialledTls(_Dialled, SSLConnection):
    """A dialled connection with TLS, and with the shared context."""

    def __init__(self, *, shared: SharedContext, **options: Any) -> None:
        super().__init__(**options)
        self._shared = shared

    def _connection_arguments(self) -> dict[str, Any]:
        given = Connection._connection_arguments(self)
        return {**given, "ssl": self._shared.get(self.ssl_context), "server_hostname": self.host}


class Pool(BlockingConnectionPool):
    """A pool whose connections can all be dropped at once. ``served`` holds the calls that got a connection:
    no other call can have reached Redis."""

    def __init__(self, *, connection_class: type[Connection], **options: Any) -> None:
        tls = issubclass(connection_class, SSLConnection)
        options["names"] = ResolvedNames()
        if tls:
            options["shared"] = SharedContext()
        super().__init__(connection_class=_DialledTls if tls else _Dialled, **options)
        self.served: WeakSet[asyncio.Future[object]] = WeakSet()
        self._left: WeakSet[AbstractConnection] = WeakSet()
        """Connections in use that are closed when they are released."""

    async def get_connection(self, *about: Any, **options: Any) -> Any:
        connection = await super().get_connection(*about, **options)  # type: ignore[no-untyped-call]
        task = asyncio.current_task()
        assert task is not None
        self.served.add(task)
        return connection

    async def release(self, connection: Any) -> None:
        if connection in self._left:
            self._left.discard(connection)
            await connection.disconnect(nowait=True)
        await super().release(connection)

    async def leave(self) -> None:
        """Drop all connections: the next call dials, with the password and the address of that time. Waits
        for no call."""
        self._left.update(self._in_use_connections)
        for connection in self._available_connections:
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        for connection in self._available_connections:
            if isinstance(connection, _Dialled):
                connection.hang_up()
        await super().aclose()


class PasswordFileError(AuthenticationError):
    """The password's file cannot be used. A RedisError, so that the client closes the connection."""


class Password(CredentialProvider):
    """The current password: from a file, read for each connection, or from the environment."""

    def __init__(self, user: str | None, path: str | None) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return user and password. Raises PasswordFileError."""
        secret = os.environ[PASSWORD_VARIABLE] if self._path is None else self._read(self._path)
        return (self._user, secret) if self._user else (secret,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return user and password, without a thread: a small mounted file is read as fast as a thread is
        woken. Raises PasswordFileError."""
        return self.get_credentials()

    @staticmethod
    def _read(path: str) -> str:
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_PASSWORD + 1)
            if len(data) > MAX_PASSWORD:
                raise PasswordFileError(f"{path} has more than {MAX_PASSWORD} bytes")
            return data.decode().strip()
        except OSError as error:
            raise PasswordFileError(f"{path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError:
            raise PasswordFileError(f"{path} is not UTF-8") from None  # the error quotes the password


def client_of(url: str, password_file: str | None, timeout_s: float) -> Redis:
    """Return a client that connects when it is used, and retries nothing: that is left to the breaker. Raises
    ConfigError for options in ``url`` that a connection cannot have."""
    parts = urlsplit(url)
    user = unquote(parts.username) if parts.username else None
    given = password_file is not None or PASSWORD_VARIABLE in os.environ
    if given:  # the URL's password does not count
        host = parts.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=host))
    try:
        pool = Pool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **({"connection_class": Connection} if parts.scheme == "redis" else {}),
            **({"credential_provider": Password(user, password_file)} if given else {}),
        )
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, RedisError):  # the text may quote a password
        message = "has an option behind the ? that cannot be used; see docs/limits.md for those that can"
        raise ConfigError("redis_url", message) from None
    return Redis(connection_pool=pool)
