"""The launches of an engine on CUDA, counted without a device: which of them would compile a kernel.

    python -m tests.support.serving_launches FAMILY DTYPE DRAFTS SEED

A model is warmed up as on a device, and then serves requests drawn at random. DRAFTS is the family of the
model that drafts, or ngram. The steps are laid
out by the engine itself and their tensors lie in host memory; the kernels are launched by their own code, up
to where triton would compile. What is in their outputs is nothing, and no token is what it should be: which
kernels are launched, for how many rows and with which alignments depends on neither.

Prints a line of JSON: the launches of the warm-up and of serving, and what was compiled by each.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

from baton.core.beam_search import BeamParams
from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput
from baton.engine import runner, startup, token_choice, verification, warm_up
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sampling import guidance, logits, sampler
from baton.engine.sequence import Fork
from baton.engine.sequence import Sequence as Request
from baton.models import decoder
from baton.models.quantization import plain
from baton_kernels.attention import AttentionPlan
from baton_kernels.cpu.latent import CpuLatentPlan
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.cuda import blocks, rows
from baton_kernels.cuda import logits as kernels
from baton_kernels.cuda.attention import CudaPlan
from baton_kernels.cuda.latent import CudaLatentPlan
from baton_kernels.cuda.shapes import Device
from baton_kernels.latent import LatentPlan
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.window import Window
from loadtest.kernel_builds import AbsentDevice
from tests.support.runners import runner_of
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE

DEVICE = Device(132, 90)
REQUESTS = 150


@dataclass
class Recorder:
    launches: int = 0
    compiled: set[str] = field(default_factory=set)
    """The kernels and what triton would have compiled them for."""


@contextmanager
def recording() -> Iterator[Recorder]:
    """Launch nothing and compile nothing within this context, but let triton say what it would compile."""
    recorder = Recorder()
    run: Any = JITFunction.run

    def launch(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        recorder.launches += 1
        run(self, *args, grid=grid, warmup=True, **kwargs)

    def compiles(self: Any, key: str, *_: object) -> object:
        recorder.compiled.add(f"{self.fn.__name__} {key}")
        return object()

    driver.set_active(AbsentDevice(DEVICE.arch))
    try:
        with (
            patch.object(JITFunction, "run", launch),
            patch.object(JITFunction, "_do_compile", compiles),
        ):
            yield recorder
    finally:
        driver._active = None


def _planned(
    cls: type[AttentionPlan], batch: PagedBatch, pool: Tensor, windows: set[Window | None], heads: int
) -> AttentionPlan:
    return cls(CudaPlan.build(batch, pool, windows, heads, DEVICE))


def _planned_latents(
    cls: type[LatentPlan], batch: PagedBatch, view: Tensor, heads: int, expands: Callable[[Chunk], bool]
) -> LatentPlan:
    def by_kernels(batch: PagedBatch, absorbed: PagedBatch, view: Tensor) -> CudaLatentPlan:
        return CudaLatentPlan.build(batch, absorbed, view, heads, DEVICE)

    with patch.object(CpuLatentPlan, "build", by_kernels):
        return _plan_latents(batch, view, heads, expands)


_plan_latents = LatentPlan.build


def _choose(
    logits: Tensor,
    params: Sequence[ResolvedSampling],
    positions: Sequence[int],
    packer: sampler.Packer | None = None,
) -> Tensor:
    return sampler.choose_by_kernel(logits, params, positions, packer).zero_()


def _adjust(out: Tensor, adjusted: Sequence[logits.Row]) -> None:
    if adjusted:
        logits.adjust_by_kernels(out, adjusted)


@contextmanager
def by_kernels() -> Iterator[None]:
    """Compute by the kernels of CUDA within this context, wherever the tensors lie."""
    with ExitStack() as stack:
        for owner, name, by_kernel in (
            (AttentionPlan, "build", classmethod(_planned)),
            (LatentPlan, "build", classmethod(_planned_latents)),
            (decoder, "add_norm", rows.add_norm),
            (plain, "gated_product", rows.gated_product),
            (guidance, "bar_tokens", kernels.bar_tokens),
            (logits, "bar_tokens", kernels.bar_tokens),
            (token_choice, "adjust", _adjust),
            (verification, "adjust", _adjust),
            (runner, "copy_blocks", blocks.copy_blocks),
            (warm_up, "copy_blocks", blocks.copy_blocks),
            (sampler, "choose", _choose),
            (token_choice, "choose", _choose),
        ):
            stack.enter_context(patch.object(owner, name, by_kernel))
        yield


def drawn(rng: random.Random, number: int) -> Request:
    """A request with any of the features that the kernels serve."""
    fields: dict[str, Any] = {}
    for likelihood, more in (
        (0.3, {"temperature": 0.0}),
        (0.3, {"top_k": rng.randint(1, 40)}),
        (0.3, {"top_p": rng.uniform(0.2, 1)}),
        (0.2, {"min_p": 0.1}),
        (0.3, {"logprobs": rng.randint(0, 3)}),
        (0.2, {"prompt_logprobs": rng.randint(0, 2)}),
        (0.2, {"logit_bias": tuple((i, 1.0) for i in range(rng.randint(1, 30)))}),
        (0.2, {"repetition_penalty": 1.2}),
        (0.2, {"frequency_penalty": 0.5}),
        (0.2, {"bad_word_ids": ((3,), (4, 5))}),
        (0.2, {"allowed_token_ids": tuple(rng.sample(range(256), 40))}),
        (0.1, {"structured_output": StructuredOutput("regex", "[a-z ]{1,40}")}),
    ):
        if rng.random() < likelihood:
            fields |= more
    if rng.random() < 0.1:
        fields = {"beam_search": BeamParams(rng.randint(1, 3))}
    params = ResolvedSampling(max_tokens=rng.randint(1, 12), ignore_eos=True, seed=number, **fields)
    prompt = [rng.randrange(4, VOCAB_SIZE - 8) for _ in range(rng.choice((1, 2, 7, 40, rng.randint(1, 200))))]
    if rng.random() < 0.3:
        prompt = [7] * 50 + prompt  # a prefix that others have as well
    forks = rng.randint(1, 3) if rng.random() < 0.15 and "beam_search" not in fields else 0
    return Request(
        str(number), 0, prompt, params, forks=tuple(Fork(f"{number}-{n}", params) for n in range(forks))
    )


def serve(engine: Engine, rng: random.Random) -> int:
    """Let requests come and go until all are over; return how many steps there were."""
    waiting = [drawn(rng, number) for number in range(REQUESTS)]
    steps = 0
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice((0, 0, 1, 1, 2, 9)))):
            engine.add(waiting.pop())
        engine.step()
        steps += 1
    return steps


def swap(pool: Tensor, rng: random.Random) -> None:
    """Copy blocks between the pool and slots beside it, as the host tier does."""
    slots = pool[:12].clone()
    for count in range(1, 9):
        ids = torch.tensor([rng.sample(range(12), count), rng.sample(range(12), count)])
        blocks.copy_blocks(slots, ids[0], pool, ids[1])
        blocks.copy_blocks(pool, ids[1], slots, ids[0])


def main() -> None:
    family, dtype, drafts, seed = sys.argv[1:]
    torch.set_num_threads(1)
    rng = random.Random(int(seed))
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            {**TINY_MODELS, **LATENTS}[family](Path(folder) / family),
            device="cpu",
            dtype=dtype,
            num_blocks=120,
            max_num_seqs=24,
            max_num_batched_tokens=128,
            prefill_chunk=64,
            speculative_method="ngram" if drafts == "ngram" else "draft",
            speculative_model=None if drafts == "ngram" else str(TINY_MODELS[drafts](Path(folder) / drafts)),
        )
        with patch.object(PackedWeight, "of", lambda *_, **__: None):  # weights as a device has them
            engine = Engine.from_config(config)
        served = runner_of(engine)
        with by_kernels(), recording() as recorder:
            startup.warm_up_device(served, 1000)
            assert engine.speculator is not None
            warm_up.warm_up_drafter(engine.speculator.drafter, startup.CUDA_WARM_UP)
            warm, launches = set(recorder.compiled), recorder.launches
            steps = serve(engine, rng)
            swap(served.pool, rng)
    print(
        json.dumps(
            {
                "warm": sorted(warm),
                "warm_launches": launches,
                "late": sorted(recorder.compiled - warm),
                "launches": recorder.launches - launches,
                "steps": steps,
            }
        )
    )


if __name__ == "__main__":
    main()
