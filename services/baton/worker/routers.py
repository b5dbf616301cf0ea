"""The streams to the routers: one frame per engine step, with the tokens of all of a router's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from baton.connector.liveness import TEMPO, Pulse, Tempo
from baton.v1 import inference_pb2, worker_pb2
from baton.worker.block_feed import BlockFeed
from baton.worker.bond import Bond

log = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 4096
"""A router this far behind is cut off: it can resume its requests, and the worker's memory stays bounded."""

MOST_ROUTERS = 1024
"""Connected at once."""

SPREAD_S = 0.01
"""Between frames that carry nothing but a long account of blocks."""


class RouterStream:
    """One connected router. Deltas of one event loop turn leave as one frame."""

    def __init__(
        self,
        router_id: str,
        load: Callable[[], worker_pb2.Load],
        tempo: Tempo = TEMPO,
        blocks: BlockFeed | None = None,
        on_cut_off: Callable[[RouterStream], None] = lambda stream: None,
    ) -> None:
        """``blocks``: what the router is told of the prefix cache; None: nothing. ``on_cut_off`` hears when
        the router is given up, as it does not read."""
        self.router_id = router_id
        self.frames: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        self.pulse = Pulse(tempo)
        self.bond: Bond | None = None
        """What makes a beat this router's; None: it never beats."""
        self.drain_noted = False
        """The router knows that this worker drains: it submits nothing more."""
        self.submits_taken = 0
        self.calls_again = True
        """When its stream has ended, and so may be told whatever has changed by a new greeting."""
        self.blocks = blocks
        self._load = load
        self._on_cut_off = on_cut_off
        self._ended = False
        self._again: asyncio.TimerHandle | None = None
        self._pending: list[worker_pb2.TokenDelta] = []
        self._phases: list[worker_pb2.Phases] = []

    def deliver(self, delta: worker_pb2.TokenDelta) -> None:
        if not self._pending and not self._phases:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append(delta)

    def tell_phases(self, phases: worker_pb2.Phases) -> None:
        """In one frame with the deltas of this turn, if there are any."""
        if not self._pending and not self._phases:
            asyncio.get_running_loop().call_soon(self.flush)
        self._phases.append(phases)

    def flush(self) -> None:
        """Queue a frame with what is pending, or only the load report."""
        deltas, self._pending = self._pending, []
        phases, self._phases = self._phases, []
        if self._ended:
            return
        if self.frames.qsize() >= MAX_QUEUED_FRAMES:
            self._cut_off()
            return
        frame = worker_pb2.Frame(deltas=deltas, load=self._load(), phases=phases)
        frame.load.submits_taken = self.submits_taken
        if self.blocks is not None:
            self._tell_blocks(frame, self.blocks)
        self.frames.put_nowait(worker_pb2.WorkerMessage(frame=frame))

    def _cut_off(self) -> None:
        """What is queued goes too: the stream ends as soon as it is read again."""
        log.warning("router %s does not read its frames: cut off", self.router_id)
        while not self.frames.empty():
            self.frames.get_nowait()
        self.end()
        self._on_cut_off(self)

    def _tell_blocks(self, frame: worker_pb2.Frame, blocks: BlockFeed) -> None:
        """As much as a frame takes; the rest goes in frames of its own, so that a long account does not hold
        up tokens."""
        events = blocks.take()
        if events is not None:
            frame.blocks.CopyFrom(events)
        if blocks.behind and self._again is None:
            self._again = asyncio.get_running_loop().call_later(SPREAD_S, self._flush_again)

    def _flush_again(self) -> None:
        self._again = None
        if not self._ended:
            self.flush()

    def say_drained(self) -> None:
        """The last word; all tokens have been delivered and left in frames."""
        self.frames.put_nowait(worker_pb2.WorkerMessage(drain_done=worker_pb2.DrainDone()))

    def end(self) -> None:
        """Close the stream behind what is queued."""
        if not self._ended:
            self._ended = True
            self.frames.put_nowait(None)


class Routers:
    """All connected routers; ``baton.engine.outlet.Outlet``. Event loop's thread only."""

    def __init__(self) -> None:
        self._streams: dict[str, RouterStream] = {}

    @property
    def full(self) -> bool:
        return len(self._streams) >= MOST_ROUTERS

    def add(self, stream: RouterStream) -> RouterStream | None:
        """Returns the router's previous stream, if that is still here: it has been replaced."""
        previous = self._streams.get(stream.router_id)
        self._streams[stream.router_id] = stream
        return previous

    def remove(self, stream: RouterStream) -> bool:
        """False: it was removed before, or the router's new stream has replaced it."""
        if not self.is_current(stream):
            return False
        del self._streams[stream.router_id]
        return True

    def is_current(self, stream: RouterStream) -> bool:
        return self._streams.get(stream.router_id) is stream

    def stream_of(self, router_id: str) -> RouterStream | None:
        return self._streams.get(router_id)

    def count_submit(self, router_id: str) -> None:
        """Load reports to this router include one more request from now on, or its end."""
        self._streams[router_id].submits_taken += 1

    def connected(self, owner: str) -> bool:
        return owner in self._streams

    def deliver(self, owner: str, delta: worker_pb2.TokenDelta) -> None:
        stream = self._streams.get(owner)
        if stream is not None:
            stream.deliver(delta)

    def tell_phases(self, owner: str, phases: worker_pb2.Phases) -> None:
        stream = self._streams.get(owner)
        if stream is not None:
            stream.tell_phases(phases)

    def fail(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        self.deliver(owner, _failure(request_id, attempt, reason))

    def reject(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        """End an attempt with an error that is its client's fault."""
        self.deliver(owner, _failure(request_id, attempt, reason, invalid=True))

    def refuse(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        self.deliver(owner, _failure(request_id, attempt, reason, refused=True))

    def lose(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        self.deliver(owner, _failure(request_id, attempt, reason, lost=True))

    def expire(self, owner: str, request_id: str, attempt: int) -> None:
        self.deliver(owner, _failure(request_id, attempt, "the request's deadline has passed", expired=True))

    def report_loads(self) -> None:
        """Tell every router how the worker is; to them it is the worker's heartbeat."""
        for stream in list(self._streams.values()):  # some may be cut off, and are gone then
            stream.flush()

    def silent(self, elapsed: float, busy: Callable[[str], bool]) -> list[RouterStream]:
        """``elapsed`` seconds went by: the routers that have been silent for too long. ``busy`` says whether
        a router has requests here."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.pulse.tick(elapsed)
        return [s for s in streams if s.pulse.lost(partial(busy, s.router_id))]

    @property
    def unaware_of_drain(self) -> int:
        """Routers that may still submit to a worker that drains."""
        return sum(not stream.drain_noted for stream in self._streams.values())

    def callers(self) -> list[RouterStream]:
        """Those that call again when their streams end."""
        return [stream for stream in self._streams.values() if stream.calls_again]

    def say_drained(self) -> None:
        """The last word on every stream."""
        for stream in self._streams.values():
            stream.say_drained()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()


def _failure(
    request_id: str,
    attempt: int,
    reason: str,
    *,
    refused: bool = False,
    lost: bool = False,
    invalid: bool = False,
    expired: bool = False,
) -> worker_pb2.TokenDelta:
    return worker_pb2.TokenDelta(
        request_id=request_id,
        attempt=attempt,
        finish_reason=inference_pb2.FINISH_REASON_ERROR,
        error=reason,
        refused=refused,
        lost=lost,
        invalid=invalid,
        expired=expired,
    )
