"""What a worker needs to know of its other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.connector.ranks.end import Place
from baton.parallel.ranks import Nodes, OneNode


class Others(Nodes, Protocol):
    """A worker's nodes, of which this one leads."""

    @property
    def places(self) -> Sequence[Place]:
        """Where the ranks of other nodes accept data connections, by rank. They are behind this node's."""

    def say_serving(self) -> None:
        """The worker is ready: so are its other nodes."""

    def call_on_leaving(self, on_leaving: Callable[[str], None]) -> None:
        """``on_leaving`` hears, on a thread of its own, which node was told to end; at once if one was."""


class Nobody(OneNode):
    """A worker on one node."""

    @property
    def places(self) -> Sequence[Place]:
        return ()

    def say_serving(self) -> None:
        pass

    def call_on_leaving(self, on_leaving: Callable[[str], None]) -> None:
        pass
