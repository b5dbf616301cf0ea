"""Reference implementations of the kernels, written to be read: float64, one token, one head, one row at a
time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton_kernels.activation_kind import ALPHA, Activation
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.norm import Norm
from baton_kernels.paged import PagedBatch
from baton_kernels.routing_rule import Routing
from baton_kernels.window import ChunkedWindow, Window


def reference_write_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, batch: PagedBatch) -> None:
    """Store k and v, both [T, kv_heads, head_dim], slot by slot."""
    places = zip(batch.slot_blocks.tolist(), batch.slot_offsets.tolist(), strict=True)
    for token, (block, offset) in enumerate(places):
        pool[block, :, layer, 0, offset] = k[token]
        pool[block, :, layer, 1, offset] = v[token]


def reference_turned(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> Tensor:
    """x [T, heads, head_dim] normed (with a weight, to which ``offset`` is added) and rotated, float64."""
    out = x.double()
    if weight is not None:
        out = out / (out.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
    half = x.shape[-1] // 2
    swapped = torch.cat((out[..., half:], out[..., :half]), dim=-1)
    return out * cos.double() + swapped * sin.double()


def reference_attention(
    pool: Tensor,
    layer: int,
    q: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: Window | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, heads, head_dim] -> [T, heads, head_dim] float64; rows of no sequence, and padding, stay 0.
    ``sinks`` [heads]: a score of each head that has a weight and no value."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, (table, context) in _rows(batch).items():
        first = _first_seen(context, window)
        k, v = (_read(pool, layer, part, table, first, context) for part in (0, 1))
        for head in range(q.shape[1]):
            kv_head = head * pool.shape[1] // q.shape[1]
            scores = k[:, kv_head] @ q[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double()[None]))
            out[row, head] = torch.softmax(scores, dim=0)[: len(v)] @ v[:, kv_head]
    return out


def reference_latent_attention(
    view: Tensor, layer: int, q: Tensor, batch: PagedBatch, *, scale: float, value_dim: int
) -> Tensor:
    """q [T, heads, width] over a pool of latents -> [T, heads, value_dim] float64; rows of no sequence, and
    padding, stay 0."""
    out = torch.zeros((*q.shape[:2], value_dim), dtype=torch.float64, device=q.device)
    for row, (table, context) in _rows(batch).items():
        latents = _read(view, layer, 0, table, 0, context)[:, 0]
        for head in range(q.shape[1]):
            weights = torch.softmax(latents @ q[row, head].double() * scale, dim=0)
            out[row, head] = weights @ latents[:, :value_dim]
    return out


def reference_expanded_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """q [L, heads, qk_dim], k [C, heads, qk_dim], v [C, heads, v_dim] -> [L, heads, v_dim] float64: causal,
    the last query sees all."""
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64, device=q.device)
    for row in range(len(q)):
        seen = len(k) - len(q) + row + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head].double() @ q[row, head].double() * scale
            out[row, head] = torch.softmax(scores, dim=0) @ v[:seen, head].double()
    return out


def _first_seen(context: int, window: Window | None) -> int:
    """The first token that a row sees which is the last of ``context`` tokens."""
    if isinstance(window, ChunkedWindow):
        return (context - 1) // window.size * window.size
    return 0 if window is None else max(0, context - window)


def _rows(batch: PagedBatch) -> dict[int, tuple[list[int], int]]:
    """Row of the step -> the block table of its sequence and the number of tokens it sees."""
    rows = {
        row: (batch.decode_tables[row // batch.decode_queries].tolist(), int(batch.decode_contexts[row]))
        for row in range(batch.num_decode)
        if batch.decode_contexts[row]
    }
    for chunk in batch.chunks:
        for index in range(chunk.length):
            rows[chunk.start + index] = (chunk.table.tolist(), chunk.context - chunk.length + index + 1)
    return rows


def _read(pool: Tensor, layer: int, part: int, table: list[int], first: int, stop: int) -> Tensor:
    """K (part 0) or V (part 1) of tokens first..stop-1, [tokens, kv_heads, head_dim] float64."""
    block_size = pool.shape[4]
    tokens = torch.arange(first, stop, device=pool.device)
    blocks = torch.tensor(table, device=pool.device)[tokens // block_size]
    return pool[:, :, layer, part][blocks, :, tokens % block_size].double()


def reference_norm(x: Tensor, norm: Norm | None) -> Tensor:
    """The norm of x [T, size] (None: x), float64."""
    x = x.double()
    if norm is None:
        return x
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.offset)
    return x if norm.bias is None else x + norm.bias.double()


def reference_activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each number that needs no gate, float64."""
    x = x.double()
    if activation.kind == "silu":
        return x / (1 + torch.exp(-x))
    if activation.kind == "relu2":
        return x.clamp(min=0) ** 2
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activated gate times up, float64."""
    gate, up, limit = gate.double(), up.double(), activation.number
    if activation.kind == "scaled_silu":
        return limit * gate / (1 + torch.exp(-limit * gate)) * up
    if activation.kind != "clamped_swiglu":
        return reference_activated(gate, activation) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-ALPHA * gate)) * (up + 1)


def reference_draw(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    times: Tensor,
    bucket: int,
) -> tuple[int, float]:
    """The token of a row of ``logits`` [V] that the filters leave and that wins the race.

    ``times`` are exponential numbers: for the tokens of a bucket, [bucket], and then for all buckets.

    Also returns the margin of that choice: the least relative change of a sum, of a weight against ``min_p``,
    or of a competitor's speed, that would change the token.
    """
    weights = torch.exp((logits.double() - logits.double().max()) / temperature)
    ordered = weights.sort(descending=True).values[: top_k or None]
    mass = ordered.cumsum(0)
    margins = [math.inf]
    least = float(ordered[-1]) if top_k else 0.0
    if top_p < 1:
        least = float(ordered[int((mass < top_p * mass[-1]).sum())])
        margins.append(float((mass / mass[-1] - top_p).abs().min()))
    if min_p > 0:
        # The likeliest token is always kept.
        margins.append(float((weights / min_p - 1).abs().masked_fill(weights == 1, math.inf).min()))
    kept = torch.where(weights >= max(least, min_p), weights, 0.0)
    masses = torch.stack([kept[at : at + bucket].sum() for at in range(0, len(kept), bucket)])
    buckets = masses / times[bucket:]
    first = bucket * int(buckets.argmax())
    tokens = kept[first : first + bucket] / times[: min(bucket, len(kept) - first)]
    for speeds in (buckets, tokens):
        best, *others = speeds.sort(descending=True).values.tolist()
        margins.append(1 - others[0] / best if others else math.inf)
    return first + int(tokens.argmax()), min(margins)


def reference_adjust(
    logits: list[float],
    barred: list[int],
    bias: dict[int, float],
    outputs: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
) -> list[float]:
    """A row of logits after the rules about single tokens. ``outputs``: how often each token was output."""
    result = [-math.inf if token in barred else value for token, value in enumerate(logits)]
    for token, value in bias.items():
        result[token] += value
    for token, count in outputs.items():
        value = result[token]
        value = value / repetition if value > 0 else value * repetition
        result[token] = value - frequency * count - (presence if count else 0.0)
    return result


def reference_route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[list[list[int]], Tensor]:
    """logits [T, experts] -> each token's experts, and their weights [T, top_k] float64. Of equal experts, or
    groups, the first is chosen."""
    chosen, weights = [], torch.zeros(len(logits), routing.top_k, dtype=torch.float64)
    for token, line in enumerate(logits.double().cpu()):
        if routing.scores == "sparsemixer":
            experts = _sparsemixed(line.tolist(), routing, weights[token])
        else:
            scores = line.softmax(0) if routing.scores == "softmax" else line.sigmoid()
            experts = _chosen((scores if bias is None else scores + bias.double().cpu()).tolist(), routing)
            weights[token] = scores[experts]
            if routing.renormalize:
                weights[token] /= weights[token].sum().clamp(min=routing.least_sum)
            weights[token] *= routing.scale
        chosen.append(experts)
    return chosen, weights


def _chosen(choice: list[float], routing: Routing) -> list[int]:
    """The experts of the best numbers, out of the best groups."""
    size = len(choice) // routing.groups
    groups = [range(at, at + size) for at in range(0, len(choice), size)]
    if len(groups) > 1:
        best = routing.group_best
        groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:best]))
        groups = groups[: routing.top_groups]
    experts = sorted(expert for group in groups for expert in group)
    return sorted(experts, key=lambda expert: -choice[expert])[: routing.top_k]


def _sparsemixed(logits: list[float], routing: Routing, weights: Tensor) -> list[int]:
    """The experts that sparsemixer chooses one after the other. Fills in their ``weights`` [top_k]."""
    chosen: list[int] = []
    for place in range(routing.top_k):
        left = [expert for expert in range(len(logits)) if expert not in chosen]
        best = max(left, key=lambda expert: logits[expert])
        far = 2 * routing.jitter
        near = [
            math.exp(logits[expert] - logits[best])
            for expert in left
            if logits[best] - logits[expert] <= far * max(abs(logits[expert]), logits[best])
        ]
        weights[place] = 1 / sum(near)
        chosen.append(best)
    return chosen


def reference_experts(
    x: Tensor, experts: Tensor, weights: Tensor, tensors: ExpertTensors, weighs_input: bool
) -> Tensor:
    """x [T, hidden], experts and weights [T, k] -> [T, hidden] float64, one expert of one token after the
    other."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            taken = x[token].double() * (weight if weighs_input else 1.0)
            both = tensors.gate_up[expert].double() @ taken
            if tensors.gate_up_bias is not None:
                both += tensors.gate_up_bias[expert].double()
            if tensors.is_gated:
                gate, up = both.chunk(2)
                inner = reference_gated(gate, up, tensors.activation)
            else:
                inner = reference_activated(both, tensors.activation)
            result = tensors.down[expert].double() @ inner
            if tensors.down_bias is not None:
                result += tensors.down_bias[expert].double()
            out[token] += result * (1.0 if weighs_input else weight)
    return out


def reference_convolved(
    x: Tensor, kept: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [T, channels] behind ``kept`` [conv_kernel - 1, channels], weight [conv_kernel, channels] -> the
    causal convolution of each channel [T, channels] float64, and what is kept behind it."""
    inputs, out = torch.cat((kept, x)).double(), torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for tap in range(len(weight)):
            out[token] += weight[tap].double() * inputs[token + tap]
        if bias is not None:
            out[token] += bias.double()
    return out, inputs[len(x) :]


def reference_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """x [T, heads, head_dim], dt [T, heads], a and d [heads], b and c [T, heads, state_dim], state [heads,
    head_dim, state_dim] -> what each token reads from its head's state [T, heads, head_dim], and the state
    behind the last token, float64."""
    out, state = torch.zeros(x.shape, dtype=torch.float64), state.double().clone()
    for token in range(len(x)):
        for head in range(x.shape[1]):
            step = dt[token, head].double()
            state[head] *= torch.exp(a[head].double() * step)
            state[head] += step * torch.outer(x[token, head].double(), b[token, head].double())
            out[token, head] = (
                state[head] @ c[token, head].double() + d[head].double() * x[token, head].double()
            )
    return out, state


def reference_gated_norm(
    y: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int, gate_first: bool
) -> Tensor:
    """y and gate [T, numbers] -> the norm of each group of numbers, gated in front of it or behind it,
    float64. No weight: the gate alone."""
    y, opened = y.double(), gate.double() / (1 + torch.exp(-gate.double()))
    if weight is None:
        return y * opened
    y = y * opened if gate_first else y
    parts = [part / (part.square().mean(-1, keepdim=True) + eps).sqrt() for part in y.chunk(groups, dim=-1)]
    y = torch.cat(parts, dim=-1) * weight.double()
    return y if gate_first else y * opened
