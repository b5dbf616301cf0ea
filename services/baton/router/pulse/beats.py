"""Beats to the workers from outside the event loop, on connections of their own."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from baton.connector.identity import sign_beat
from baton.tls.channels import Dialer
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

NONCE_BYTES = 16
ANSWER_S = 0.5
"""For one beat, and for the connection that the first one needs."""
CALLERS = 16
"""Threads that beat at once. Each has to win the interpreter from the busy event loop a few times for a beat,
which takes 5 ms each time: 256 workers hear of it within 0.4 s, one after the other it would be 2 s."""
MOST_SUSPECTS = CALLERS // 2
"""Threads for workers that did not hear the beat before: those that hang must leave room for the others."""
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", round(1e3 * ANSWER_S)),  # so long a connection may take, too
    ("grpc.max_reconnect_backoff_ms", 500),
)


def new_nonce() -> bytes:
    """What the beats of one stream are bound to."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(eq=False, slots=True)
class _Line:
    """A worker with a stream of ours."""

    address: str
    incarnation: str
    nonce: bytes
    channel: grpc.Channel | None = None
    count: int = 0
    under_way: bool = False
    """A beat is, and as long as it is there is no other."""
    failures: int = 0
    """Beats in a row that were not heard, up to the last."""


class Beats:
    """The beats of one router id. The event loop says to whom; the rest is for one other thread, which never
    waits for a worker."""

    def __init__(self, router_id: str, cluster_key: bytes, dialer: Dialer) -> None:
        """``dialer``: one that no other thread uses."""
        self._router_id = router_id
        self._cluster_key = cluster_key
        self._dialer = dialer
        self._lock = threading.Lock()
        self._lines: set[_Line] = set()
        self._open: set[_Line] = set()
        """Workers with a connection; some may have left."""
        self._callers: ThreadPoolExecutor | None = None

    @contextmanager
    def to(self, address: str, incarnation: str, nonce: bytes) -> Iterator[None]:
        """While this lasts, a worker that greeted as ``incarnation`` has a stream begun with ``nonce``."""
        line = _Line(address, incarnation, nonce)
        with self._lock:
            self._lines.add(line)
        try:
            yield
        finally:
            with self._lock:
                self._lines.discard(line)

    def send(self) -> None:
        """Let every worker hear that the router lives, on connections that are made where there are none."""
        with self._lock:
            lines = sorted(self._lines, key=lambda line: line.failures)
        for gone in self._open.difference(lines):
            self._hang_up(gone)
        if self._callers is None:
            self._callers = ThreadPoolExecutor(CALLERS, thread_name_prefix="beat")
        suspects = sum(line.under_way and line.failures > 0 for line in lines)
        for line in lines:
            if line.under_way or (line.failures and suspects >= MOST_SUSPECTS):
                continue
            suspects += line.failures > 0
            line.under_way = True
            self._callers.submit(self._tell, line, self._channel(line))

    def rest(self) -> None:
        """Close the connections and end the threads: the event loop speaks for itself."""
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
        """One beat, and until it is answered. In a thread of its own."""
        line.count += 1
        proof = sign_beat(self._cluster_key, self._router_id, line.incarnation, line.nonce, line.count)
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
