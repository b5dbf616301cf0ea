"""The layer of a mixture of experts."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.layers import MLP
from baton.models.quantization.base import (
    ExpertsMultiplier,
    ExpertsShape,
    ExpertsWeights,
    LinearShape,
    LinearWeights,
    Multiplier,
    Place,
    QuantizationScheme,
    empty_parameter,
)
from baton.models.quantization.plain import PLAIN
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.routing import route


class Experts(nn.Module):
    """A mixture of experts (https://arxiv.org/abs/1701.06538): a router chooses some MLPs for each token; one
    more, with some families, is for every token. Of a rank's inner rows of each; the output is the sum over
    the rows of all ranks."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel, scheme: QuantizationScheme
    ) -> None:
        super().__init__()
        assert config.experts is not None, "a family's config names them"
        self.rule = rule = config.experts
        self.collectives: Collectives = parallel.collectives
        shard, hidden, number = parallel.shard, config.hidden_size, rule.num_experts
        numbers = torch.float32 if rule.router_float32 else dtype
        outputs = {"": range(number)}
        self.router_weights: LinearWeights | None = PLAIN.allocate(
            LinearShape(range(hidden), outputs, numbers, rule.router_bias)
        )
        """The router's weights until they are packed; None once they are no longer needed."""
        self.router: Multiplier = self.router_weights
        shape = ExpertsShape(
            experts=range(number),
            hidden=hidden,
            inner=shard.part(rule.inner),
            dtype=dtype,
            activation=rule.activation,
            bias=rule.bias,
            down_bias=rule.bias and shard.tp_rank == 0,
        )
        self.weights: ExpertsWeights | None = scheme.allocate_experts(shape)
        """The experts' weights until they are packed; None once they are no longer needed."""
        self.experts: ExpertsMultiplier = self.weights
        for name, parameter in self.router_weights.parameters.items():
            self.register_parameter(f"router_{name}", parameter)
        for name, parameter in self.weights.parameters.items():
            self.register_parameter(name, parameter)
        self.correction = empty_parameter(number, dtype=torch.float32) if rule.correction_bias else None
        self.shared_gate = empty_parameter(1, hidden, dtype=dtype) if rule.shared_gate else None
        if rule.shared:
            self.add_module(rule.shared, MLP(config, dtype, parallel, scheme, rule.shared_inner))

    def places(self) -> dict[str, Place]:
        """The places of the layer's tensors by their names relative to the layer, without those of the MLP
        that is for every token; none once its weights are given up."""
        rule, found = self.rule, dict[str, Place]()
        if self.router_weights is not None:
            for kind, place in self.router_weights.places()[""].items():
                found[f"{rule.router}.{kind}"] = place
        if self.weights is not None:
            found |= self.weights.places(rule.names)
        if self.correction is not None:
            tensor = self.correction[None] if rule.correction_rows else self.correction
            found[rule.correction_bias] = Place(tensor, (slice(None),) * tensor.dim())
        if self.shared_gate is not None:
            found[rule.shared_gate] = Place(self.shared_gate, (slice(None), slice(None)))
        return found

    def pack(self) -> None:
        """Lay the weights out as the kernels of their device read them, and free memory that is unused
        then."""
        assert self.router_weights is not None and self.weights is not None, "packed once"
        self.router, self.experts = self.router_weights.pack(), self.weights.pack()
        if self.router is not self.router_weights:
            for name in self.router_weights.parameters:
                self.register_parameter(f"router_{name}", None)
            self.router_weights = None
        if self.experts is not self.weights:
            for name in self.weights.parameters:
                self.register_parameter(name, None)
            self.weights = None

    def forward(self, x: Tensor) -> Tensor:
        routing = self.rule.routing
        own = x.float() if self.rule.router_float32 else x
        experts, weights = route(self.router.multiply(own, torch.float32), routing, self.correction)
        out = self.experts.multiply(x, experts, weights, routing.weighs_input)
        if self.rule.shared:
            out = out + self._shared(x)
        return self.collectives.sum(out)

    def _shared(self, x: Tensor) -> Tensor:
        """The rank's part of the MLP that is for every token."""
        part = cast(MLP, self.get_submodule(self.rule.shared)).part(x)
        if self.shared_gate is None:
            return part
        return part * torch.sigmoid(F.linear(x, self.shared_gate))
