"""Decode's KV pool as the handoff sees it: promises of room, and pages bound late."""

from __future__ import annotations

from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.handoff.decode import Binding
from baton.handoff.messages import Name


class PoolRoom:
    """``baton.handoff.decode.DecodeMemory`` over an engine's pool. The caller holds the engine's lock.

    The engine promises only what its own sequences are not about to need (rule 6). A promise is not a page:
    growth may use it up, and then binding waits.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._expected: dict[Name, Sequence] = {}
        self._manifests: dict[Name, tuple[int, bytes, int]] = {}
        self._promised: dict[Name, int] = {}

    def expect(self, name: Name, sequence: Sequence, manifest: tuple[int, bytes, int]) -> None:
        """Add a request that asks for room, with ``manifest``: the number and digest of its tokens, and its
        number of answers."""
        self._expected[name] = sequence
        self._manifests[name] = manifest

    def take(self, name: Name) -> Sequence | None:
        """Remove and return a request whose handoff is over; None if it is unknown."""
        self._manifests.pop(name, None)
        return self._expected.pop(name, None)

    def owner(self, name: Name) -> str | None:
        sequence = self._expected.get(name)
        return sequence.owner if sequence else None

    def expected(self) -> list[tuple[Name, Sequence]]:
        return list(self._expected.items())

    def owned_by(self, owner: str) -> list[Name]:
        return [name for name, sequence in self._expected.items() if sequence.owner == owner]

    def fits(self, num_blocks: int) -> bool:
        return num_blocks <= self._engine.pool.num_blocks

    def reserve(self, name: Name, num_blocks: int) -> bool:
        turn = self._engine.scheduler.turn_of(self._expected[name])
        if not self._engine.reserve(num_blocks, turn):
            return False
        self._promised[name] = num_blocks
        return True

    def unreserve(self, name: Name) -> None:
        self._engine.unreserve(self._promised.pop(name))

    def bind(self, name: Name) -> Binding | None:
        pool = self._engine.pool
        cached = self._engine.scheduler.match_prefix(self._expected[name])
        fresh = pool.allocate(self._promised[name] - len(cached))
        self._engine.copy_blocks()  # before anything is received into evicted blocks
        if fresh is None:
            pool.free(cached)
            return None
        pool.pin(fresh)
        self.unreserve(name)
        return Binding((*cached, *fresh), len(cached))

    def unpin(self, pages: tuple[int, ...]) -> None:
        self._engine.pool.unpin(pages)

    def free(self, name: Name, pages: tuple[int, ...]) -> None:
        self._engine.pool.free(pages)

    def manifest(self, name: Name) -> tuple[int, bytes, int]:
        return self._manifests[name]
