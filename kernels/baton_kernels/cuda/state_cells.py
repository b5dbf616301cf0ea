"""The way of kernels to the states of layers in pages, and to the rows of chunks.

The segments of one chunk are a *chain*: each starts from the state that the one before leaves. A kernel sees
a chain by its pages alone, as no other sequence's segment starts from them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels.cuda.tiles import last_at_most
from baton_kernels.state_pages import LayerStates

LEAST_LOG = tl.constexpr(-69.0)
"""The smallest logarithm of a decay, as it is 0 in effect; sums of larger numbers would lose what follows."""


def cell_sizes(states: LayerStates) -> dict[str, int]:
    """The constants by which kernels find cells."""
    return {"PER_PAGE": states.group.per_page, "SIZE": states.kv.size}


@triton.jit
def cell_at(
    table: tl.tensor,
    number: tl.tensor,
    page_stride: tl.tensor,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Whether a table has pages, and the place of a cell in them."""
    page = tl.load(table + number // PER_PAGE).to(tl.int64)
    return page >= 0, page * page_stride + number % PER_PAGE * SIZE


@triton.jit
def goes_on(
    sources: tl.tensor, targets: tl.tensor, width: tl.tensor, segment: tl.tensor, count: tl.tensor
) -> tl.tensor:
    """Whether a segment starts from the state behind the one before; ``count`` for a segment does not."""
    source = tl.load(sources + segment * width, mask=segment < count, other=-1)
    before = tl.load(targets + (segment - 1) * width, mask=segment > 0, other=-1)
    return (source >= 0) & (source == before)


@triton.jit
def chain_start(
    sources: tl.tensor, targets: tl.tensor, width: tl.tensor, segment: tl.tensor, count: tl.tensor
) -> tl.tensor:
    """The first segment of a segment's chain."""
    while goes_on(sources, targets, width, segment, count):
        segment -= 1
    return segment


@triton.jit
def chain_stop(
    sources: tl.tensor, targets: tl.tensor, width: tl.tensor, segment: tl.tensor, count: tl.tensor
) -> tl.tensor:
    """The segment behind the chain that begins with ``segment``; ``segment`` if that is within a chain."""
    stop = segment
    if not goes_on(sources, targets, width, segment, count):
        stop += 1
        while goes_on(sources, targets, width, stop, count):
            stop += 1
    return stop


@triton.jit
def piece_of(
    starts: tl.tensor, count: tl.tensor, number: tl.tensor, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The segment of the piece ``number`` of up to ROWS rows, its first row, and the row behind the segment,
    counted from the first segment's. A piece may begin behind its segment: it is none.

    Pieces number as many as rows // ROWS + count at most."""
    segment = last_at_most(starts, count, number, ROWS)
    start = tl.load(starts + segment)
    return segment, start + (number - start // ROWS - segment) * ROWS, tl.load(starts + segment + 1)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + e^x), also of what is far below 0: log(1 + u) = 2 artanh(u / (2 + u))."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    t = s * s
    p = 1.0 / 11 + t * (1.0 / 13)
    p = 1.0 / 7 + t * (1.0 / 9 + t * p)
    p = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * p))
    return tl.where(x > 0.0, x, 0.0) + 2.0 * s * p
