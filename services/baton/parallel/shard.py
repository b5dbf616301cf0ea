"""One rank's part of a model. Pure: sizes in, ranges out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StateSplit(Protocol):
    """Layers that keep a state, whose parts tensor parallelism cannot take apart; they name themselves."""

    def may_split(self, ranks: int) -> bool: ...


class ModelSizes(Protocol):
    """The sizes that a model's split depends on; ``ModelConfig`` has them."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def inner_sizes(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def state_splits(self) -> tuple[StateSplit, ...]: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place, and its part of the model.

    The ranks of a tensor-parallel group are adjacent: ``rank = pp_rank * tp_size + tp_rank``. Rank 0 leads.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    heads: range
    """Query heads."""
    kv_heads: range
    """KV heads that the rank's query heads read. With more ranks than KV heads, several ranks hold the same
    one."""
    layers: range
    inner: range
    """Rows of the MLP's gate and up projections."""
    vocab_parts: tuple[range, ...]
    """Token ids whose rows of the embedding and the output head each rank of the group has."""

    @classmethod
    def of(cls, sizes: ModelSizes, rank: int, tp_size: int, pp_size: int) -> Shard:
        """The part of ``rank`` out of ``tp_size * pp_size``. ValueError if the model cannot be split like
        that."""
        check_split(sizes, tp_size, pp_size)
        pp_rank, tp_rank = divmod(rank, tp_size)
        return cls(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            heads=split(sizes.num_heads, tp_size, tp_rank),
            kv_heads=_kv_heads(sizes.num_kv_heads, tp_size, tp_rank),
            layers=split(sizes.num_layers, pp_size, pp_rank),
            inner=split(sizes.intermediate_size, tp_size, tp_rank),
            vocab_parts=tuple(split(sizes.vocab_size, tp_size, index) for index in range(tp_size)),
        )

    @classmethod
    def whole(cls, sizes: ModelSizes) -> Shard:
        """The whole model as one shard."""
        return cls.of(sizes, 0, 1, 1)

    def part(self, size: int) -> range:
        """The rank's part of ``size`` inner rows."""
        return split(size, self.tp_size, self.tp_rank)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp_size * self.pp_size

    @property
    def vocab(self) -> range:
        """Token ids whose rows this rank has."""
        return self.vocab_parts[self.tp_rank]

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank has the final norm and the output head."""
        return self.pp_rank == self.pp_size - 1

    @property
    def last_stage(self) -> range:
        """The ranks that have the output head."""
        return range(self.world - self.tp_size, self.world)


def split(size: int, parts: int, index: int) -> range:
    """Part ``index`` of ``size`` things in order, in ``parts`` parts of which the first ones may have one
    more than the others."""
    each, rest = divmod(size, parts)
    start = index * each + min(index, rest)
    return range(start, start + each + (index < rest))


def check_split(sizes: ModelSizes, tp_size: int, pp_size: int) -> None:
    """Checks that the model allows the split. ValueError names the option that does not fit, its value and
    what is allowed."""
    if not _may_split(sizes, tp_size):
        allowed = ", ".join(str(n) for n in range(1, sizes.num_heads + 1) if _may_split(sizes, n))
        states = "".join(f" and {kind}" for kind in sizes.state_splits)
        raise ValueError(
            f"tensor_parallel_size is {tp_size}; allowed for a model of {sizes.num_heads} attention heads "
            f"and {sizes.num_kv_heads} KV heads{states}: {allowed}"
        )
    if not 1 <= pp_size <= sizes.num_layers:
        raise ValueError(
            f"pipeline_parallel_size is {pp_size}; allowed: 1 to {sizes.num_layers}, the model's layers"
        )


def _may_split(sizes: ModelSizes, tp_size: int) -> bool:
    if tp_size < 1 or sizes.num_heads % tp_size or tp_size > min(*sizes.inner_sizes, sizes.vocab_size):
        return False
    if not all(kind.may_split(tp_size) for kind in sizes.state_splits):
        return False
    return sizes.num_kv_heads % tp_size == 0 or tp_size % sizes.num_kv_heads == 0


def _kv_heads(num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    if tp_size <= num_kv_heads:
        return split(num_kv_heads, tp_size, tp_rank)
    head = tp_rank * num_kv_heads // tp_size
    return range(head, head + 1)
