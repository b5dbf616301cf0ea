"""The best tile sizes on this device: ``python -m loadtest.kernels --tune``.

Each shape is measured with the tile sizes that are chosen without tuning and with every candidate. A
candidate counts if its result equals that of the other tile sizes, and is kept if it is faster by more than
the error of measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from baton_kernels.cuda.tuned import Tiling
from loadtest.expert_tuning import expert_candidates, expert_subjects, expert_timer
from tests.support.paged_steps import Case, lay_out, moved

GAIN = 0.02
"""The share of the time that a candidate must save."""
HEADS = ((64, 8), (128, 4), (128, 8), (256, 2))
"""Head size and group of common models. Each takes a minute or two, most of it compile time."""
BLOCK_SIZES = (64,)


@dataclass(frozen=True)
class Subject:
    """A shape to tune: its step, and the name that its tile sizes go by."""

    kernel: str
    name: str
    case: Case
    chosen: Tiling


def subjects(arch: int, dtype: torch.dtype) -> Iterator[Subject]:
    from baton_kernels.cuda.shapes import Shape

    for (head_dim, group), block in product(HEADS, BLOCK_SIZES):
        shape = Shape(block, head_dim, dtype, arch)
        case = Case(8 * group, 8, head_dim, block, None, (), (), dtype)
        for rows in (16, 32, 64):
            queries = 1 if rows == 16 else rows // group
            if queries * group > shape.most_rows:
                continue
            chosen = shape.untuned_decode(group, queries)
            decode = replace(case, decode=(2048,) * 32, queries=queries)
            yield Subject("decode", shape.name("decode", group, chosen), decode, chosen)
        chosen = shape.untuned_prefill(group)
        step = replace(case, chunks=((0, 2048),) * 4)
        yield Subject("prefill", shape.name("prefill", group, chosen), step, chosen)


def candidates(subject: Subject) -> Iterator[Tiling]:
    """Yield the other tile sizes to try. A plan fixes the tile sizes of decode, so only warps and stages vary
    there."""
    if subject.kernel == "decode":
        for warps, stages in product((4, 8), (2, 3, 4, 5, 6, 7)):
            yield replace(subject.chosen, warps=warps, stages=stages)
        return
    group = subject.case.heads // subject.case.kv_heads
    for some_rows, tile, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 5)):
        if some_rows >= group:
            yield Tiling(some_rows, tile, warps, stages)


def best(
    chosen: Tiling, others: Iterable[Tiling], seconds: Callable[[Tiling], float | None]
) -> Tiling | None:
    """Return the fastest of ``others`` if it is faster than ``chosen`` by ``GAIN``. ``seconds`` returns None
    for tile sizes that do not fit or give another result."""
    limit = seconds(chosen)
    if limit is None:
        raise RuntimeError(f"the tile sizes chosen without tuning do not work: {chosen}")
    limit *= 1 - GAIN
    found = None
    for other in others:
        taken = None if other == chosen else seconds(other)
        if taken is not None and taken < limit:
            limit, found = taken, other
    return found


def tune(
    device: torch.device, dtype: torch.dtype, measure: Callable[[Callable[[], object]], float]
) -> Mapping[str, Tiling]:
    """Return the best tile sizes by shape, where they are not the chosen ones. ``measure``: the time of a
    call, in seconds."""
    from baton_kernels.cuda.shapes import Device

    found: dict[str, Tiling] = {}

    def keep(name: str, chosen: Tiling, tiling: Tiling | None) -> None:
        if tiling is not None:
            found[name] = tiling
            print(f"{name}: {tiling} instead of {chosen}", flush=True)

    arch = Device.of(device).arch
    for subject in subjects(arch, dtype):
        timer = _timer(subject, device, measure)
        keep(subject.name, subject.chosen, best(subject.chosen, candidates(subject), timer))
    for of_experts in expert_subjects(arch, dtype):
        timer = expert_timer(of_experts, device, dtype, measure)
        others = expert_candidates(of_experts)
        keep(of_experts.name, of_experts.chosen, best(of_experts.chosen, others, timer))
    return found


def _timer(
    subject: Subject, device: torch.device, measure: Callable[[Callable[[], object]], float]
) -> Callable[[Tiling], float | None]:
    from triton.runtime.errors import OutOfResources

    from baton_kernels.cuda.attention import CudaPlan

    case = subject.case
    pool, batch = moved(*lay_out(case, layers=1), device)
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim, device=device).to(case.dtype)
    plan = CudaPlan.build(batch, pool, {None}, case.heads)
    expected: list[Tensor] = []

    def seconds(tiling: Tiling) -> float | None:
        own = replace(plan, shape=replace(plan.shape, tuned={subject.name: tiling}))

        def run() -> Tensor:
            return own.attend(pool, 0, q, scale=case.head_dim**-0.5, window=None, softcap=None)

        try:
            out = run()
        except OutOfResources:
            return None
        if not expected:
            expected.append(out)
        same = torch.allclose(out.float(), expected[0].float(), rtol=2e-2, atol=2e-2)
        return measure(run) if same else None

    return seconds
