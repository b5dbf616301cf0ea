"""A real redis-server on a free port of its own, which can be killed, stopped, filled and flushed."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    PROGRAM is None,
    reason="NO redis-server HERE: shared limits are not tested (apt-get install redis-server)",
)


class RedisServer:
    """Keeps nothing on disk, so that a restart forgets."""

    def __init__(self, tmp: Path, password: str | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._tmp = tmp
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PROGRAM is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        options += ["--dir", str(self._tmp), "--loglevel", "warning"]
        if self._password:
            options += ["--requirepass", self._password]
        self._process = subprocess.Popen([PROGRAM, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                self.client().ping()
                return
            except redis.ConnectionError:
                time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self._password)

    def flush(self) -> None:
        self.client().flushall()

    def fill(self) -> None:
        """No write is taken from now on."""
        self.client().config_set("maxmemory", 1)

    def empty(self) -> None:
        self.client().config_set("maxmemory", 0)

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
