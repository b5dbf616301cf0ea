"""Plain torch in the place of Triton kernels on a fake device: far faster than triton's interpreter.

They are launched as kernels are, on the current stream of the current device, and read and write the same
memory when that stream runs. Attention becomes operations of the stream, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling import sampler
from baton_kernels import attention, plain, routing, rows
from baton_kernels import experts as plain_experts
from baton_kernels.cuda import blocks as cuda_blocks
from baton_kernels.cuda import experts as cuda_experts
from baton_kernels.cuda import logits as cuda_logits
from baton_kernels.cuda import routing as cuda_routing
from baton_kernels.cuda import rows as cuda_rows
from baton_kernels.cuda import sampling as cuda_sampling
from baton_kernels.paged import PagedBatch
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
            (cuda_rows, "silu_mul", self._silu_mul),
            (cuda_rows, "add_rms_norm", self._add_rms_norm),
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

    def _silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._launch("_silu_mul", lambda out, x: out.copy_(rows.silu_mul(x)), out, gate_up)
        return out

    def _add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)

        def compute(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor) -> None:
            residual += x
            normed = torch.nn.functional.rms_norm(residual, weight.shape, weight.to(residual.dtype), eps)
            out.copy_(normed)

        self._launch("_add_rms_norm", compute, out, x, residual, weight)
        return out

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
        tensors: plain_experts.ExpertTensors,
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
            own = plain_experts.ExpertTensors(gate_up, down, gate_up_bias, down_bias, tensors.activation)
            out.copy_(plain_experts.loop_over_experts(x, experts, weights, own, weighs_input))

        of_experts = (tensors.gate_up, tensors.down, tensors.gate_up_bias, tensors.down_bias)
        self._launch("_multiply_experts", compute, out, x, experts, weights, *of_experts)
        return out


def _plan(build: Any) -> Callable[..., attention.AttentionPlan]:
    def plan(
        cls: type[attention.AttentionPlan],
        batch: PagedBatch,
        pool: Tensor,
        windows: Collection[int | None],
        *args: Any,
    ) -> attention.AttentionPlan:
        if not isinstance(pool, DeviceTensor) or batch.planner is not None:
            built: attention.AttentionPlan = build(batch, pool, windows, *args)
            return built
        return cls(plain.PlainPlan.build(batch, pool, windows))

    return plan


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
