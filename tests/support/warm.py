"""Processes of Baton that do not spend most of their start on importing torch.

One process has imported what Baton's commands import; it forks when it is asked to, and what it forks runs
a module as ``python -m`` would. That spares 3.3 of the 3.8 seconds of CPU of a worker's start, and
tests start hundreds of workers. Measurements, and tests of the command itself, start the real thing.

Run as ``python -m tests.support.warm SOCKET``: ends, and kills what it has forked, when its input ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

ADDRESS = "BATON_TESTS_WARM"
"""The variable that names the socket."""
MODULES = ("baton.cli.main", "baton.worker.start", "baton.router.main", "baton.simulated.main")
LARGEST = 1 << 20
START_S = 300.0


class WarmProcess:
    """What is used of ``subprocess.Popen`` in tests. The connection it was asked for on tells of its end."""

    def __init__(
        self, address: str, argv: Sequence[str], environment: Mapping[str, str], errors: int
    ) -> None:
        """``argv``: a module and its arguments. ``errors``: the file of its standard error."""
        request = {"argv": argv, "environment": dict(environment), "directory": str(Path.cwd())}
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [writing, errors])
        finally:
            os.close(writing)
        self.stdout: IO[str] = os.fdopen(reading)
        self.pid = int(self._connection.recv(LARGEST))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, or minus the signal that killed it. Raises subprocess.TimeoutExpired. Several
        threads may wait."""
        if self.returncode is None:
            readable = select.poll()
            readable.register(self._connection, select.POLLIN)
            if not readable.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._connection.recv(LARGEST, socket.MSG_PEEK))
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Nothing is left of it here."""
        self.stdout.close()
        self._connection.close()


@contextmanager
def warm_processes() -> Iterator[None]:
    """Within, services are forked from a process that is warm."""
    with tempfile.TemporaryDirectory() as directory:
        address = Path(directory, "warm")
        process = subprocess.Popen([sys.executable, "-m", __name__, str(address)], stdin=subprocess.PIPE)
        try:
            deadline = time.monotonic() + START_S
            while not address.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the warm process is not there: {process.returncode}")
                time.sleep(0.02)
            os.environ[ADDRESS] = str(address)
            yield
        finally:
            os.environ.pop(ADDRESS, None)
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


class _Forker:
    """The warm process."""

    def __init__(self, address: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._waking, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._asked: dict[int, socket.socket] = {}
        # A fork right after Ctrl-C must not be without: the one who asked ends it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno())
        beside = Path(f"{address}.new")
        self._listening.bind(str(beside))
        self._listening.listen(64)
        beside.rename(address)  # whoever sees it can connect

    def serve(self) -> list[str] | None:
        """Returns in each process that is forked, with its arguments, and here at the end."""
        with selectors.DefaultSelector() as selector:
            for each in (self._listening, self._waking, sys.stdin):
                selector.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listening:
                        connection, _ = self._listening.accept()
                        argv = self._fork(connection)
                        if argv is not None:
                            return argv
                    elif key.fileobj is self._waking:
                        self._waking.recv(4096)
                        self._reap()
                    else:
                        return None

    def _fork(self, connection: socket.socket) -> list[str] | None:
        message, files, _, _ = socket.recv_fds(connection, LARGEST, 2)
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            self._become(request["environment"], request["directory"], files)
            connection.close()
            return list(request["argv"])
        for file in files:
            os.close(file)
        self._asked[pid] = connection
        connection.send(str(pid).encode())
        return None

    def _become(self, environment: Mapping[str, str], directory: str, files: Sequence[int]) -> None:
        """In the process that was forked: nothing is left of what was there for forking."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (self._listening, self._waking, self._woken, *self._asked.values()):
            each.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for file, number in zip((nothing, *files), range(3), strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)

    def _reap(self) -> None:
        while self._asked:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._asked.pop(pid) as connection, suppress(OSError):  # nobody may wait for it any more
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())

    def kill_all(self) -> None:
        for pid in self._asked:
            os.kill(pid, signal.SIGKILL)


def main(address: str) -> NoReturn:
    """Import everything, then fork."""
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    forker = _Forker(address)
    argv = forker.serve()
    if argv is None:
        forker.kill_all()
    else:
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(sys.argv[1])
