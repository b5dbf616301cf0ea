"""The parent of a router's processes: it holds the ports, starts the processes, and restarts dead ones."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NoReturn

from baton.net import sockets
from baton.process import options
from baton.process.ending import end_process
from baton.process.options import StartError, UserError
from baton.process.parent_death import exit_with_parent
from baton.process.ready import RouterReady, announce
from baton.router.config import RouterConfig
from baton.router.processes.slot import ProcessSlot

log = logging.getLogger(__name__)

LOOK_S = 0.1
RESTART_S = 0.5
MAX_DEATHS, WITHIN_S = 4, 60.0
"""A router that loses ``MAX_DEATHS`` processes within ``WITHIN_S`` seconds ends, so that its supervisor
notices."""
HANGS_S = 30.0
"""The time after which a process whose event loop does not run is killed, in seconds: connections wait for
it."""
STOPS = (signal.SIGTERM, signal.SIGINT)

Listen = Callable[[RouterConfig, bool], socket.socket]
"""Opens a listener on the HTTP port. True: the port is shared with other listeners."""
Serve = Callable[[RouterConfig, ProcessSlot], NoReturn]
"""Runs one process until it is told to stop, and ends it. Raises UserError if it cannot start."""


@dataclass(slots=True)
class _Seat:
    """The slot of a process, and the process that has it now."""

    index: int
    listener: socket.socket
    process: ForkProcess | None = None
    ready: Event | None = None
    restarts: int = 0
    beat: Synchronized[float] | None = None
    """The time the process's event loop ran last, by ``time.monotonic``, once the process is ready."""
    due: float = 0.0
    """The time the next process is started, while there is none."""

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.ready.is_set()


class Parent:
    """The parent, which runs ``config.processes`` processes. It has one thread and no event loop, so it can
    fork at any time."""

    def __init__(self, config: RouterConfig, serve: Serve, listen: Listen) -> None:
        self._config = config
        self._serve = serve
        self._listen = listen
        self._seats: list[_Seat] = []
        self._directory = Path()
        self._mask: set[int | signal.Signals] = set()
        """The signals that were blocked before ``run``."""
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._announced = False
        self._stopping = False
        self._status = 0

    def run(self) -> int:
        """Run until a signal, or until a process cannot start. Returns the exit status of the first process
        that failed, or 0. Raises StartError when a port cannot be bound."""
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, STOPS))
        with contextlib.ExitStack() as stack:
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, self._mask)
            self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-router-")))
            self._config = replace(self._config, grpc_port=stack.enter_context(_held_grpc_port(self._config)))
            # Unlike a shared listener, this one fails if another program listens on the port.
            with contextlib.closing(self._listen(self._config, False)) as alone:
                port = alone.getsockname()[1]
            self._config = replace(self._config, port=port)
            for index in range(self._config.processes):
                listener = stack.enter_context(contextlib.closing(self._listen(self._config, True)))
                self._seats.append(_Seat(index, listener))
            self._watch()
        return self._status

    def _watch(self) -> None:
        while not self._stopping or any(seat.process for seat in self._seats):
            for seat in self._seats:
                self._look_after(seat)
            if not self._announced and not self._stopping and all(seat.is_ready for seat in self._seats):
                self._announce()
            if signal.sigtimedwait(STOPS, LOOK_S):
                self._stop()

    def _look_after(self, seat: _Seat) -> None:
        now = time.monotonic()
        if seat.process is None:
            if not self._stopping and now >= seat.due:
                self._start(seat, now)
        elif seat.process.exitcode is not None:
            self._ended(seat, seat.process.exitcode, now)
        elif seat.is_ready and seat.beat is not None and now - seat.beat.value > HANGS_S:
            log.error("process %d of this router has done nothing for %.0f s", seat.index, HANGS_S)
            seat.process.kill()

    def _start(self, seat: _Seat, now: float) -> None:
        context = multiprocessing.get_context("fork")
        seat.ready, seat.beat = context.Event(), context.Value("d", now)
        place = ProcessSlot(
            seat.index,
            self._config.processes,
            seat.listener,
            self._directory,
            seat.restarts,
            beat=partial(_beat, seat.beat),
            tell_ready=seat.ready.set,
        )
        seat.process = context.Process(
            target=self._child, args=(place, os.getpid()), name=f"router {seat.index}"
        )
        seat.process.start()

    def _ended(self, seat: _Seat, code: int, now: float) -> None:
        ready = seat.is_ready
        seat.process, seat.ready = None, None
        if self._stopping:
            self._status = self._status or _status_of(code)
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        self._deaths.append(now)
        if not ready:
            self._give_up(f"process {seat.index} of this router did not start: it ended {how}", code)
        elif len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < WITHIN_S:
            self._give_up(
                f"{MAX_DEATHS} processes of this router ended within a minute, the last {how}", code
            )
        else:
            log.error("process %d of this router ended %s: it is started again", seat.index, how)
            seat.due, seat.restarts = now + RESTART_S, seat.restarts + 1

    def _give_up(self, why: str, code: int) -> None:
        log.error("%s; all are ended", why)
        self._status = _status_of(code) or 1
        self._stop()

    def _stop(self) -> None:
        """Tell all processes to stop. Told a second time, they end open requests at once."""
        self._stopping = True
        for seat in self._seats:
            seat.listener.close()  # or clients would wait on a listener that nobody accepts from
            if seat.process is not None:
                seat.process.terminate()

    def _announce(self) -> None:
        self._announced = True
        config = self._config
        grpc = None if config.grpc_port < 0 else options.join_address(config.host, config.grpc_port)
        http = sockets.own_address(self._seats[0].listener)
        announce(RouterReady(http, grpc))
        log.info("%d router processes ready at %s", config.processes, http)

    def _child(self, place: ProcessSlot, parent: int) -> None:
        """Run in the new process."""
        os.setsid()  # only the parent must get Ctrl-C: a second signal here would end open requests at once
        exit_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for seat in self._seats:
            if seat.index != place.index:
                seat.listener.close()
        try:
            self._serve(self._config, place)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            end_process(1)


def _beat(at: Synchronized[float]) -> None:
    at.value = time.monotonic()  # the same clock in all processes of a machine


def _status_of(code: int) -> int:
    """Return the exit status as a shell reports it: 128 plus the number of a signal."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _held_grpc_port(config: RouterConfig) -> Iterator[int]:
    """Hold the gRPC port, which each process opens itself, against other programs. Yields the port, -1 for
    none."""
    if config.grpc_port < 0:
        yield -1
        return
    try:
        with sockets.listen(config.host, config.grpc_port) as alone:
            family, place = alone.family, alone.getsockname()
        with socket.socket(family, socket.SOCK_STREAM) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(place)
            yield place[1]
    except OSError as error:
        where = options.join_address(config.host, config.grpc_port)
        raise StartError(f"cannot listen on {where}: {error.strerror or error}") from error
