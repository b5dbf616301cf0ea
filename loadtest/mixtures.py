"""The experts of well-known mixtures, to build and to measure their kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from baton_kernels.activation import SILU, Activation
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.routing import Routing, route


@dataclass(frozen=True)
class Mixture:
    """The sizes of a model's experts, and how they are chosen."""

    hidden: int
    inner: int
    experts: int
    routing: Routing
    activation: Activation = SILU
    biased: bool = False

    def tensors(self, dtype: torch.dtype, ranks: int, device: torch.device) -> ExpertTensors:
        """One rank's weights, which nobody has filled in."""
        inner = self.inner // ranks

        def empty(*shape: int) -> Tensor:
            return torch.empty(self.experts, *shape, dtype=dtype, device=device)

        return ExpertTensors(
            empty(2 * inner, self.hidden),
            empty(self.hidden, inner),
            empty(2 * inner) if self.biased else None,
            empty(self.hidden) if self.biased else None,
            self.activation,
        )

    def step(
        self, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, ExpertTensors]:
        """Random tokens [T, hidden], experts and weights [T, top_k], and weights of all experts, such that
        results are of the size of 1."""
        tensors = self.tensors(dtype, 1, device)
        for tensor in (tensors.gate_up, tensors.down):
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
        for bias in (tensors.gate_up_bias, tensors.down_bias):
            if bias is not None:
                bias.normal_()
        x = torch.randn(tokens, self.hidden, device=device).to(dtype)
        logits = torch.randn(tokens, self.experts, device=device)
        return x, *route(logits, self.routing), tensors


MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        "Qwen3-30B-A3B": Mixture(2048, 768, 128, Routing(8, renormalize=True)),
        "Mixtral-8x7B": Mixture(4096, 14336, 8, Routing(2, renormalize=True)),
        "gpt-oss-20b": Mixture(
            2880, 2880, 32, Routing(4, renormalize=True), Activation("clamped_swiglu", 7.0), biased=True
        ),
    }
)
