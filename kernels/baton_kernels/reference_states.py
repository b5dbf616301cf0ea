"""Reference implementations of what layers with a state compute: float64, one token and one head at a
time."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.delta_layer import DeltaInputs, DeltaLayer


def reference_linear_attention(
    layer: DeltaLayer, inputs: DeltaInputs, state: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of one sequence. state [value_heads, key_dim, value_dim], kept [taps, channels]: the
    channels as in ``DeltaInputs.qkv`` -> the outputs [T, value_heads, value_dim], and the new state and
    inputs, float64."""
    state = state.double().clone()
    own, kept = _convolved(layer, inputs.qkv.double(), kept.double())
    out = torch.zeros(len(own), layer.value_heads, layer.value_dim, dtype=torch.float64)
    for token, mixed in enumerate(own):
        for head in range(layer.value_heads):
            q, k, v = _head(layer, mixed, head)
            state[head] *= _decay(layer, inputs.decay, token, head)[:, None]
            if inputs.beta is None:
                change = v
            else:
                change = torch.sigmoid(inputs.beta[token, head].double()) * (v - k @ state[head])
            state[head] += torch.outer(k, change)
            out[token, head] = _finished(layer, q @ state[head], inputs.gate, token, head)
    return out, state, kept


def _convolved(layer: DeltaLayer, own: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    if layer.conv is None:
        return own, kept
    both, out = torch.cat((kept, own)), torch.zeros_like(own)
    for token in range(len(own)):
        summed = (layer.conv.double() * both[token : token + layer.taps + 1]).sum(0)
        out[token] = summed / (1 + torch.exp(-summed))
    return out, both[len(own) :]


def _head(layer: DeltaLayer, mixed: Tensor, head: int) -> tuple[Tensor, Tensor, Tensor]:
    key_head, keys = head // layer.shared, layer.key_heads * layer.key_dim
    at = slice(key_head * layer.key_dim, (key_head + 1) * layer.key_dim)
    q, k = mixed[:keys][at], mixed[keys:][at]
    v = mixed[2 * keys :][head * layer.value_dim : (head + 1) * layer.value_dim]
    if layer.unit_vectors:
        q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
    return q * layer.query_scale, k, v


def _decay(layer: DeltaLayer, inputs: Tensor | None, token: int, head: int) -> Tensor:
    """[key_dim]."""
    rate = layer.a_log[head].double().exp()
    if inputs is None:
        return torch.exp(-rate).expand(layer.key_dim)
    x = inputs[token].double()
    x = x if layer.dt_bias is None else x + layer.dt_bias.double()
    x = x.view(layer.value_heads, -1)[head].expand(layer.key_dim)
    if layer.lower_bound is not None:
        return torch.exp(layer.lower_bound * torch.sigmoid(rate * x))
    return torch.exp(-rate * torch.log1p(torch.exp(x)))


def _finished(layer: DeltaLayer, out: Tensor, gates: Tensor | None, token: int, head: int) -> Tensor:
    if layer.norm is not None:
        out = out / (out.square().mean() + layer.eps).sqrt() * layer.norm.double()
    if gates is None:
        return out
    gate = gates[token].double().view(layer.value_heads, -1)[head]
    return out * torch.sigmoid(gate) * (1 if layer.gate == "sigmoid" else gate)
