"""The part of a model's KV that each rank of a worker holds, and the slices that ranks exchange. Pure
functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.transport.base import GroupPart
from baton_kernels.kv_layout import KVGroup, TokenKV

MAX_RANKS = 256
NOTHING = GroupPart(range(0), range(0))


@dataclass(frozen=True, slots=True)
class KVShard:
    """Adjacent heads (of a state: units) of adjacent layers of each KV group, counted from the model's first
    head and the group's first layer. Of some groups there may be nothing."""

    groups: tuple[GroupPart, ...]

    @classmethod
    def of_one(cls, heads: range, layers: range) -> KVShard:
        """A shard of a model with one group."""
        return cls((GroupPart(heads, layers),))

    @property
    def size(self) -> int:
        """The number of heads, summed over the layers of all groups."""
        return sum(part.size for part in self.groups)

    def within(self, other: KVShard) -> bool:
        return len(self.groups) == len(other.groups) and all(
            not mine.size or _common(mine, theirs) == mine
            for mine, theirs in zip(self.groups, other.groups, strict=True)
        )

    def seen_from(self, other: KVShard) -> KVShard:
        """Return the same heads and layers, counted from the first head and layer of another shard that has
        them all."""
        return KVShard(
            tuple(
                _seen_from(mine, theirs) if mine.size else NOTHING
                for mine, theirs in zip(self.groups, other.groups, strict=True)
            )
        )

    def __str__(self) -> str:
        named = [_named(number, part) for number, part in enumerate(self.groups) if part.size]
        return "; ".join(named) or "nothing"


def whole_shard(groups: Sequence[KVGroup]) -> KVShard:
    """Return the shard of all KV of these groups."""
    return KVShard(
        tuple(
            GroupPart(range(_heads_of(group)), range(len(group.layers))) if group.layers else NOTHING
            for group in groups
        )
    )


def rank_shard(
    whole: Sequence[KVGroup], here: Sequence[KVGroup], rank: int = 0, num_ranks: int = 1
) -> KVShard:
    """What one tensor-parallel rank of ``num_ranks`` holds: ``here``, in which heads and layers are counted
    from its own first, as a part of ``whole``. Heads are divided, and copied where there are fewer of them
    than ranks."""
    return KVShard(
        tuple(_rank_part(all_, mine, rank, num_ranks) for all_, mine in zip(whole, here, strict=True))
    )


def _rank_part(whole: KVGroup, here: KVGroup, rank: int, num_ranks: int) -> GroupPart:
    if not here.layers:
        return NOTHING
    head = rank * _heads_of(whole) // num_ranks
    layer = whole.layers.index(here.layers[0])
    return GroupPart(range(head, head + _heads_of(here)), range(layer, layer + len(here.layers)))


def _heads_of(group: KVGroup) -> int:
    return group.kv.heads if isinstance(group.kv, TokenKV) else group.kv.units


def _named(number: int, part: GroupPart) -> str:
    of = f" of group {number}" if number else ""
    return (
        f"heads {part.heads.start} to {part.heads.stop - 1} "
        f"of layers {part.layers.start} to {part.layers.stop - 1}{of}"
    )


def _common(one: GroupPart, other: GroupPart) -> GroupPart:
    """Return the heads and layers that are in both; a part of size 0 if none are."""
    return GroupPart(_overlap(one.heads, other.heads), _overlap(one.layers, other.layers))


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _seen_from(part: GroupPart, other: GroupPart) -> GroupPart:
    heads, layers = other.heads.start, other.layers.start
    return GroupPart(
        range(part.heads.start - heads, part.heads.stop - heads),
        range(part.layers.start - layers, part.layers.stop - layers),
    )


@dataclass(frozen=True, slots=True)
class KVSlice:
    """A pair of ranks, by number, and the part of the KV that goes from the one to the other."""

    prefill: int
    decode: int
    share: KVShard


def slices(prefill: Sequence[KVShard], decode: Sequence[KVShard]) -> tuple[KVSlice, ...]:
    """Return which pairs of ranks exchange what, so that each decode rank gets each head and layer that it
    holds exactly once. Both sides' shares must pass ``objection``.

    Ranks with equal parts of a group are replicas of each other: of these, one that sends to that decode rank
    anyway sends, or the one with the least to send so far.
    """
    load = [0] * len(prefill)
    made: list[KVSlice] = []
    for number, wanted in enumerate(decode):
        parts: dict[int, dict[int, GroupPart]] = {}
        for group, part in enumerate(wanted.groups):
            for held in dict.fromkeys(share.groups[group] for share in prefill):
                common = _common(held, part)
                if not common.size:
                    continue
                replicas = [rank for rank, share in enumerate(prefill) if share.groups[group] == held]
                sender = min(replicas, key=lambda rank: (rank not in parts, load[rank]))
                load[sender] += common.size
                parts.setdefault(sender, {})[group] = common
        for sender, of_group in parts.items():
            groups = tuple(of_group.get(group, NOTHING) for group in range(len(wanted.groups)))
            made.append(KVSlice(sender, number, KVShard(groups)))
    return tuple(made)


def objection(shares: Sequence[KVShard], whole: KVShard) -> str | None:
    """Return what is wrong with the shares of a worker's ranks, or None: of each group, parts that differ
    must have nothing in common, and all together must be the whole KV."""
    if not 0 < len(shares) <= MAX_RANKS:
        return f"{len(shares)} ranks: 1 to {MAX_RANKS} are allowed"
    for share in shares:
        if len(share.groups) != len(whole.groups):
            return f"a rank holds parts of {len(share.groups)} groups, of {len(whole.groups)}"
    for group, all_ in enumerate(whole.groups):
        wrong = _objection(group, [share.groups[group] for share in shares], all_)
        if wrong is not None:
            return wrong
    return None


def _objection(group: int, parts: Sequence[GroupPart], whole: GroupPart) -> str | None:
    different = [part for part in dict.fromkeys(parts) if part.heads or part.layers]
    for number, part in enumerate(different):
        if not part.size or _common(part, whole) != part:
            return f"a rank holds {_named(group, part)}: of {_named(group, whole)} are allowed"
        shared = next((other for other in different[:number] if _common(part, other).size), None)
        if shared is not None:
            return (
                f"one rank holds {_named(group, shared)} and another {_named(group, part)}: "
                "shares are equal or have nothing in common"
            )
    if sum(part.size for part in different) != whole.size:
        return f"the ranks together do not hold {_named(group, whole)}"
    return None
