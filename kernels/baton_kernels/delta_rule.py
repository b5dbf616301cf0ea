"""Linear attention with a state for each head: by the kernels of the tensors' device, by plain torch where
there are none.

A value head has a state S [key_dim, value_dim], float32. For each token, with the query q and the key k of
its key head, its value v, a decay a (of the head, or of each channel of the key) and beta::

    S = a S
    S = S + k (beta (v - k S))      the delta rule; without beta: S + k v
    out = q S

(gated delta nets: https://arxiv.org/abs/2412.06464; Kimi delta attention: https://arxiv.org/abs/2510.26692;
lightning attention: https://arxiv.org/abs/2401.04658). Queries, keys and values may pass a causal convolution
and SiLU first, and the output a norm and a gate. Everything but the inputs and the result is float32.

The cell of a key head (``baton_kernels.state_pages``) has the states of its value heads, [value heads of it,
key_dim, value_dim], then the last inputs of the convolutions, [conv_kernel - 1, query | key | values].
"""

from __future__ import annotations

from torch import Tensor

from baton_kernels import delta_plain as plainly
from baton_kernels.cpu import delta as cpu_delta
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates


def linear_attention(layer: DeltaLayer, inputs: DeltaInputs, states: LayerStates, rows: StateRows) -> Tensor:
    """The outputs [T, value_heads * value_dim], of the inputs' type; padding gives zeros. States are read
    from the sources of ``rows`` and written to the targets: of the decoding rows, which come first, and of
    the segments."""
    device = inputs.qkv.device.type
    if device == "cuda":
        from baton_kernels.cuda import delta_rule as cuda_delta  # triton is only there where CUDA is

        return cuda_delta.linear_attention(layer, inputs, states, rows)
    if device == "cpu":
        found = cpu_delta.linear_attention(layer, inputs, states, rows)
        if found is not None:
            return found
    return plainly.linear_attention(layer, inputs, states, rows)
