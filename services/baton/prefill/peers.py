"""The decode workers that prefill knows of, and how patiently it calls one that does not answer. Pure."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from baton.names import check_address, check_name
from baton.v1.worker_pb2 import DecodePeers

log = logging.getLogger(__name__)

MAX_PEERS = 4096
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class Peer(NamedTuple):
    """One decode process. Started again at the same address, it is another peer."""

    address: str
    incarnation: str


def peers_of(told: DecodePeers) -> list[Peer]:
    """Those that a router names, but for what cannot be one."""
    peers, wrong = [], []
    for each in told.peers[:MAX_PEERS]:
        try:
            check_address("handoff_address", each.handoff_address)
            check_name("incarnation", each.incarnation)
        except ValueError as error:
            wrong.append(str(error))
        else:
            peers.append(Peer(each.handoff_address, each.incarnation))
    if wrong:
        log.warning("a router names %d decode workers that cannot be; of one, %s", len(wrong), wrong[0])
    return peers


class KnownPeers:
    """What the routers say of decode workers: a peer is known while one of them names it.

    At most ``limit`` are kept, so that no router can make prefill hold connections without end; which ones is
    the same whatever the order in which the routers spoke.
    """

    def __init__(self, limit: int = MAX_PEERS) -> None:
        self._limit = limit
        self._named: dict[str, frozenset[Peer]] = {}
        self._by_incarnation: dict[str, Peer] = {}

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._by_incarnation

    def tell(self, router_id: str, peers: Iterable[Peer]) -> None:
        """``router_id`` names these peers, and none that it named before."""
        self._named[router_id] = frozenset(self._first(set(peers)))
        self._unite()

    def forget(self, router_id: str) -> None:
        """The router is gone."""
        self._named.pop(router_id, None)
        self._unite()

    def clear(self) -> None:
        """No router names anybody."""
        self._named.clear()
        self._unite()

    def by_incarnation(self) -> dict[str, Peer]:
        return dict(self._by_incarnation)

    def _unite(self) -> None:
        everyone = set[Peer]().union(*self._named.values())
        self._by_incarnation = {peer.incarnation: peer for peer in self._first(everyone)}

    def _first(self, peers: set[Peer]) -> list[Peer]:
        if len(peers) > self._limit:
            log.warning("routers name %d decode workers; links are kept to %d", len(peers), self._limit)
        return sorted(peers)[: self._limit]


class Backoff:
    """Pauses between attempts: doubled each time up to ``longest``, with jitter, so that workers which lost
    the same peer do not all call it back at the same moment."""

    def __init__(
        self,
        first: float = FIRST_PAUSE_S,
        longest: float = LONGEST_PAUSE_S,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._longest = longest
        self._draw = draw
        self._next = first

    def pause(self) -> float:
        """Seconds to wait now: between half and all of the present length."""
        length = self._next
        self._next = min(2 * length, self._longest)
        return length * (0.5 + 0.5 * self._draw())

    def reset(self) -> None:
        """It went well: begin again with short pauses."""
        self._next = self._first
