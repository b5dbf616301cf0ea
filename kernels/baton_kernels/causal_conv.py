"""Causal convolutions of each channel by itself, whose last inputs are kept, and the gated short convolution
of LFM2.

Kept inputs are [conv_kernel - 1, channels], the oldest first. A convolution's weight is [conv_kernel,
channels]: its last row multiplies the token itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.cpu import causal_conv as cpu_causal_conv
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A causal convolution of channels."""

    weight: Tensor
    """[conv_kernel, channels] float32."""
    bias: Tensor | None
    """[channels] float32."""


def convolved(x: Tensor, kept: Tensor, conv: ConvWeights) -> tuple[Tensor, Tensor]:
    """x [T, channels] float32, behind the inputs ``kept`` -> [T, channels], and the inputs to keep, by plain
    torch."""
    inputs = torch.cat((kept, x))
    taps, channels = conv.weight.shape
    out = F.conv1d(inputs.T[None], conv.weight.T[:, None].contiguous(), conv.bias, groups=channels)
    return out[0].T, inputs[len(inputs) - taps + 1 :]


def short_conv(projected: Tensor, conv: ConvWeights, states: LayerStates, rows: StateRows) -> Tensor:
    """Gated short convolutions of a step's rows: projected [T, 3 * channels], each row B, C and x -> [T,
    channels], C times the convolution of B times x. All float32 (on CUDA, what is projected of any type),
    contiguous.

    A unit's cell holds the last inputs of its channels, [conv_kernel - 1, channels of a unit]."""
    if projected.device.type == "cuda":
        from baton_kernels.cuda import causal_conv as cuda_causal_conv  # triton is only there where CUDA is

        return cuda_causal_conv.short_conv(projected, conv.weight, conv.bias, states, rows)
    out = cpu_causal_conv.short_conv(projected, conv.weight, conv.bias, states, rows)
    return _short_conv(projected, conv, states, rows) if out is None else out


def _short_conv(projected: Tensor, conv: ConvWeights, states: LayerStates, rows: StateRows) -> Tensor:
    b, c, x = projected.chunk(3, dim=-1)
    inputs, out = b * x, torch.zeros_like(c)
    decoding = len(rows.decode_targets)
    queries = decoding // max(1, len(rows.decode_sources))
    for row in range(decoding):
        at, target = slice(row, row + 1), rows.decode_targets[row : row + 1]
        if row % queries == 0:
            source = rows.decode_sources[row // queries][None]
        if target[0, 0] >= 0:
            out[at] = _conv_run(inputs[at], conv, states, source, target)
            source = target
    for segment in rows.segments:
        at = slice(segment.start, segment.start + segment.length)
        out[at] = _conv_run(inputs[at], conv, states, segment.source[None], segment.target[None])
    return out.mul_(c)


def _conv_run(
    inputs: Tensor, conv: ConvWeights, states: LayerStates, source: Tensor, target: Tensor
) -> Tensor:
    """Convolve a run of rows of one sequence."""
    taps, (units, size) = len(conv.weight) - 1, (states.kv.units, states.kv.size)
    kept = states.read(source)[0].view(units, taps, size // taps)
    out, kept = convolved(inputs, kept.transpose(0, 1).flatten(1), conv)
    states.write(target, kept.reshape(taps, units, -1).transpose(0, 1).reshape(1, units, size))
    return out
