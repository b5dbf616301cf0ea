"""The index of the KV blocks that workers hold: one table for all workers, models and tenants.

Blocks of different models, block sizes or tenants have different digests, so one table holds them all. What
a model's groups of layers keep of one block are entries of their own, as they come and go apart. The table is
built from the block events of the workers' prefix caches, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.prefix_hit import GroupNeeds
from baton.router.placement.window_tail import WindowTail

MAX_BLOCKS = 2_000_000
"""Most distinct blocks, each counted once for every group that keeps it. Each takes 90 to 150 bytes
(``python -m loadtest.placement --parts memory``): 300 MB."""


class PrefixIndex:
    """A map from the hash of a block, and the group that keeps it, to the workers that hold it, as the bits
    of an integer.

    Workers have small numbers; a number is reused once the last block of its former worker is swept away. A
    query costs one look-up in each group for each leading block that any worker holds, however many workers
    there are.
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

    def store(self, worker: int, blocks: Iterable[int], group: int = 0) -> int:
        """Note that ``worker`` holds ``blocks``; return how many of them it was not known to hold."""
        holders, bit = self._holders, self._bits[worker]
        new = 0
        for block in _of_group(blocks, group):
            held = holders.get(block)
            if held is not None:
                if held & bit:
                    continue
                holders[block] = held | bit
            elif len(holders) < self._max_blocks:
                holders[block] = bit
            else:
                self.dropped_blocks += 1
                continue
            new += 1
        return new

    def remove(self, worker: int, blocks: Iterable[int], group: int = 0) -> int:
        """Note that ``worker`` no longer holds ``blocks``; return how many of them it was known to hold."""
        holders, keep = self._holders, ~self._bits[worker]
        gone = 0
        for block in _of_group(blocks, group):
            held = holders.get(block)
            if held is None:
                continue
            left = held & keep
            if left == held:
                continue
            gone += 1
            if left:
                holders[block] = left
            else:
                del holders[block]
        return gone

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

    def going_on(
        self, chain: Iterable[int], needs: Sequence[GroupNeeds], block_size: int, among: int | None = None
    ) -> dict[int, int]:
        """Return worker → the most leading blocks of ``chain`` behind which all groups can go on there: what
        ``longest_hit`` says of each worker, for all of them at once. Workers that can with none are left out.
        """
        get = self._holders.get
        going = self._live if among is None else self._live & among
        marks: dict[str, list[int]] = {"full": [], "latent": [], "state": []}
        tails: list[tuple[int, WindowTail]] = []
        for group, need in enumerate(needs):
            if need.kind == "window":
                tails.append((_mark(group), WindowTail(need, block_size)))
            else:
                marks[need.kind].append(_mark(group))
        whole, states = marks["full"] + marks["latent"], marks["state"]
        able: list[int] = []
        """The workers that can go on behind 1, 2, ... blocks."""
        for block in chain:
            for mark in whole:
                going &= get(block ^ mark, 0)
            if not going:
                break
            here = going
            for mark in states:
                here &= get(block ^ mark, 0)
            for mark, tail in tails:
                here &= tail.holders_behind(get(block ^ mark, 0))
            able.append(here)
        return _last_of(able)


def _mark(group: int) -> int:
    """Return what tells a group's entries from those of others: 64 bits that are mixed into a block's hash.
    Hashes are as good as random, so that different marks are all it takes."""
    return group * 0x9E3779B97F4A7C15 & (1 << 64) - 1


def _of_group(blocks: Iterable[int], group: int) -> Iterable[int]:
    """Return the names of a group's entries."""
    if group == 0:
        return blocks
    mark = _mark(group)
    return (block ^ mark for block in blocks)


def _last_of(able: Sequence[int]) -> dict[int, int]:
    """Return worker → the last count, from 1, at which it is among ``able``."""
    found: dict[int, int] = {}
    noted = 0
    for count in range(len(able), 0, -1):
        new = able[count - 1] & ~noted
        if new:
            _note(found, new, count)
            noted |= new
    return found


def _note(found: dict[int, int], workers: int, count: int) -> None:
    while workers:
        bit = workers & -workers
        found[bit.bit_length() - 1] = count
        workers ^= bit
