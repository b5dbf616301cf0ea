"""Metrics of a worker's handoffs, per peer and connector."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds for the duration of one stage of a handoff, in seconds."""
KEEP = 0.9
"""The weight that earlier measurements keep each time a link was busy."""
MAX_PEERS = 1024
"""The most peers with series of their own; the peers that were seen longest ago lose theirs."""


class Pair(NamedTuple):
    """The other end of a link, and the connector that carries the blocks."""

    peer: str
    """The address at which the peer's process serves."""
    connector: str


class Holds(NamedTuple):
    """KV blocks that transfers hold."""

    blocks: int
    since: float | None
    """The time at which the oldest hold began, on the monotonic clock; None: no hold."""


class HandoffMetrics:
    """Measurements of handoffs, written by the event loop's thread and read by scrapes. Each instance belongs
    to the registry it is given."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self.role = role
        self._peers: OrderedDict[tuple[str, Pair], None] = OrderedDict()
        """Peers, each with this worker's role at the time, the one seen longest ago first."""
        self._late_bytes = self._late_seconds = 0.0
        labels = ("role", "peer", "connector")
        self._sent = Counter(
            "baton_handoff_sent_bytes",
            "Bytes of KV blocks sent to a decode worker.",
            labels,
            registry=registry,
        )
        self._received = Counter(
            "baton_handoff_received_bytes",
            "Bytes of KV blocks received from a prefill worker.",
            labels,
            registry=registry,
        )
        self._sending = Counter(
            "baton_handoff_sending_seconds",
            "Time in which at least one send to the peer was under way: sent bytes over it is the goodput.",
            labels,
            registry=registry,
        )
        self._links = Counter(
            "baton_handoff_links_opened", "Links made with the peer.", labels, registry=registry
        )
        self._reconnects = Counter(
            "baton_handoff_reconnects",
            "Links made with a peer that had been linked before, be it an earlier process at its address.",
            labels,
            registry=registry,
        )
        self._stages = Histogram(
            "baton_handoff_stage_seconds",
            "One stage of a handoff. At decode: room (from asking to the promise), prefill (to the first "
            "blocks computed), grant (to pages bound), transfer (to the last block), commit, start (to the "
            "first step), first_step. At prefill: ask (from a request's arrival to the promise of room, the "
            "link to decode included), flush (from the last chunk computed to the last send over).",
            ("role", "connector", "stage"),
            registry=registry,
            buckets=STAGE_BUCKETS,
        )

    def linked(self, pair: Pair) -> None:
        """Count a link that was made."""
        labels = (self.role, *pair)
        again = any(known.peer == pair.peer for _, known in self._peers)
        self._touch(pair)
        self._links.labels(*labels).inc()
        self._reconnects.labels(*labels).inc(again)

    @property
    def bytes_per_s(self) -> float:
        """The goodput of a link, in bytes per second, over about the last ten times that a link was busy; 0.0
        before the first."""
        return self._late_bytes / self._late_seconds if self._late_seconds else 0.0

    def sent(self, pair: Pair, num_bytes: int) -> None:
        self._late_bytes += num_bytes
        self._sent.labels(self.role, *pair).inc(num_bytes)

    def sending(self, pair: Pair, seconds: float) -> None:
        self._late_bytes *= KEEP
        self._late_seconds = KEEP * self._late_seconds + seconds
        self._sending.labels(self.role, *pair).inc(seconds)

    def received(self, pair: Pair, num_bytes: int) -> None:
        self._received.labels(self.role, *pair).inc(num_bytes)

    def stage(self, connector: str, stage: str, seconds: float | None) -> None:
        """Observe one stage of a handoff. ``seconds``: None if the handoff did not get to the stage."""
        if seconds is not None:
            self._stages.labels(self.role, connector, stage).observe(seconds)

    def _touch(self, pair: Pair) -> None:
        self._peers[self.role, pair] = None
        self._peers.move_to_end((self.role, pair))
        if len(self._peers) > MAX_PEERS:
            (role, oldest), _ = self._peers.popitem(last=False)
            per_pair: tuple[MetricWrapperBase, ...] = (
                self._sent,
                self._received,
                self._sending,
                self._links,
                self._reconnects,
            )
            for metric in per_pair:
                metric.remove(role, *oldest)


class BusyTime:
    """Measures the time in which anything is under way, however many things overlap."""

    def __init__(self, add: Callable[[float], None]) -> None:
        self._add = add
        self._running = 0
        self._since = 0.0

    def start(self, now: float) -> None:
        if self._running == 0:
            self._since = now
        self._running += 1

    def end(self, now: float) -> None:
        self._running -= 1
        if self._running == 0:
            self._add(now - self._since)
