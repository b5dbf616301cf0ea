"""Tokens and the experts that were chosen for them, for the tests of mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.routing import Routing
from tests.support.covering import Choice

CLAMPED = Activation("clamped_swiglu", 0.7)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DTYPES = tuple(TOLERANCE)
EXPERTS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "tokens": (0, 1, 3, 17, 70),
        "experts": (3, 5, 8, 60),
        "top_k": (1, 2, 4),
        "chosen": ("any", "the same", "every third"),
        "hidden": (33, 64, 72),
        "inner": (17, 40, 64),
        "dtype": DTYPES,
        "activation": (SILU, GELU_TANH, CLAMPED),
        "biased": (False, True),
        "weighs_input": (False, True),
        "arch": (80, 90),
    }
)
"""Levels of :class:`ExpertCase`."""
ROUTES: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "tokens": (0, 1, 5),
        "experts_of_a_group": (2, 3, 5, 16, 32),
        "groups": (1, 3, 4, 8),
        "top_k": (1, 2, 6),
        "scores": ("softmax", "sigmoid", "sparsemixer"),
        "biased": (False, True),
        "renormalize": (False, True),
        "scale": (1.0, 2.5),
        "dtype": (torch.float32, torch.bfloat16),
    }
)
"""Levels of :class:`RouteCase`."""


@dataclass(frozen=True)
class ExpertCase:
    """The arguments of ``baton_kernels.experts.loop_over_experts``."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    tensors: ExpertTensors
    weighs_input: bool

    @classmethod
    def of(cls, choice: Choice) -> ExpertCase:
        """Random numbers of the sizes of ``choice``, which has a value for each of the levels. Rows of x and
        of the weights are strided."""
        level: Any = choice
        tokens, count, hidden, inner = (level[name] for name in ("tokens", "experts", "hidden", "inner"))
        top_k = min(level["top_k"], count)
        dtype: torch.dtype = level["dtype"]

        def random(*shape: int) -> Tensor:
            numbers: Tensor = torch.randn(shape) / shape[-1] ** 0.5
            return numbers.to(dtype)

        tensors = ExpertTensors(
            random(count, 2 * inner + 1, hidden + 1)[:, :-1, :-1],
            random(count, hidden, inner),
            random(count, 2 * inner) if level["biased"] else None,
            random(count, hidden) if level["biased"] else None,
            level["activation"],
        )
        x = torch.randn(tokens, hidden + 3).to(level["dtype"])[:, :hidden]
        experts = chosen(level["chosen"], tokens, count, top_k)
        return cls(x, experts, torch.rand(tokens, top_k), tensors, level["weighs_input"])


def chosen(how: str, tokens: int, count: int, top_k: int) -> Tensor:
    """[tokens, top_k] int32: distinct experts for each token, ``any`` of ``count``, ``the same`` for all
    tokens, or of ``every third`` as far as there are enough."""
    some = torch.arange(count)
    if how == "every third" and len(some[1::3]) >= top_k:
        some = some[1::3]
    order = [some[torch.randperm(len(some))[:top_k]] for _ in range(max(1, tokens))]
    if how == "the same":
        order = order[:1] * tokens
    return torch.stack(order)[:tokens].int() if tokens else torch.empty(0, top_k, dtype=torch.int32)


@dataclass(frozen=True)
class RouteCase:
    """The arguments of ``baton_kernels.routing.route``."""

    logits: Tensor
    routing: Routing
    bias: Tensor | None

    @classmethod
    def of(cls, choice: Choice) -> RouteCase:
        """Random logits, some of them equal where they are bfloat16."""
        level: Any = choice
        groups, size = level["groups"], level["experts_of_a_group"]
        top_groups = max(1, groups // 2)
        routing = Routing(
            top_k=min(level["top_k"], top_groups * size),
            scores=level["scores"],
            renormalize=level["renormalize"],
            scale=level["scale"],
            groups=groups,
            top_groups=top_groups,
            group_best=1 if level["scores"] == "softmax" else 2,
            jitter=0.1,
        )
        logits = (2 * torch.randn(level["tokens"], groups * size)).to(level["dtype"])
        return cls(logits, routing, torch.randn(groups * size) if level["biased"] else None)
