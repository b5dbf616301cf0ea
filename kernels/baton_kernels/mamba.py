"""Mamba-2 (https://arxiv.org/abs/2405.21060): the selective state space of a step's rows.

Each head has a state S [head_dim, state_dim]. A token decays it by exp(-exp(a_log) dt), adds dt x B^T, and
reads S C + d x from it, where dt = softplus(its projection + dt_bias), within limits, is the head's, and B
and C are those of its group of heads. x, B and C come from causal convolutions with SiLU behind.

A unit's cell holds the states of its heads, [heads, head_dim, state_dim], and then the last inputs of its
convolutions, [conv_kernel - 1, channels]: the x of its heads, the B of its groups, their C. Units that share
a group keep its B and C each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.causal_conv import convolved
from baton_kernels.cpu import mamba as cpu_mamba
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.mamba_weights import GatedNorm, MambaWeights
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates

BLOCK = 64
"""Tokens that the chunked form takes together."""


def mamba(
    projected: Tensor, weights: MambaWeights, sizes: MambaSizes, states: LayerStates, rows: StateRows
) -> Tensor:
    """projected [T, sizes.columns] float32 (on CUDA of any type) contiguous, each row z, x, B, C and dt ->
    [T, sizes.inner] float32, before the gate; rows of padding are 0. States go from the sources of ``rows``
    to its targets: row by row for those that decode, in blocks of tokens for chunks."""
    if projected.device.type == "cuda":
        from baton_kernels.cuda import mamba as cuda_mamba  # triton is only there where CUDA is

        return cuda_mamba.mamba(projected, weights, sizes, states, rows)
    out = cpu_mamba.mamba(
        projected,
        (weights.conv.weight, weights.conv.bias, weights.a_log, weights.d, weights.dt_bias),
        weights.dt_limits,
        sizes,
        states,
        rows,
    )
    return _mamba(projected, weights, sizes, states, rows) if out is None else out


def gated_norm(
    y: Tensor, gate: Tensor, norm: GatedNorm, dtype: torch.dtype, squares: Tensor | None = None
) -> Tensor:
    """y and gate [T, numbers] float32 (on CUDA, the gate of any type) -> [T, numbers] of type ``dtype``; y is
    memory for the kernels then. ``squares`` [T, groups] float32: the sums over all ranks of
    ``gated_squares``; None: the numbers are all there are."""
    if y.device.type == "cuda":
        from baton_kernels.cuda import mamba as cuda_mamba

        return cuda_mamba.gated_norm(y, gate, norm, dtype, squares)
    if y.device.type == "cpu":
        out = cpu_mamba.gated_norm(
            y, gate, norm.weight, norm.eps, norm.groups, norm.size, norm.gate_first, dtype, squares
        )
        if out is not None:
            return out
    opened = F.silu(gate)
    if norm.weight is None:
        return (y * opened).to(dtype)
    if squares is None:
        squares = gated_squares(y, gate, norm)
    factors = torch.rsqrt(squares / norm.size + norm.eps)
    normed = y * opened if norm.gate_first else y
    normed = (_grouped(normed, norm.groups) * factors[..., None]).flatten(-2) * norm.weight
    return (normed if norm.gate_first else normed * opened).to(dtype)


def gated_squares(y: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
    """y [T, numbers] float32, gate likewise, of any type -> [T, groups] float32: the sums of the squares of
    what is normed."""
    normed = y * F.silu(gate.float()) if norm.gate_first else y
    return _grouped(normed, norm.groups).square().sum(-1)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """x [T, numbers] -> [T, groups, numbers of a group]."""
    return x.reshape(len(x), groups, -1)


def _mamba(
    projected: Tensor, weights: MambaWeights, sizes: MambaSizes, states: LayerStates, rows: StateRows
) -> Tensor:
    out = projected.new_zeros((len(projected), sizes.inner))
    decoding = len(rows.decode_targets)
    queries = decoding // max(1, len(rows.decode_sources))
    for row in range(decoding):
        target = rows.decode_targets[row : row + 1]
        if row % queries == 0:
            source = rows.decode_sources[row // queries][None]
        if target[0, 0] >= 0:
            at = slice(row, row + 1)
            out[at] = _run(projected[at], weights, sizes, states, source, target)
            source = target
    for segment in rows.segments:
        at = slice(segment.start, segment.start + segment.length)
        source, target = segment.source[None], segment.target[None]
        out[at] = _run(projected[at], weights, sizes, states, source, target)
    return out


def _run(
    projected: Tensor,
    weights: MambaWeights,
    sizes: MambaSizes,
    states: LayerStates,
    source: Tensor,
    target: Tensor,
) -> Tensor:
    """Compute a run of rows of one sequence by plain torch."""
    units, heads, taps = sizes.units, sizes.units * sizes.heads, sizes.conv_kernel - 1
    cells = states.read(source)[0]
    state, kept = cells.split_with_sizes([sizes.state_size, taps * sizes.unit_channels], dim=-1)
    inputs, dt = _by_unit(projected, sizes)
    kept = kept.view(units, taps, -1).transpose(0, 1).flatten(1)
    mixed, kept = convolved(inputs, kept, weights.conv)
    x, b, c = _grouped(F.silu(mixed), units).split_with_sizes(sizes.channels, dim=-1)
    x = x.reshape(len(x), heads, sizes.head_dim)
    b, c = (part.reshape(len(x), units * sizes.unit_groups, -1) for part in (b, c))
    b, c = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (b, c))
    dt = F.softplus(dt + weights.dt_bias).clamp(*weights.dt_limits)
    y, state = scanned(x, dt, -weights.a_log.exp() * dt, b, c, state.reshape(heads, sizes.head_dim, -1))
    kept = _grouped(kept, units).transpose(0, 1).flatten(1)
    states.write(target, torch.cat((state.reshape(units, -1), kept), dim=1)[None])
    return (y + weights.d[:, None] * x).flatten(1)


def _by_unit(projected: Tensor, sizes: MambaSizes) -> tuple[Tensor, Tensor]:
    """The inputs of the convolutions of each unit, [T, units * unit_channels], and the inputs of dt, [T,
    heads of all units]."""
    groups = sizes.groups * sizes.state_dim
    parts = [sizes.inner, sizes.inner, groups, groups, sizes.units * sizes.heads]
    _, x, b, c, dt = projected.split_with_sizes(parts, dim=-1)
    of_groups = torch.tensor([sizes.first_group(unit) for unit in range(sizes.units)])
    of_groups = of_groups[:, None] + torch.arange(sizes.unit_groups)
    b, c = (_grouped(part, sizes.groups)[:, of_groups].flatten(2) for part in (b, c))
    return torch.cat((_grouped(x, sizes.units), b, c), dim=-1).flatten(1), dt


def scanned(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """x [T, heads, head_dim], dt and the logarithms of decays [T, heads], b and c [T, heads, state_dim],
    state [heads, head_dim, state_dim] -> what the tokens read [T, heads, head_dim], and the state behind
    them, block by block."""
    outs = []
    for at in range(0, len(x), BLOCK):
        block = slice(at, at + BLOCK)
        sums = decay[block].double().cumsum(0)
        between = sums[:, None] - sums[None]
        mask = torch.ones(between.shape[:2], dtype=torch.bool).tril()
        between = between.masked_fill(~mask[..., None], -torch.inf).exp().to(x.dtype)
        scores = torch.einsum("lhn,shn->lsh", c[block], b[block]) * between * dt[block][None]
        read = torch.einsum("lhn,hpn->lhp", c[block], state) * sums.exp().to(x.dtype)[..., None]
        outs.append(read + torch.einsum("lsh,shp->lhp", scores, x[block]))
        weights = (between[-1] * dt[block])[..., None]
        state = state * sums[-1].exp().to(x.dtype)[:, None, None]
        state = state + torch.einsum("shp,shn->hpn", x[block] * weights, b[block])
    return torch.cat(outs), state
