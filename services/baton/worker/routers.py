"""The streams to the routers: one frame per engine step, with the tokens of all of a router's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from baton.core.attempt_failure import AttemptFailure, failure_to_proto
from baton.net.heartbeat import TEMPO, Pulse, Tempo
from baton.v1 import worker_pb2
from baton.worker.block_feed import BlockFeed
from baton.worker.bond import Bond

log = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 4096
"""A router this far behind is cut off: it can resume its requests, and the worker's memory stays bounded."""

MAX_ROUTERS = 1024
"""Most routers connected at once."""

SPREAD_S = 0.01
"""The time between frames that carry only more of a long feed of blocks, in seconds."""


class RouterStream:
    """The stream to one connected router. The deltas of one event loop turn are sent as one frame."""

    def __init__(
        self,
        router_id: str,
        load: Callable[[], worker_pb2.Load],
        tempo: Tempo = TEMPO,
        blocks: BlockFeed | None = None,
        on_cut_off: Callable[[RouterStream], None] = lambda stream: None,
    ) -> None:
        """``blocks``: the feed of the prefix cache to the router; None: no feed. ``on_cut_off`` is called
        when the router is given up because it does not read."""
        self.router_id = router_id
        self.frames: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        self.pulse = Pulse(tempo)
        self.bond: Bond | None = None
        """The binding of this router's beats to the stream. None: the router never beats."""
        self.drain_noted = False
        """Whether the router knows that this worker drains: it then submits nothing more."""
        self.submits_taken = 0
        self.calls_again = True
        """Whether the router calls again when its stream has ended, and so can be told of changes by a new
        greeting."""
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
        """Send ``phases`` in one frame with the deltas of this turn, if there are any."""
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
        """End the stream and drop what is queued, so that the stream ends as soon as it is read again."""
        log.warning("router %s does not read its frames: cut off", self.router_id)
        while not self.frames.empty():
            self.frames.get_nowait()
        self.end()
        self._on_cut_off(self)

    def _tell_blocks(self, frame: worker_pb2.Frame, blocks: BlockFeed) -> None:
        """Add as many block events as a frame takes. The rest goes in frames of its own, so that a long feed
        does not delay tokens."""
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
        """Send the last message. All tokens must have been sent in frames before."""
        self.frames.put_nowait(worker_pb2.WorkerMessage(drain_done=worker_pb2.DrainDone()))

    def end(self) -> None:
        """Close the stream after what is queued."""
        if not self._ended:
            self._ended = True
            self.frames.put_nowait(None)


class Routers:
    """All connected routers. Implements ``baton.engine.outlet.Outlet``. Event loop's thread only."""

    def __init__(self) -> None:
        self._streams: dict[str, RouterStream] = {}

    @property
    def full(self) -> bool:
        return len(self._streams) >= MAX_ROUTERS

    def add(self, stream: RouterStream) -> RouterStream | None:
        """Add a router's stream. Returns the previous stream of the router that it replaces, if any."""
        previous = self._streams.get(stream.router_id)
        self._streams[stream.router_id] = stream
        return previous

    def remove(self, stream: RouterStream) -> bool:
        """Remove a stream. Returns False if it was removed before, or a new stream of the router has replaced
        it."""
        if not self.is_current(stream):
            return False
        del self._streams[stream.router_id]
        return True

    def is_current(self, stream: RouterStream) -> bool:
        return self._streams.get(stream.router_id) is stream

    def stream_of(self, router_id: str) -> RouterStream | None:
        return self._streams.get(router_id)

    def count_submit(self, router_id: str) -> None:
        """Count a submit of the router: load reports to it include one more request from now on, or its
        end."""
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

    def fail(
        self,
        owner: str,
        request_id: str,
        attempt: int,
        failure: AttemptFailure,
        reason: str,
        link_field: str = "",
    ) -> None:
        """See ``Outlet.fail``."""
        self.deliver(owner, failure_to_proto(request_id, attempt, failure, reason, link_field))

    def report_loads(self) -> None:
        """Send every router a load report, which is also the worker's heartbeat."""
        for stream in list(self._streams.values()):  # a flush may cut off and remove streams
            stream.flush()

    def silent(self, elapsed: float, busy: Callable[[str], bool]) -> list[RouterStream]:
        """Count ``elapsed`` seconds, and return the streams of routers that have been silent for too long.
        ``busy`` says whether a router has requests here."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.pulse.tick(elapsed)
        return [s for s in streams if s.pulse.lost(partial(busy, s.router_id))]

    @property
    def unaware_of_drain(self) -> int:
        """The number of routers that may still submit to a worker that drains."""
        return sum(not stream.drain_noted for stream in self._streams.values())

    def callers(self) -> list[RouterStream]:
        """Return the streams of routers that call again when their streams end."""
        return [stream for stream in self._streams.values() if stream.calls_again]

    def say_drained(self) -> None:
        """Send the last message on every stream."""
        for stream in self._streams.values():
            stream.say_drained()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()
