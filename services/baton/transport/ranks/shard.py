"""The part of a model's KV that each rank of a worker holds, and the slices that ranks exchange. Pure
functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_RANKS = 256


@dataclass(frozen=True, slots=True)
class KVShard:
    """Adjacent KV heads of adjacent layers, counted from the model's first."""

    heads: range
    layers: range

    @property
    def size(self) -> int:
        """The number of heads, summed over the layers."""
        return len(self.heads) * len(self.layers)

    def common(self, other: KVShard) -> KVShard:
        """Return the heads and layers that are in both; a shard of size 0 if none are."""
        return KVShard(_common(self.heads, other.heads), _common(self.layers, other.layers))

    def within(self, other: KVShard) -> bool:
        return self.common(other) == self

    def seen_from(self, other: KVShard) -> KVShard:
        """Return the same heads and layers, counted from the first head and layer of another shard that has
        them all."""
        heads, layers = other.heads.start, other.layers.start
        return KVShard(
            range(self.heads.start - heads, self.heads.stop - heads),
            range(self.layers.start - layers, self.layers.stop - layers),
        )

    def __str__(self) -> str:
        return (
            f"heads {self.heads.start} to {self.heads.stop - 1} "
            f"of layers {self.layers.start} to {self.layers.stop - 1}"
        )


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class KVSlice:
    """A pair of ranks, by number, and the part of the KV that goes from the one to the other."""

    prefill: int
    decode: int
    share: KVShard


def slices(prefill: Sequence[KVShard], decode: Sequence[KVShard]) -> tuple[KVSlice, ...]:
    """Return which pairs of ranks exchange what, so that each decode rank gets each head and layer that it
    holds exactly once. Both sides' shares must pass ``objection``.

    Ranks with equal shares are replicas of each other: of these, the one with the least to send so far sends.
    """
    load = [0] * len(prefill)
    made: list[KVSlice] = []
    for number, wanted in enumerate(decode):
        for share in dict.fromkeys(prefill):
            common = share.common(wanted)
            if common.size:
                replicas = [rank for rank, held in enumerate(prefill) if held == share]
                sender = min(replicas, key=lambda rank: load[rank])
                load[sender] += common.size
                made.append(KVSlice(sender, number, common))
    return tuple(made)


def objection(shares: Sequence[KVShard], num_heads: int, num_layers: int) -> str | None:
    """Return what is wrong with the shares of a worker's ranks, or None: shares that differ must have nothing
    in common, and all together must be the whole KV."""
    if not 0 < len(shares) <= MAX_RANKS:
        return f"{len(shares)} ranks: 1 to {MAX_RANKS} are allowed"
    whole = KVShard(range(num_heads), range(num_layers))
    different = list(dict.fromkeys(shares))
    for number, share in enumerate(different):
        if not share.size or not share.within(whole):
            return f"a rank holds {share}: of {whole} are allowed"
        shared = next((other for other in different[:number] if share.common(other).size), None)
        if shared is not None:
            return f"one rank holds {shared} and another {share}: shares are equal or have nothing in common"
    if sum(share.size for share in different) != whole.size:
        return f"the ranks together do not hold {whole}"
    return None
