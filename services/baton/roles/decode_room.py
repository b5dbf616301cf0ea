"""Decode's KV pool as the handoff sees it: promises of room, and pages bound late."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.kv.arriving import Arriving
from baton.engine.sequence import Sequence
from baton.handoff.blocks import Binding
from baton.handoff.messages import Name
from baton.roles.engine_pages import EnginePages
from baton.roles.group_blocks import arriving_binding, with_partial_blocks


class PoolRoom:
    """``baton.handoff.decode.DecodeMemory`` over an engine's pages. The caller holds the engine's lock.

    The engine promises only what its own sequences are not about to need (rule 6). A promise is not a page:
    growth may use it up, and then binding waits.
    """

    def __init__(self, pages: EnginePages, turn_of: Callable[[Sequence], float]) -> None:
        """``turn_of``: a sequence's place among those that wait (``Scheduler.turn_of``)."""
        self._pages = pages
        self._turn_of = turn_of
        self._expected: dict[Name, Sequence] = {}
        self._manifests: dict[Name, tuple[int, bytes, int]] = {}
        self._promised: dict[Name, int] = {}
        self._bound: dict[Name, Arriving] = {}

    def expect(self, name: Name, sequence: Sequence, manifest: tuple[int, bytes, int]) -> None:
        """Add a request that asks for room, with ``manifest``: the number and digest of its tokens, and its
        number of answers."""
        self._expected[name] = sequence
        self._manifests[name] = manifest

    def take(self, name: Name) -> Sequence | None:
        """Remove and return a request whose handoff is over; None if it is unknown."""
        self._manifests.pop(name, None)
        self._bound.pop(name, None)
        return self._expected.pop(name, None)

    def bound(self, name: Name) -> Arriving:
        """Return the pages that a handoff has bound."""
        return self._bound[name]

    def owner(self, name: Name) -> str | None:
        sequence = self._expected.get(name)
        return sequence.owner if sequence else None

    def owner_of(self, request_id: str) -> str | None:
        owners = (seq.owner for name, seq in self._expected.items() if name.request_id == request_id)
        return next(owners, None)

    def expected(self) -> list[tuple[Name, Sequence]]:
        return list(self._expected.items())

    def owned_by(self, owner: str) -> list[Name]:
        return [name for name, sequence in self._expected.items() if sequence.owner == owner]

    def fits(self, num_tokens: int) -> bool:
        return self._pages.fits(num_tokens)

    def reserve(self, name: Name, num_tokens: int) -> bool:
        if not self._pages.reserve(num_tokens, self._turn_of(self._expected[name])):
            return False
        self._promised[name] = num_tokens
        return True

    def unreserve(self, name: Name) -> None:
        self._pages.unreserve(self._promised.pop(name))

    def bind(self, name: Name, blocks_per_page: int) -> Binding | None:
        sequence = self._expected[name]
        arriving = self._pages.bind_arriving(sequence)
        if arriving is None:
            return None
        num_tokens, block_size = sequence.num_tokens, self._pages.layout.block_size
        arriving = with_partial_blocks(arriving, num_tokens, block_size, blocks_per_page)
        binding = arriving_binding(arriving, num_tokens, block_size, blocks_per_page)
        self._pages.pin(binding.pinned)
        self.unreserve(name)
        self._bound[name] = arriving
        return binding

    def unpin(self, pages: tuple[int, ...]) -> None:
        self._pages.unpin(pages)

    def free(self, name: Name, pages: tuple[int, ...]) -> None:
        self._pages.free_pages(pages)

    def manifest(self, name: Name) -> tuple[int, bytes, int]:
        return self._manifests[name]
