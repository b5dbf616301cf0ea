"""The decode workers that prefill knows of, and the pauses between failed dials to them. Pure."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from baton.greeting.names import check_address, check_name
from baton.v1.worker_pb2 import DecodePeers

log = logging.getLogger(__name__)

MAX_PEERS = 4096
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0


class Peer(NamedTuple):
    """One decode process. A process started again at the same address is another peer."""

    address: str
    incarnation: str


def peers_of(told: DecodePeers) -> list[Peer]:
    """Return the peers that a router names, without the malformed ones, which are logged."""
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
    """The decode workers that routers name: a peer is known while a router names it.

    At most ``limit`` peers are kept, so that no router can make prefill hold connections without end. The
    peers kept do not depend on the order in which the routers named them.
    """

    def __init__(self, limit: int = MAX_PEERS) -> None:
        self._limit = limit
        self._named: dict[str, frozenset[Peer]] = {}
        self._by_incarnation: dict[str, Peer] = {}

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._by_incarnation

    def tell(self, router_id: str, peers: Iterable[Peer]) -> None:
        """Replace the peers that ``router_id`` names."""
        self._named[router_id] = frozenset(self._first(set(peers)))
        self._unite()

    def forget(self, router_id: str) -> None:
        """Forget a router that is gone."""
        self._named.pop(router_id, None)
        self._unite()

    def clear(self) -> None:
        """Forget the peers of all routers."""
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
    """The pauses between dials: doubled each time up to ``longest``, with jitter, so that workers which lost
    the same peer do not all dial it again at the same moment."""

    def __init__(
        self,
        first: float = FIRST_PAUSE_S,
        longest: float = MAX_PAUSE_S,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._longest = longest
        self._draw = draw
        self._next = first

    def pause(self) -> float:
        """Return the seconds to wait now: between half and all of a length that then doubles."""
        length = self._next
        self._next = min(2 * length, self._longest)
        return length * (0.5 + 0.5 * self._draw())

    def reset(self) -> None:
        """Begin again with short pauses, after a success."""
        self._next = self._first
