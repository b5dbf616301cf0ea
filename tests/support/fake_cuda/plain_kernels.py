"""Plain torch in the place of Triton kernels on a fake device: far faster than triton's interpreter.

They are launched as kernels are, on the current stream of the current device, and read and write the same
memory when that stream runs. Attention becomes operations of the stream, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling import sampler
from baton_kernels import attention, plain, routing, rows
from baton_kernels import experts as plain_experts
from baton_kernels.activation import Activation, activated, gated
from baton_kernels.cuda import blocks as cuda_blocks
from baton_kernels.cuda import experts as cuda_experts
from baton_kernels.cuda import logits as cuda_logits
from baton_kernels.cuda import routing as cuda_routing
from baton_kernels.cuda import rows as cuda_rows
from baton_kernels.cuda import sampling as cuda_sampling
from baton_kernels.cuda import whole_norm
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.norm import Norm
from baton_kernels.paged import PagedBatch
from baton_kernels.rotary import WholeNorm
from baton_kernels.window import Window
from tests.support.fake_cuda.tensors import DeviceTensor, mapped

if TYPE_CHECKING:
    from tests.support.fake_cuda.device import FakeCuda


class PlainKernels:
    """What stands in for the kernels' entry functions."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def replacements(self) -> list[tuple[object, str, object]]:
        """Owner, name and new value of each."""
        return [
            (attention.AttentionPlan, "build", classmethod(_plan(attention.AttentionPlan.build))),
            (cuda_rows, "gated_product", self._gated_product),
            (cuda_rows, "activated", self._activated),
            (cuda_rows, "add_norm", self._add_norm),
            (whole_norm, "squares_of_heads", self._squares_of_heads),
            (whole_norm, "scale_heads", self._scale_heads),
            (whole_norm, "norm_heads", self._norm_heads),
            (cuda_logits, "bar_tokens", self._bar_tokens),
            (cuda_logits, "adjust", self._adjust),
            (cuda_sampling, "draw", self._draw),
            (cuda_blocks, "copy_blocks", self._copy_blocks),
            (cuda_routing, "route", self._route),
            (cuda_experts, "multiply", self._multiply),
        ]

    def _launch(self, name: str, compute: Callable[..., object], *args: object) -> None:
        index = self._cuda.current_device()
        contents = mapped(args, lambda tensor: self._cuda.kernel_argument(tensor, index, name))
        queue = self._cuda.current_queue(index)
        self._cuda.timeline.issue(queue, "kernel", name, lambda: compute(*contents))

    def _gated_product(self, gate_up: Tensor, activation: Activation) -> Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))

        def compute(out: Tensor, x: Tensor) -> None:
            out.copy_(gated(x[:, : out.shape[1]], x[:, out.shape[1] :], activation))

        self._launch("_gated_product", compute, out, gate_up)
        return out

    def _activated(self, x: Tensor, activation: Activation) -> Tensor:
        out = x.new_empty(x.shape)
        self._launch("_activated", lambda out, x: out.copy_(activated(x, activation)), out, x)
        return out

    def _add_norm(
        self,
        x: Tensor | None,
        residual: Tensor,
        norm: Norm | None,
        dtype: torch.dtype,
        *,
        post: Norm | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        out = torch.empty(residual.shape, dtype=dtype, device=residual.device)

        def compute(out: Tensor, x: Tensor | None, residual: Tensor, *weights: Any) -> None:
            own = norm and replace(norm, weight=weights[0], bias=weights[1])
            before = post and replace(post, weight=weights[2], bias=weights[3])
            if x is not None:
                residual += (before.of(x) if before else x.float()) * factor
            out.copy_(own.of(residual) if own else residual)

        of_norm = (norm.weight, norm.bias) if norm else (None, None)
        of_post = (post.weight, post.bias) if post else (None, None)
        self._launch("_add_norm", compute, out, x, residual, *of_norm, *of_post)
        return out

    def _squares_of_heads(self, qkv: Tensor, norm: WholeNorm) -> Tensor:
        out = torch.empty((len(qkv), 2), dtype=torch.float32, device=qkv.device)

        def compute(out: Tensor, qkv: Tensor) -> None:
            out.copy_(_squares(qkv, norm))

        self._launch("_squares", compute, out, qkv)
        return out

    def _scale_heads(self, qkv: Tensor, squares: Tensor, norm: WholeNorm, sizes: tuple[int, int]) -> None:
        def compute(qkv: Tensor, squares: Tensor, q: Tensor, k: Tensor) -> None:
            _scale(qkv, squares, replace(norm, q=q, k=k), sizes)

        self._launch("_whole_norm", compute, qkv, squares, norm.q, norm.k)

    def _norm_heads(self, qkv: Tensor, norm: WholeNorm) -> None:
        def compute(qkv: Tensor, q: Tensor, k: Tensor) -> None:
            _scale(qkv, _squares(qkv, norm), replace(norm, q=q, k=k), (q.numel(), k.numel()))

        self._launch("_whole_norm", compute, qkv, norm.q, norm.k)

    def _bar_tokens(self, logits: Tensor, at: Tensor, words: Tensor) -> None:
        self._launch("_bar_tokens", rows.bar_tokens, logits, at, words)

    def _adjust(self, *tensors: Tensor) -> None:
        self._launch("_adjust", _adjust, *tensors)

    def _draw(self, logits: Tensor, settings: Tensor, seeds: Tensor) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._launch("_draw", lambda out, *given: out.copy_(_draw(*given)), out, logits, settings, seeds)
        return out

    def _copy_blocks(self, target: Tensor, target_ids: Tensor, source: Tensor, source_ids: Tensor) -> None:
        def compute(target: Tensor, target_ids: Tensor, source: Tensor, source_ids: Tensor) -> None:
            target.index_copy_(0, target_ids, source.index_select(0, source_ids))

        self._launch("_copy", compute, target, target_ids, source, source_ids)

    def _route(
        self, logits: Tensor, rule: routing.Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        shape = (len(logits), rule.top_k)
        experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)

        def compute(experts: Tensor, weights: Tensor, logits: Tensor, bias: Tensor | None) -> None:
            for out, found in zip((experts, weights), routing.route(logits, rule, bias), strict=True):
                out.copy_(found)

        self._launch("_route", compute, experts, weights, logits, bias)
        return experts, weights

    def _multiply(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        tensors: ExpertTensors,
        weighs_input: bool,
        *_: object,
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

        def compute(
            out: Tensor,
            x: Tensor,
            experts: Tensor,
            weights: Tensor,
            gate_up: Tensor,
            down: Tensor,
            gate_up_bias: Tensor | None,
            down_bias: Tensor | None,
        ) -> None:
            own = ExpertTensors(gate_up, down, gate_up_bias, down_bias, tensors.activation)
            out.copy_(plain_experts.loop_over_experts(x, experts, weights, own, weighs_input))

        of_experts = (tensors.gate_up, tensors.down, tensors.gate_up_bias, tensors.down_bias)
        self._launch("_multiply_experts", compute, out, x, experts, weights, *of_experts)
        return out


def _plan(build: Any) -> Callable[..., attention.AttentionPlan]:
    def plan(
        cls: type[attention.AttentionPlan],
        batch: PagedBatch,
        pool: Tensor,
        windows: Collection[Window | None],
        *args: Any,
    ) -> attention.AttentionPlan:
        if not isinstance(pool, DeviceTensor) or batch.planner is not None:
            built: attention.AttentionPlan = build(batch, pool, windows, *args)
            return built
        return cls(plain.PlainPlan.build(batch, pool, windows))

    return plan


def _parts(qkv: Tensor, norm: WholeNorm) -> tuple[Tensor, Tensor]:
    """The queries of qkv, and the keys."""
    queries, keys = norm.q.numel(), norm.k.numel()
    return qkv[:, :queries], qkv[:, queries : queries + keys]


def _squares(qkv: Tensor, norm: WholeNorm) -> Tensor:
    """See ``baton_kernels.cuda.whole_norm.squares_of_heads``."""
    return torch.stack([part.float().square().sum(-1) for part in _parts(qkv, norm)], dim=-1)


def _scale(qkv: Tensor, squares: Tensor, norm: WholeNorm, sizes: tuple[int, int]) -> None:
    """See ``baton_kernels.cuda.whole_norm.scale_heads``."""
    weights = (norm.q, norm.k)
    for part, weight, square, size in zip(_parts(qkv, norm), weights, squares.T, sizes, strict=True):
        factor = torch.rsqrt(square / size + norm.eps)[:, None]
        part.copy_(part.float() * factor * (weight.float() + norm.offset))


def _adjust(
    logits: Tensor, at: Tensor, starts: Tensor, penalties: Tensor, ids: Tensor, values: Tensor
) -> None:
    """See ``baton_kernels.cuda.logits.adjust``."""
    begins = starts.tolist()
    for rule, row in enumerate(at.tolist()):
        barred, biased, seen, stop = begins[3 * rule : 3 * rule + 4]
        own = logits[row]
        own[ids[barred:biased].long()] = -torch.inf
        own[ids[biased:seen].long()] += values[biased:seen]
        repetition, frequency, presence = penalties[:, rule]
        tokens, outputs = ids[seen:stop].long(), values[seen:stop]
        chosen = own[tokens]
        chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        own[tokens] = chosen - frequency * outputs - presence * (outputs > 0)


def _draw(logits: Tensor, settings: Tensor, seeds: Tensor) -> Tensor:
    """See ``baton_kernels.cuda.sampling.draw``."""
    params = [
        ResolvedSampling(max_tokens=1, temperature=t, top_k=int(k), top_p=p, min_p=m, seed=seed)
        for (t, k, p, m), seed in zip(settings.T.tolist(), seeds[0].tolist(), strict=True)
    ]
    return sampler.choose(logits, params, seeds[1].tolist())
