"""The slots of a process for HTTP connections, and which connection gives way to a new one.

Descriptors are set aside for everything else: streams to workers, gRPC, Redis, files. Connections with a
request under way keep their slots. If no slot is left, the oldest connection that has sent no request yet
loses its slot, or else the one whose last answer is the longest ago: silent strangers make room for clients
that ask. All bounds are per process: a router of several processes has as many times as much.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from baton.net.addresses import counted_address
from baton.router.api.errors import ApiError
from baton.telemetry.http import HttpMetrics

MIN_ASIDE = 64
ASIDE = 0.2
"""The part of the process's descriptors that is set aside for everything else."""
MAX_CONNECTIONS = 16384
"""The most connections, however many descriptors there are: a silent connection costs some 20 KiB of
memory."""
OF_ONE_ADDRESS = 0.5
"""The part of all connections that one address may have: an ingress is one address, so half and not a
handful."""
SPARE_FOR_LOOPBACK = 16
"""Connections beyond the total for probes and operators on the machine itself."""
MAX_HEAD_BYTES = 32 << 20
"""The most bytes of unfinished request heads, in all."""

RESTED_S = 1.0
"""The time, in seconds, for which a connection must have been silent or idle to make room when the system has
no descriptor left: what one has sent that came a moment ago need not have been read, and closing it would
reset it."""

State = Literal["silent", "idle", "busy"]


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The most connections of one process, in all and per address."""

    total: int
    per_address: int

    @classmethod
    def of_descriptors(cls, descriptors: int) -> SlotLimits:
        """Return the limits that leave some of the process's descriptors aside; at least 16 connections in
        all."""
        aside = max(MIN_ASIDE, round(ASIDE * descriptors))
        total = max(16, min(MAX_CONNECTIONS, descriptors - aside))
        return cls(total, max(1, round(OF_ONE_ADDRESS * total)))


class _Group:
    """Connections of one address, or all connections."""

    def __init__(self) -> None:
        self.count = 0
        self.waiting: dict[State, OrderedDict[Slot, None]] = {"silent": OrderedDict(), "idle": OrderedDict()}
        """Connections without a request under way, by state, the longest there first."""

    def oldest(self, before: float) -> Slot | None:
        """Return the connection to give way, of those that have waited since ``before``; None if there is
        none."""
        for slots in self.waiting.values():
            if slots and (slot := next(iter(slots))).since <= before:
                return slot
        return None


class Slot:
    """The place of one connection, from its accepting to its end. ``close`` ends the connection at once."""

    def __init__(
        self, slots: ConnectionSlots, key: str, on_release: Callable[[], None] | None = None
    ) -> None:
        self.key = key
        self.state: State | None = None
        """The connection's state; None while it does not count: not yet, or no more."""
        self.since = 0.0
        """The time since which the connection has had its state."""
        self.head_bytes = 0
        self.close: Callable[[], object] = _nothing
        self._slots = slots
        self._on_release = on_release

    def asks(self) -> None:
        """Note that a request is under way from now on."""
        self._slots.move(self, "busy")

    def rests(self) -> None:
        """Note that all requests are answered."""
        self._slots.move(self, "idle")

    def hold_head(self, size: int) -> None:
        """Note that ``size`` bytes of a head that is not complete have come."""
        if size != self.head_bytes and self.state is not None:
            self._slots.hold_head(self, size)

    def release(self) -> None:
        """Release the slot of a connection that is over. May be called twice."""
        self._slots.move(self, None)
        self.close = _nothing  # the old one refers to the connection
        if self._on_release is not None:
            self._on_release()
            self._on_release = None


class ConnectionSlots:
    """The connections of one process, for all its HTTP listeners. Event loop's thread only."""

    def __init__(
        self, limits: SlotLimits, metrics: HttpMetrics, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._now = now
        self._metrics = metrics
        self._all = _Group()
        self._groups: dict[str, _Group] = {}
        self._head_bytes = 0
        silent, idle = self._all.waiting["silent"], self._all.waiting["idle"]
        metrics.connections.labels("silent").set_function(lambda: len(silent))
        metrics.connections.labels("idle").set_function(lambda: len(idle))
        metrics.connections.labels("busy").set_function(lambda: self._all.count - len(silent) - len(idle))

    @property
    def metrics(self) -> HttpMetrics:
        return self._metrics

    def take(self, address: str) -> Slot:
        """Return the slot of a new connection from ``address``, for which another connection may be closed.

        Raises ApiError (503) if there is no slot.
        """
        key, loopback = counted_address(address)
        group = self._groups.get(key)
        crowded = group is not None and not loopback and group.count >= self._limits.per_address
        if crowded and group is not None and not self._evict(group):
            raise self._full("connections_of_address", "this address has too many requests under way")
        if self._all.count >= self._limits.total and not self._evict(self._all):
            spare = SPARE_FOR_LOOPBACK if loopback else 0
            if self._all.count >= self._limits.total + spare:
                raise self._full("connections", "too many requests are under way")
        slot = Slot(self, key)
        self._groups.setdefault(key, _Group()).count += 1
        self._all.count += 1
        self._enter(slot, "silent")
        return slot

    def outside(self, on_release: Callable[[], None]) -> Slot:
        """Return a slot for a connection that is only told that there is no slot for it, and closed."""
        return Slot(self, "", on_release)

    def make_room(self) -> None:
        """Close one connection that has waited for a while: the system has no descriptor left."""
        self._metrics.refused.labels("descriptors").inc()
        self._evict(self._all, before=self._now() - RESTED_S)

    def move(self, slot: Slot, state: State | None) -> None:
        """Change the state of a connection; None: the connection is over."""
        if slot.state is None or slot.state == state:
            return
        group = self._groups[slot.key]
        if slot.state != "busy":
            del group.waiting[slot.state][slot], self._all.waiting[slot.state][slot]
        slot.state = None
        if state is not None:
            self._enter(slot, state)
            return
        self.hold_head(slot, 0)
        self._all.count -= 1
        group.count -= 1
        if not group.count:
            del self._groups[slot.key]

    def hold_head(self, slot: Slot, size: int) -> None:
        self._head_bytes += size - slot.head_bytes
        slot.head_bytes = size
        while self._head_bytes > MAX_HEAD_BYTES and self._evict(self._all):
            pass

    def _enter(self, slot: Slot, state: State) -> None:
        slot.state, slot.since = state, self._now()
        if state != "busy":
            self._groups[slot.key].waiting[state][slot] = self._all.waiting[state][slot] = None

    def _evict(self, group: _Group, before: float = math.inf) -> bool:
        """Close a connection of ``group`` that has waited since ``before``, and return whether there was
        one."""
        slot = group.oldest(before)
        if slot is None:
            return False
        self._metrics.refused.labels(f"evicted_{slot.state}").inc()
        close = slot.close
        slot.release()
        close()
        return True

    def _full(self, reason: str, why: str) -> ApiError:
        self._metrics.refused.labels(reason).inc()
        return ApiError(503, f"The server takes no more connections: {why}.", code="too_many_connections")


def _nothing() -> None:
    pass
