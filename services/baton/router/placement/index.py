"""Which worker holds which block: one table for all workers, models and tenants.

Blocks of different models, block sizes or tenants have different digests, so one table holds them all. It is
built from what the workers tell of their prefix caches, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST_BLOCKS = 2_000_000
"""Distinct blocks, of 90 to 150 bytes (``python -m loadtest.placement --parts memory``): 300 MB at most."""


class PrefixIndex:
    """Hash of a block → the workers that hold it, as the bits of an integer.

    Workers have small numbers, given out again when the last trace of the one that had them is swept away.
    What is asked for costs a look-up for each leading block that anybody holds, however many workers there
    are. Beyond ``most_blocks`` new blocks are not taken in, and counted.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._holders: dict[int, int] = {}
        self._bits: list[int] = []
        """1 << worker. Most blocks have one holder, and share these integers."""
        self._live = 0
        self._dead = 0
        """Numbers of workers that are gone, with blocks that still name them."""
        self._sweeping = 0
        """Those of them that the sweep under way will have cleared."""
        self._unswept: list[int] = []
        self.dropped_blocks = 0

    def __len__(self) -> int:
        return len(self._holders)

    # --- workers

    def add_worker(self) -> int:
        """A number for a worker of which nothing is known."""
        taken = self._live | self._dead
        worker = (~taken & (taken + 1)).bit_length() - 1
        if worker == len(self._bits):
            self._bits.append(1 << worker)
        self._live |= self._bits[worker]
        return worker

    def remove_worker(self, worker: int) -> None:
        """It is found nowhere from now on; its blocks go with the next sweeps."""
        self._live &= ~self._bits[worker]
        self._dead |= self._bits[worker]

    def sweep(self, most: int) -> None:
        """Clear away up to ``most`` blocks' traces of workers that are gone. To be called now and then: it
        keeps the removal of a worker from taking long at once."""
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
            elif len(holders) < self._most_blocks:
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
        """Worker → how many leading blocks of ``chain`` it holds, for those that hold the first. ``among``:
        the workers that are asked about, as bits; None: all. ``chain`` is followed no further than any of
        them does."""
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
