"""Beats to the workers from outside the event loop, on connections of their own."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from baton.handoff.identity import sign_beat
from baton.net.channels import Dialer
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

NONCE_BYTES = 16
ANSWER_S = 0.5
"""The time in which a beat must be answered, and in which its connection must be made, in seconds."""
CALLERS = 16
"""Threads that send beats. For a beat, a thread has to take the GIL from the busy event loop a few times, 5
ms each: 256 workers get a beat within 0.4 s, and would within 2 s one after the other."""
MAX_SUSPECTS = CALLERS // 2
"""Most threads for workers that did not answer their last beat, so that hanging workers leave threads for the
others."""
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", round(1e3 * ANSWER_S)),  # so long a connection may take, too
    ("grpc.max_reconnect_backoff_ms", 500),
)


def new_nonce() -> bytes:
    """Return a nonce to which the beats of one stream are bound."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(eq=False, slots=True)
class _Line:
    """A worker to which this router has a stream."""

    address: str
    incarnation: str
    nonce: bytes
    key: bytes = field(repr=False)
    channel: grpc.Channel | None = None
    count: int = 0
    under_way: bool = False
    """Whether a beat is under way. There is one at a time."""
    failures: int = 0
    """Beats in a row, up to the last, that were not answered."""


class Beats:
    """The beats of one router id. The event loop registers workers with ``to``; one other thread calls the
    rest, and never waits for a worker."""

    def __init__(self, router_id: str, dialer: Dialer) -> None:
        """``dialer``: a dialer that no other thread uses."""
        self._router_id = router_id
        self._dialer = dialer
        self._lock = threading.Lock()
        self._lines: set[_Line] = set()
        self._open: set[_Line] = set()
        """Workers with an open connection. Some may have left."""
        self._callers: ThreadPoolExecutor | None = None

    @contextmanager
    def to(self, address: str, incarnation: str, nonce: bytes, key: bytes) -> Iterator[None]:
        """Send beats, while the context lasts, to a worker that greeted as ``incarnation`` on a stream begun
        with ``nonce``. ``key``: the cluster key that the worker has proved."""
        line = _Line(address, incarnation, nonce, key)
        with self._lock:
            self._lines.add(line)
        try:
            yield
        finally:
            with self._lock:
                self._lines.discard(line)

    def send(self) -> None:
        """Send a beat to every worker, and open the connections that are missing."""
        with self._lock:
            lines = sorted(self._lines, key=lambda line: line.failures)
        for gone in self._open.difference(lines):
            self._hang_up(gone)
        if self._callers is None:
            self._callers = ThreadPoolExecutor(CALLERS, thread_name_prefix="beat")
        suspects = sum(line.under_way and line.failures > 0 for line in lines)
        for line in lines:
            if line.under_way or (line.failures and suspects >= MAX_SUSPECTS):
                continue
            suspects += line.failures > 0
            line.under_way = True
            self._callers.submit(self._tell, line, self._channel(line))

    def rest(self) -> None:
        """Close the connections and end the threads: the event loop runs again."""
        if self._callers is not None:
            self._callers.shutdown(wait=False, cancel_futures=True)
            self._callers = None
        for line in list(self._open):
            self._hang_up(line)

    def _channel(self, line: _Line) -> grpc.Channel:
        if line.channel is None:
            line.channel = self._dialer.blocking_channel(line.address, CHANNEL_OPTIONS)
            self._open.add(line)
        return line.channel

    def _tell(self, line: _Line, channel: grpc.Channel) -> None:
        """Send one beat and wait for its answer. Runs in a thread of the pool."""
        line.count += 1
        proof = sign_beat(line.key, self._router_id, line.incarnation, line.nonce, line.count)
        beat = pb.RouterBeat(router_id=self._router_id, count=line.count, proof=proof)
        try:
            pb_grpc.RouterPulseStub(channel).Beat(beat, timeout=ANSWER_S)
            line.failures = 0
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel has been closed
            line.failures += 1
            log.debug("worker %s does not hear that this router lives: %s", line.address, error)
        finally:
            line.under_way = False

    def _hang_up(self, line: _Line) -> None:
        self._open.discard(line)
        if line.channel is not None:
            line.channel.close()
        line.channel, line.under_way = None, False
