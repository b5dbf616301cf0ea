"""Linear attention by plain torch, on any device: see ``baton_kernels.delta_rule``.

Rows of decode follow the recurrence. A segment is cut into chunks, whose tokens are computed at once, by
matmuls and the solution of one triangular system (the UT transform, https://arxiv.org/abs/2406.06484).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens of a chunk, and of one with a decay for each channel, whose pairs of tokens have as many factors as
there are channels."""
UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class HeadRows:
    """What the recurrence reads of some rows, float32; G: the decays of a head, one or one a channel."""

    q: Tensor
    """[..., value_heads, key_dim]."""
    k: Tensor
    v: Tensor
    """[..., value_heads, value_dim]."""
    log_decay: Tensor
    """[..., value_heads, G]."""
    beta: Tensor | None
    """[..., value_heads]."""

    def at(self, rows: slice | int) -> HeadRows:
        """The rows of these indices of the first dimension."""
        beta = None if self.beta is None else self.beta[rows]
        return HeadRows(self.q[rows], self.k[rows], self.v[rows], self.log_decay[rows], beta)


def linear_attention(layer: DeltaLayer, inputs: DeltaInputs, states: LayerStates, rows: StateRows) -> Tensor:
    """See ``baton_kernels.delta_rule.linear_attention``."""
    tokens, heads, dim = len(inputs.qkv), layer.value_heads, layer.value_dim
    out = torch.zeros((tokens, heads, dim), device=inputs.qkv.device)
    if len(rows.decode_targets):
        _decode(layer, inputs, states, rows, out)
    for segment in rows.segments:
        here = slice(segment.start, segment.start + segment.length)
        heads_state, kept = split_cells(layer, states.read(segment.source[None]))
        mixed, kept = convolved(layer, inputs.qkv[None, here], kept)
        read = head_rows(layer, mixed[0], *(_rows(x, here) for x in (inputs.decay, inputs.beta)))
        out[here], state = chunked(read, heads_state[0])
        states.write(segment.target[None], joined_cells(layer, state[None], kept))
    return finished(layer, out, inputs.gate).to(inputs.qkv.dtype)


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def _decode(
    layer: DeltaLayer, inputs: DeltaInputs, states: LayerStates, rows: StateRows, out: Tensor
) -> None:
    """The rows of the decoding sequences -> the first rows of ``out``."""
    count, queries = len(rows.decode_sources), len(rows.decode_targets) // len(rows.decode_sources)
    state, kept = split_cells(layer, states.read(rows.decode_sources))
    for query in range(queries):
        here = slice(query, count * queries, queries)
        targets = rows.decode_targets[here]
        mixed, next_kept = convolved(layer, inputs.qkv[here, None], kept)
        read = head_rows(layer, mixed[:, 0], *(_rows(x, here) for x in (inputs.decay, inputs.beta)))
        result, next_state = recurrent(read, state)
        # Padding has no target and leaves the state as it is.
        counts = targets[:, 0] >= 0
        out[here] = result * counts[:, None, None]
        state = torch.where(counts[:, None, None, None], next_state, state)
        kept = torch.where(counts[:, None, None, None], next_kept, kept)
        states.write(targets, joined_cells(layer, state, kept))


def split_cells(layer: DeltaLayer, cells: Tensor) -> tuple[Tensor, Tensor]:
    """cells [n, key_heads, size] -> the states [n, value_heads, key_dim, value_dim], and the convolutions'
    inputs [n, key_heads, taps, unit_channels]."""
    size = layer.shared * layer.key_dim * layer.value_dim
    state = cells[..., :size].reshape(len(cells), layer.value_heads, layer.key_dim, layer.value_dim)
    return state, cells[..., size:].reshape(*cells.shape[:2], layer.taps, layer.unit_channels)


def joined_cells(layer: DeltaLayer, state: Tensor, kept: Tensor) -> Tensor:
    """What :func:`split_cells` splits."""
    parts = state.reshape(len(state), layer.key_heads, -1), kept.flatten(2)
    return torch.cat(parts, dim=-1)


def by_unit(layer: DeltaLayer, mixed: Tensor) -> Tensor:
    """[..., channels] of all heads' queries, keys and values -> [..., key_heads, unit_channels]."""
    return torch.cat(split_heads(layer, mixed), dim=-1)


def split_heads(layer: DeltaLayer, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., channels] -> queries and keys [..., key_heads, key_dim], values [..., key_heads, values of
    one]."""
    keys, values = layer.key_heads * layer.key_dim, layer.shared * layer.value_dim
    heads = *mixed.shape[:-1], layer.key_heads
    q, k, v = mixed.split_with_sizes([keys, keys, layer.key_heads * values], dim=-1)
    return (
        q.reshape(*heads, layer.key_dim),
        k.reshape(*heads, layer.key_dim),
        v.reshape(*heads, values),
    )


def convolved(layer: DeltaLayer, mixed: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """mixed [n, tokens, channels], kept [n, key_heads, taps, unit_channels] -> [n, tokens, key_heads,
    unit_channels] float32, and the inputs that are kept then."""
    own = by_unit(layer, mixed.float())
    if layer.conv is None:
        return own, kept
    weight = by_unit(layer, layer.conv)
    both = torch.cat((kept.transpose(1, 2), own), dim=1)
    summed = sum(weight[j] * both[:, j : j + own.shape[1]] for j in range(len(weight)))
    return F.silu(torch.as_tensor(summed)), both[:, own.shape[1] :].transpose(1, 2)


def head_rows(layer: DeltaLayer, mixed: Tensor, decay: Tensor | None, beta: Tensor | None) -> HeadRows:
    """mixed [n, key_heads, unit_channels], decay [n, ...] and beta [n, value_heads] of ``DeltaInputs``."""
    q, k, v = mixed.split_with_sizes([layer.key_dim, layer.key_dim, layer.shared * layer.value_dim], dim=-1)
    if layer.unit_vectors:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(layer.shared, dim=1) for x in (q * layer.query_scale, k))
    v = v.reshape(len(v), layer.value_heads, layer.value_dim)
    logits = None if beta is None else torch.sigmoid(beta.float())
    return HeadRows(q, k, v, log_decay(layer, decay, len(mixed)), logits)


def log_decay(layer: DeltaLayer, x: Tensor | None, rows: int) -> Tensor:
    """The decays' input, of as many rows -> [rows, value_heads, 1 or key_dim]."""
    rate = layer.a_log.exp()[:, None]
    if x is None:
        return -rate.expand(rows, -1, -1)
    x = x.float() if layer.dt_bias is None else x.float() + layer.dt_bias
    x = x.view(rows, layer.value_heads, -1)
    if layer.lower_bound is not None:
        return layer.lower_bound * torch.sigmoid(rate * x)
    return -rate * F.softplus(x)


def recurrent(rows: HeadRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n sequences, by their states [n, value_heads, key_dim, value_dim] -> the outputs
    [n, value_heads, value_dim], and the new states."""
    state = state * rows.log_decay.exp()[..., None]
    change = rows.v
    if rows.beta is not None:
        change = rows.beta[..., None] * (rows.v - (rows.k[..., None] * state).sum(-2))
    state = state + rows.k[..., None] * change[..., None, :]
    return (rows.q[..., None] * state).sum(-2), state


def chunked(rows: HeadRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of one sequence [tokens, ...], by its state [value_heads, key_dim, value_dim] -> the outputs
    [tokens, value_heads, value_dim], and the new state."""
    size = CHUNK if rows.log_decay.shape[-1] == 1 else CHANNEL_CHUNK
    outputs: list[Tensor] = []
    for start in range(0, len(rows.q), size):
        out, state = _one_chunk(rows.at(slice(start, start + size)), state)
        outputs.append(out)
    return torch.cat(outputs), state


def _one_chunk(rows: HeadRows, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(0, 1) for x in (rows.q, rows.k, rows.v))
    log = rows.log_decay.transpose(0, 1).cumsum(1)
    whole = log.exp()
    change = v
    if rows.beta is not None:
        beta = rows.beta.T[..., None]
        known = beta * _products(k, k, log).tril(-1)
        wanted = beta * (v - (k * whole) @ state)
        change = torch.linalg.solve_triangular(known, wanted, upper=False, unitriangular=True)
    out = (q * whole) @ state + _products(q, k, log).tril() @ change
    last = log[:, -1:]
    state = state * last.exp().transpose(1, 2) + (k * (last - log).exp()).transpose(1, 2) @ change
    return out.transpose(0, 1), state


def _products(left: Tensor, right: Tensor, log: Tensor) -> Tensor:
    """left, right [heads, tokens, key_dim], log [heads, tokens, G] -> [heads, tokens, tokens]: the product of
    each two tokens, faded from the right one's to the left one's; the upper triangle has no meaning."""
    fading = (log[:, :, None] - log[:, None]).clamp(max=0).exp()
    if fading.shape[-1] == 1:
        return (left @ right.transpose(1, 2)) * fading[..., 0]
    return (left[:, :, None] * right[:, None] * fading).sum(-1)


def finished(layer: DeltaLayer, out: Tensor, gate: Tensor | None) -> Tensor:
    """out [T, value_heads, value_dim] -> [T, value_heads * value_dim], normed and gated."""
    if layer.norm is not None:
        out = F.rms_norm(out, layer.norm.shape, layer.norm, layer.eps)
    flat = out.flatten(1)
    if gate is None:
        return flat
    return flat * (torch.sigmoid(gate.float()) if layer.gate == "sigmoid" else F.silu(gate.float()))
