"""The layer of a mixture of experts."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.layers import MLP, Linear
from baton.models.quantization.base import (
    ExpertsMultiplier,
    ExpertsShape,
    ExpertsWeights,
    Place,
    QuantizationScheme,
    empty_parameter,
)
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.layers import MixtureWeights
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
        self.router = Linear(hidden, number, numbers, bias=rule.router_bias)
        shape = ExpertsShape(
            experts=range(number),
            hidden=rule.latent or hidden,
            inner=shard.part(rule.inner),
            dtype=dtype,
            activation=rule.activation,
            bias=rule.bias,
            down_bias=rule.bias and shard.tp_rank == 0,
            gated=rule.gated,
        )
        self.weights: ExpertsWeights | None = scheme.allocate_experts(shape, rule.names)
        """The experts' weights until they are packed; None once they are no longer needed."""
        self.experts: ExpertsMultiplier = self.weights
        for name, parameter in self.weights.parameters.items():
            self.register_parameter(name, parameter)
        self.correction = empty_parameter(number, dtype=torch.float32) if rule.correction_bias else None
        self.shared_gate = Linear(hidden, 1, dtype) if rule.shared_gate else None
        self.latent_in = self.latent_out = None
        if rule.latent:
            bias = config.mlp_bias
            self.latent_in = Linear(
                hidden, rule.latent, dtype, bias=bias, scheme=scheme.within(rule.latent_in)
            )
            # Every rank has all of it, and adds up what the experts' rows here yield; one adds the bias.
            bias = bias and shard.tp_rank == 0
            self.latent_out = Linear(
                rule.latent, hidden, dtype, bias=bias, scheme=scheme.within(rule.latent_out)
            )
        if rule.shared:
            self.add_module(
                rule.shared, MLP(config, dtype, parallel, scheme.within(rule.shared), rule.shared_inner)
            )

    @property
    def placed(self) -> tuple[Linear, ...]:
        """The modules whose tensors ``places`` names: all but the MLP for every token."""
        return tuple(module for _, module in self._named)

    @property
    def _named(self) -> tuple[tuple[str, Linear], ...]:
        rule = self.rule
        named = (
            (rule.router, self.router),
            (rule.shared_gate, self.shared_gate),
            (rule.latent_in, self.latent_in),
            (rule.latent_out, self.latent_out),
        )
        return tuple((name, module) for name, module in named if module is not None)

    def places(self) -> dict[str, Place]:
        """The places of the layer's tensors by their names relative to the layer, without those of the MLP
        that is for every token; none once its weights are given up."""
        rule, found = self.rule, dict[str, Place]()
        if self.weights is not None:
            found |= self.weights.places(rule.names)
        if self.correction is not None:
            tensor = self.correction[None] if rule.correction_rows else self.correction
            found[rule.correction_bias] = Place(tensor, (slice(None),) * tensor.dim())
        for name, module in self._named:
            if module.weights is not None:
                found |= {f"{name}.{kind}": place for kind, place in module.weights.places()[""].items()}
        return found

    def pack(self) -> None:
        """Lay the weights out as the kernels of their device read them, and free memory that is unused
        then."""
        assert self.weights is not None, "packed once"
        self.experts = self.weights.pack()
        if self.experts is not self.weights:
            for name in self.weights.parameters:
                self.register_parameter(name, None)
            self.weights = None

    def warm_up(self) -> None:
        """Launch every kernel that experts of these sizes launch, so that none is compiled later."""
        if isinstance(self.experts, ExpertsWeights):
            self.experts.warm_up(self.rule.routing.top_k, self.rule.routing.weighs_input)

    @property
    def packed(self) -> MixtureWeights | None:
        """The packed weights; None if any of them is not packed."""
        rule, router, shared, gate = self.rule, self.router.packed, self._shared, self.shared_gate
        of_all = None if shared is None else shared.packed
        factor = None if gate is None else gate.packed
        missing = router is None or not isinstance(self.experts, PackedExperts) or rule.latent
        if missing or (shared and of_all is None) or (gate and factor is None):
            return None
        assert router is not None and isinstance(self.experts, PackedExperts)
        return MixtureWeights(router, rule.routing, self.correction, self.experts, of_all, factor)

    def forward(self, x: Tensor) -> Tensor:
        routing = self.rule.routing
        own = x.float() if self.rule.router_float32 else x
        logits = self.router.multiplier.multiply(own, torch.float32)
        experts, weights = route(logits, routing, self.correction)
        taken = x if self.latent_in is None else self.latent_in(x)
        out = self.experts.multiply(taken, experts, weights, routing.weighs_input)
        if self.latent_out is not None:
            out = self.latent_out(out)
        if self._shared is not None:
            part = self._shared.part(x)
            if self.shared_gate is not None:
                logit = self.shared_gate.multiplier.multiply(x, torch.float32)
                part = part.float() * torch.sigmoid(logit)
            out = (out.float() + part).to(out.dtype)
        return self.collectives.sum(out)

    @property
    def _shared(self) -> MLP | None:
        """The MLP that is for every token; None: there is none."""
        name = self.rule.shared
        return cast(MLP, self.get_submodule(name)) if name else None
