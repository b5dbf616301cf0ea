"""How the layers of a model share one pool of pages. Imports no torch.

Layers that keep the same form a *group*. A group's *block*, ``block_size`` tokens of all its layers, lies in
as many pages as the group has *tables*: the pages of a sequence's blocks are named by one table for each of
these parts, in the same places of each. All pages have one size in bytes, whatever group takes them, so
memory is never divided between groups beforehand.

A page of a token group is ``[heads, layers, vectors, block_size, dim]`` of the pool's type, where ``layers``
counts as many as fit in a page: kernels take the view of the whole pool as they take a pool of that group
alone. A page of the state group is ``per_page`` cells of float32, one for each unit of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal, TypeAlias

from baton_kernels.window import ChunkedWindow, Window

KVKind = Literal["full", "window", "latent", "state"]
ALIGNMENT = 64
"""The bytes that a page of several groups is a multiple of."""
TABLE_COST = 0.004
"""The share of memory that is given up to have one table less: each is built and read in every step."""


SAMPLES = (512, 8192)
"""The lengths, in tokens, of sequences of which little should be lost."""


class KVLayoutError(ValueError):
    """Groups that cannot share pages of one size."""


@dataclass(frozen=True, slots=True)
class TokenKV:
    """What a layer keeps of each token, on one rank."""

    heads: int
    vectors: int
    """2: K and V. 1: one latent vector that stands for both."""
    dim: int
    """Numbers of a vector."""
    window: Window | None = None
    """The tokens that a query sees; None: all."""

    @property
    def kind(self) -> KVKind:
        if self.vectors == 1:
            return "latent"
        return "full" if self.window is None else "window"

    @property
    def size(self) -> int:
        """Numbers that are kept of a token."""
        return self.heads * self.vectors * self.dim

    def __str__(self) -> str:
        return f"{self.kind} layers of {self.heads} x {self.vectors} x {self.dim} numbers a token"


@dataclass(frozen=True, slots=True)
class StateKV:
    """What a layer keeps of a sequence, on one rank: a state of float32 numbers."""

    units: int
    """Heads, or groups of heads, that tensor parallelism may separate."""
    size: int
    """Numbers of a unit's state."""

    @property
    def kind(self) -> KVKind:
        return "state"

    def __str__(self) -> str:
        return f"state layers of {self.units} x {self.size} numbers"


LayerKV: TypeAlias = TokenKV | StateKV


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same."""

    kv: LayerKV
    layers: tuple[int, ...]
    """The layers that are on this rank, by their index in the whole model, ascending."""
    tables: range
    """The numbers of the group's tables among those of a sequence: pages of a block."""
    per_page: int
    """Layers of a page or, of a state group, cells."""

    @property
    def kind(self) -> KVKind:
        return self.kv.kind


@dataclass(frozen=True, slots=True)
class KVPlace:
    """The place of a layer's KV: in the pages of one table, at an index among their layers. For a state
    layer, the group's first table, and the layer's index in the group."""

    table: int
    index: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model, or of one rank's part of it, and the pages that they share."""

    groups: tuple[KVGroup, ...]
    """Full and latent groups, then windows, then the state."""
    block_size: int
    element_bytes: int
    page_bytes: int
    scale_bytes: int = 0
    """The bytes behind each of a block's K and V of one head: of its scale, if it has one."""

    @classmethod
    def of(
        cls,
        kept: Sequence[Sequence[LayerKV]],
        block_size: int,
        element_bytes: int,
        layers: range | None = None,
        scale_bytes: int = 0,
    ) -> KVLayout:
        """``kept``: what each layer of the whole model keeps on one rank. ``layers``: those that are on this
        rank; None: all. The tables are the same for all ranks. Raises KVLayoutError."""
        kinds = sorted({kv for each in kept for kv in each}, key=_order)
        if not kinds:
            raise KVLayoutError("no layer keeps anything")
        if sum(isinstance(kv, StateKV) for kv in kinds) > 1:
            named = "; ".join(str(kv) for kv in kinds if isinstance(kv, StateKV))
            raise KVLayoutError(f"states of one size are allowed in a model, not {named}")
        cells = [_cell_bytes(kv, block_size, element_bytes, scale_bytes) for kv in kinds]
        counts = [sum(each.count(kv) for each in kept) * _cells(kv) for kv in kinds]
        unit = _unit(kinds, cells)
        tables = _tables(kinds, cells, counts, unit, block_size)
        here = range(len(kept)) if layers is None else layers
        groups: list[KVGroup] = []
        first, page = 0, 0
        for kv, cell, count in zip(kinds, cells, tables, strict=True):
            own = tuple(layer for layer in here if kv in kept[layer])
            per_page = max(1, -(-len(own) * _cells(kv) // count))
            groups.append(KVGroup(kv, own, range(first, first + count), per_page))
            first += count
            page = max(page, per_page * cell)
        return cls(tuple(groups), block_size, element_bytes, -(-page // unit) * unit, scale_bytes)

    @classmethod
    def of_one(cls, block_size: int) -> KVLayout:
        """A layout of one group that keeps something of every token, in one page for each block."""
        kv = TokenKV(1, 2, 1)
        return cls((KVGroup(kv, (0,), range(1), 1),), block_size, 1, 1)

    @property
    def is_plain(self) -> bool:
        """Whether a page is a block of nothing but numbers: there is one group, which keeps K and V, in one
        table, and without scales."""
        [group, *others] = self.groups
        kv = group.kv
        is_alone = not others and not self.scale_bytes
        return is_alone and isinstance(kv, TokenKV) and kv.vectors == 2 and len(group.tables) == 1

    @property
    def has_layer_scales(self) -> bool:
        """Whether K and V are FP8, as no other type has one byte, by scales of each layer."""
        return self.element_bytes == 1 and not self.scale_bytes

    @property
    def keeps_blocks(self) -> bool:
        """Whether a sequence keeps each of its blocks, in one page, as long as it is here."""
        [group, *others] = self.groups
        return not others and group.kind in ("full", "latent")

    @property
    def lost(self) -> float:
        """The share of the pages of a sequence that holds nothing, 0 to 1, at the worse of two lengths."""
        cells = [self._cell_bytes(group) for group in self.groups]
        counts = [len(group.layers) * _cells(group.kv) for group in self.groups]
        tables = [len(group.tables) for group in self.groups]
        kinds = [group.kv for group in self.groups]
        return _lost(kinds, cells, counts, tables, self.page_bytes, self.block_size)

    def kept_bytes(self, group: KVGroup) -> int:
        """The bytes that the group's layers on this rank keep: of a block of tokens, or of a sequence's
        state."""
        return self._cell_bytes(group) * len(group.layers) * _cells(group.kv)

    def _cell_bytes(self, group: KVGroup) -> int:
        return _cell_bytes(group.kv, self.block_size, self.element_bytes, self.scale_bytes)

    @property
    def token_groups(self) -> tuple[KVGroup, ...]:
        return tuple(group for group in self.groups if isinstance(group.kv, TokenKV))

    @property
    def state(self) -> KVGroup | None:
        """The group of the layers that keep a state; None: there are none."""
        last = self.groups[-1]
        return last if isinstance(last.kv, StateKV) else None

    @property
    def num_tables(self) -> int:
        """Tables of the token groups."""
        return sum(len(group.tables) for group in self.token_groups)

    @property
    def state_pages(self) -> int:
        """Pages of one state; 0: no layer keeps any."""
        return 0 if self.state is None else len(self.state.tables)

    def place_of(self, layer: int, kv: LayerKV) -> KVPlace:
        """The place of what a layer of this rank keeps."""
        group = next(group for group in self.groups if group.kv == kv)
        index = group.layers.index(layer)
        if isinstance(kv, StateKV):
            return KVPlace(group.tables.start, index)
        return KVPlace(group.tables.start + index // group.per_page, index % group.per_page)

    def view_shape(self, table: int, num_pages: int) -> tuple[int, ...]:
        """The shape of the pool, ``num_pages`` pages of the pool's type, as blocks of one table of a token
        group: [pages, heads, layers, vectors, block_size, dim]. The last layers of a page may be nobody's."""
        kv = next(group.kv for group in self.token_groups if table in group.tables)
        assert isinstance(kv, TokenKV)
        cell = _cell_bytes(kv, self.block_size, self.element_bytes, self.scale_bytes)
        return (num_pages, kv.heads, self.page_bytes // cell, kv.vectors, self.block_size, kv.dim)


def _order(kv: LayerKV) -> tuple[int, ...]:
    """The place of a group among the others: the same on all ranks, whose heads differ in number alone."""
    kind = ("full", "latent", "window", "state").index(kv.kind)
    if isinstance(kv, StateKV):
        return kind, kv.size, kv.units
    window = kv.window
    seen = (window.size, 1) if isinstance(window, ChunkedWindow) else (window or 0, 0)
    return kind, *seen, kv.dim, kv.vectors, kv.heads


def _cells(kv: LayerKV) -> int:
    """Cells of one layer."""
    return kv.units if isinstance(kv, StateKV) else 1


def _cell_bytes(kv: LayerKV, block_size: int, element_bytes: int, scale_bytes: int) -> int:
    """The bytes of a unit's state, or of a block of one layer."""
    if isinstance(kv, StateKV):
        return kv.size * 4
    return kv.heads * kv.vectors * (kv.dim * block_size * element_bytes + scale_bytes)


def _unit(kinds: Sequence[LayerKV], cells: Sequence[int]) -> int:
    """The bytes that a page is a multiple of. Raises KVLayoutError."""
    if len(kinds) == 1:
        return cells[0]
    of_tokens = [cell for kv, cell in zip(kinds, cells, strict=True) if isinstance(kv, TokenKV)]
    unit = lcm(ALIGNMENT, *of_tokens)
    if of_tokens and unit > 8 * max(*of_tokens, ALIGNMENT):
        named = "; ".join(str(kv) for kv in kinds)
        raise KVLayoutError(
            f"groups cannot share a page size: a block of one layer is {of_tokens} bytes ({named})"
        )
    return unit


def _tables(
    kinds: Sequence[LayerKV], cells: Sequence[int], counts: Sequence[int], unit: int, block_size: int
) -> tuple[int, ...]:
    """The tables of each group, so that little of any page is lost and there are few. Raises
    KVLayoutError."""
    if len(kinds) == 1 and isinstance(kinds[0], TokenKV):
        return (1,)
    largest = max(cell * count for cell, count in zip(cells, counts, strict=True))
    best: tuple[float, tuple[int, ...]] | None = None
    for page in range(unit, largest + unit, unit):
        fits = [page // cell for cell in cells]
        if not all(fits):
            continue
        tables = tuple(-(-count // fit) for count, fit in zip(counts, fits, strict=True))
        lost = _lost(kinds, cells, counts, tables, page, block_size)
        of_tokens = sum(n for kv, n in zip(kinds, tables, strict=True) if isinstance(kv, TokenKV))
        score = lost + TABLE_COST * of_tokens
        if best is None or score < best[0]:
            best = (score, tables)
    assert best is not None  # the largest page holds any cell
    return best[1]


def _lost(
    kinds: Sequence[LayerKV],
    cells: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[int],
    page: int,
    block_size: int,
) -> float:
    """See ``KVLayout.lost``. ``counts``: cells of a block of each group."""
    return max(
        1
        - sum(n * cell * count for n, cell, count in zip(blocks, cells, counts, strict=True))
        / sum(n * page * number for n, number in zip(blocks, tables, strict=True))
        for blocks in ([_blocks(kv, length, block_size) for kv in kinds] for length in SAMPLES)
    )


def _blocks(kv: LayerKV, num_tokens: int, block_size: int) -> int:
    """The blocks that a sequence of ``num_tokens`` keeps; of a state, one."""
    if isinstance(kv, StateKV):
        return 1
    seen = kv.window.size if isinstance(kv.window, ChunkedWindow) else kv.window
    return -(-min(num_tokens, seen or num_tokens) // block_size)
