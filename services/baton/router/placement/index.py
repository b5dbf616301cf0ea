"""The index of the KV blocks that workers hold: one table for all workers, models and tenants.

Blocks of different models, block sizes or tenants have different digests, so one table holds them all. The
table is built from the block events of the workers' prefix caches, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_BLOCKS = 2_000_000
"""Most distinct blocks. Each takes 90 to 150 bytes (``python -m loadtest.placement --parts memory``): 300
MB."""


class PrefixIndex:
    """A map from the hash of a block to the workers that hold it, as the bits of an integer.

    Workers have small numbers; a number is reused once the last block of its former worker is swept away. A
    query costs one look-up for each leading block that any worker holds, however many workers there are.
    Beyond ``max_blocks`` new blocks are dropped, and counted.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        self._bits: list[int] = []
        """``1 << worker`` for each worker. Most blocks have one holder, and share these integers."""
        self._live = 0
        self._dead = 0
        """Workers that are gone but may still be named by blocks, as bits."""
        self._sweeping = 0
        """The workers of ``_dead`` that the sweep under way clears."""
        self._unswept: list[int] = []
        self.dropped_blocks = 0

    def __len__(self) -> int:
        return len(self._holders)

    # --- workers

    def add_worker(self) -> int:
        """Return a number for a new worker, which holds no blocks."""
        taken = self._live | self._dead
        worker = (~taken & (taken + 1)).bit_length() - 1
        if worker == len(self._bits):
            self._bits.append(1 << worker)
        self._live |= self._bits[worker]
        return worker

    def remove_worker(self, worker: int) -> None:
        """Remove a worker: no query finds it from now on, and the next sweeps clear its blocks."""
        self._live &= ~self._bits[worker]
        self._dead |= self._bits[worker]

    def sweep(self, most: int) -> None:
        """Clear up to ``most`` blocks of workers that are gone. Called regularly, so that no removal of a
        worker takes long at once."""
        if not self._unswept:
            self._dead &= ~self._sweeping
            self._sweeping = self._dead
            if not self._dead:
                return
            self._unswept = list(self._holders)
        holders, keep = self._holders, ~self._sweeping
        for block in self._unswept[-most:]:
            held = holders.get(block, 0)
            left = held & keep
            if left == 0:
                holders.pop(block, None)
            elif left != held:
                holders[block] = left
        del self._unswept[-most:]
        if not self._unswept:
            self._dead &= ~self._sweeping
            self._sweeping = 0

    # --- blocks

    def store(self, worker: int, blocks: Iterable[int]) -> None:
        holders, bit = self._holders, self._bits[worker]
        for block in blocks:
            held = holders.get(block)
            if held is not None:
                holders[block] = held | bit
            elif len(holders) < self._max_blocks:
                holders[block] = bit
            else:
                self.dropped_blocks += 1

    def remove(self, worker: int, blocks: Iterable[int]) -> None:
        holders, keep = self._holders, ~self._bits[worker]
        for block in blocks:
            held = holders.get(block)
            if held is None:
                continue
            left = held & keep
            if left:
                holders[block] = left
            else:
                del holders[block]

    def leading(self, chain: Iterable[int], among: int | None = None) -> dict[int, int]:
        """Return worker → the number of leading blocks of ``chain`` that it holds, for workers that hold the
        first. ``among``: the workers to look at, as bits; None: all. ``chain`` is read no further than the
        first block that none of them holds."""
        holders = self._holders
        going = self._live if among is None else self._live & among
        found: dict[int, int] = {}
        count = 0
        for block in chain:
            held = holders.get(block, 0) & going
            if held != going:
                if count:
                    _note(found, going ^ held, count)
                going = held
                if not going:
                    return found
            count += 1
        if count:
            _note(found, going, count)
        return found


def _note(found: dict[int, int], workers: int, count: int) -> None:
    while workers:
        bit = workers & -workers
        found[bit.bit_length() - 1] = count
        workers ^= bit
