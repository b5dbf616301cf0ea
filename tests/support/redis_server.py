"""A real redis-server on a free port of its own, which can be killed, stopped, filled, flushed, promoted and
made a replica."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis

from tests.support.certificates import Authority

PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    PROGRAM is None,
    reason="NO redis-server HERE: shared limits are not tested (apt-get install redis-server)",
)
ACL = ("~{baton*", "+evalsha", "+script|load", "+time", "+@read", "+@write")
"""All that docs/limits.md says a user needs."""


class RedisServer:
    """Keeps nothing on disk, so that a restart forgets."""

    def __init__(
        self,
        tmp: Path,
        password: str | None = None,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        tls: Authority | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """``tls``: who signs its certificate; it then speaks nothing but TLS. ``port``: None for any."""
        self.host = host
        self.port = free_port(host) if port is None else port
        self.url = f"{'redis' if tls is None else 'rediss'}://{host}:{self.port}/0"
        if tls is not None:
            self.url += f"?ssl_ca_certs={tls.pair.certificate}"
        self._tls = tls
        self._tmp = tmp
        self._password = password
        self._options = [*(() if tls is None else self._tls_options(tls)), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def _tls_options(self, authority: Authority) -> Sequence[str]:
        pair = authority.sign(f"redis-{self.port}")
        return (
            *("--tls-port", str(self.port), "--tls-cert-file", str(pair.certificate)),
            *("--tls-key-file", str(pair.key), "--tls-ca-cert-file", str(authority.pair.certificate)),
            *("--tls-auth-clients", "no"),
        )

    def start(self) -> None:
        assert PROGRAM is not None
        options = ["--port", "0" if self._tls else str(self.port), "--bind", self.host, "--save", ""]
        options += ["--appendonly", "no", "--dir", str(self._tmp), "--loglevel", "warning"]
        options += [
            "--repl-diskless-sync-delay",
            "0",
            "--dbfilename",
            f"{self.host}-{self.port}.rdb",
            *self._options,
        ]
        if self._password:
            options += ["--requirepass", self._password]
        self._process = subprocess.Popen([PROGRAM, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self.client().ping()
                return
            except redis.ConnectionError:
                time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def client(self) -> redis.Redis:
        if self._tls is None:
            return redis.Redis(host=self.host, port=self.port, password=self._password)
        authority = str(self._tls.pair.certificate)
        return redis.Redis(
            host=self.host, port=self.port, password=self._password, ssl=True, ssl_ca_certs=authority
        )

    def flush(self) -> None:
        self.client().flushall()

    def fill(self) -> None:
        """No write is taken from now on."""
        self.client().config_set("maxmemory", 1)

    def empty(self) -> None:
        self.client().config_set("maxmemory", 0)

    def follow(self, primary: RedisServer | None) -> None:
        """Be a replica of ``primary``, to which no write is given; None: be a primary again."""
        client = self.client()
        if primary is None:
            client.replicaof("NO", "ONE")
            return
        client.replicaof(primary.host, str(primary.port))
        deadline = time.monotonic() + 60
        while client.info("replication")["master_link_status"] != "up":
            if time.monotonic() > deadline:
                raise TimeoutError("the replica did not catch up")
            time.sleep(0.02)

    def add_user(self, name: str, password: str, *more: str) -> None:
        """One that may do what a router needs (and ``more``), and has this password alone."""
        self._do("ACL", "SETUSER", name, "reset", "on", f">{password}", *ACL, *more)

    def set_password(self, password: str) -> None:
        self.client().config_set("requirepass", password)
        self._password = password

    def drop_clients(self) -> None:
        """As a server does that is restarted, or whose user has gone."""
        self._do("CLIENT", "KILL", "TYPE", "normal")

    def pause(self, seconds: float) -> None:
        """Answer nothing for so long, and then everything."""
        self._do("CLIENT", "PAUSE", str(round(1e3 * seconds)), "ALL")

    def _do(self, *command: str) -> None:
        self.client().execute_command(*command)  # type: ignore[no-untyped-call]

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def free_port(host: str) -> int:
    """One that nobody has at the moment."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
