"""The view that a worker has of its other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.parallel.ranks import Nodes, OneNode
from baton.transport.ranks.endpoint import RankAddress


class Cluster(Nodes, Protocol):
    """A worker's nodes, led by this one."""

    @property
    def places(self) -> Sequence[RankAddress]:
        """Addresses where the ranks of other nodes accept data connections, by rank, after this node's
        ranks."""

    def say_serving(self) -> None:
        """Tell the other nodes that the worker is ready."""

    def call_on_leaving(self, on_leaving: Callable[[str], None]) -> None:
        """Call ``on_leaving`` with each node that was told to end, on a thread of its own; at once if one was
        already."""


class SingleNode(OneNode):
    """A worker on one node."""

    @property
    def places(self) -> Sequence[RankAddress]:
        return ()

    def say_serving(self) -> None:
        pass

    def call_on_leaving(self, on_leaving: Callable[[str], None]) -> None:
        pass
