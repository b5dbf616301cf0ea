"""The model that is measured: its engine, and single steps of it without the engine around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.graphs import GraphedModel, graph_sizes
from baton.engine.model import Model
from baton.engine.runner import ModelRunner
from baton.engine.sampling.sampler import choose
from baton.engine.startup import build_runner
from baton.models.config import ModelConfig
from baton.models.loader import new_kv_pool
from baton_kernels.paged import Chunk, PagedBatch
from loadtest.gpu.bench import Bench
from loadtest.shapes import SHAPES, save_config

PARAMS = {
    "greedy": ResolvedSampling(max_tokens=1, temperature=0.0),
    "top-p": ResolvedSampling(max_tokens=1, top_k=50, top_p=0.95),
}


def engine_config(
    bench: Bench, max_len: int, rows: int | None = None, *, model: str | None = None, **changes: Any
) -> EngineConfig:
    """Return the settings of an engine of the model that is measured, with random weights and room for
    ``rows`` sequences of ``max_len`` tokens. ``model``: the name of another shape."""
    scale = bench.scale
    name = model or scale.model
    path = save_config(bench.tmp / name, SHAPES[name])
    longest = -(-max_len // scale.block_size) * scale.block_size
    config = EngineConfig(
        path,
        dtype=scale.dtype,
        device=str(bench.device),
        load_format="dummy",
        block_size=scale.block_size,
        kv_cache_bytes=scale.kv_bytes,
        max_num_seqs=rows or max(scale.batches),
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
        max_model_len=longest,
        prefix_caching=False,
        num_threads=None if bench.on_cuda else 1,
    )
    return replace(config, **changes)


@dataclass
class Remembered:
    """A replacement for a graph that a dry run replays."""

    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


@dataclass(frozen=True)
class Loaded:
    """The model without an engine: with its decode steps replayed, and without."""

    config: ModelConfig
    runner: ModelRunner
    eager: Model
    replayed: Model
    weight_bytes: int
    """The bytes that every step reads: all weights but the embedding, of which a step reads a row for each
    token."""

    @classmethod
    def load(cls, bench: Bench, *, graphs: bool = True) -> Loaded:
        scale = bench.scale
        most = max(*scale.contexts, *scale.prompts) + scale.block_size
        config = engine_config(bench, most, enforce_eager=not graphs)
        runner = build_runner(config).runner
        sizes = ModelConfig.from_dir(config.model)
        replayed = runner.model
        if isinstance(replayed, GraphedModel):
            eager: Model = replayed.model
        else:
            eager = runner.model
            if not bench.on_cuda:
                replayed = remembered(bench, runner, sizes, most)
        assert isinstance(eager, torch.nn.Module)
        parameters = {name: p.nbytes for name, p in eager.named_parameters()}
        tied = "lm_head.weight" not in parameters
        read = sum(size for name, size in parameters.items() if tied or "embed_tokens" not in name)
        return cls(sizes, runner, eager, replayed, read)

    @property
    def pool(self) -> Tensor:
        return self.runner.pool

    @property
    def kv_token_bytes(self) -> int:
        return self.pool[0].nbytes // self.pool.shape[4]

    def decode(
        self, rows: int, context: int, sampling: str, *, replayed: bool = True
    ) -> Callable[[], Tensor]:
        """Return a decode step of sequences of one length: forward pass, logits and the choice of a token for
        each row."""
        step = layout(self.pool, rows, context, 0)
        model = self.replayed if replayed else self.eager
        return inferring(partial(self._step, model, self.tokens(rows), step, [PARAMS[sampling]] * rows))

    def prompt(self, tokens: int) -> Callable[[], Tensor]:
        """Return the step of a whole prompt, with the logits of its last token."""
        return self.mixed(0, 1, tokens)

    def mixed(self, rows: int, context: int, chunk: int) -> Callable[[], Tensor]:
        """Return a step of ``rows`` that decode and of a chunk of a prompt behind them."""
        step = layout(self.pool, rows, context, chunk)
        params = [PARAMS["greedy"]] * (rows + 1)
        return inferring(partial(self._step, self.eager, self.tokens(rows + chunk), step, params))

    def tokens(self, count: int) -> Tensor:
        return torch.randint(self.config.vocab_size, (count,), device=self.pool.device)

    def _step(
        self, model: Model, token_ids: Tensor, batch: PagedBatch, params: list[ResolvedSampling]
    ) -> Tensor:
        hidden = model.forward(token_ids, batch, self.pool)
        if batch.chunks:
            hidden = torch.cat([hidden[: batch.num_decode], hidden[-1:]])
        return choose(model.logits(hidden), params, range(len(params)))


def inferring(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.inference_mode():
            return run()

    return step


def remembered(bench: Bench, runner: ModelRunner, sizes: ModelConfig, most: int) -> GraphedModel:
    """Return the model as if its steps were replayed, for a machine that has no graphs."""
    size = bench.scale.block_size
    own = new_kv_pool(sizes, runner.pool.shape[0] + 1, size, bench.dtype, bench.device)
    runner.pool = own[:-1]
    width = -(-most // size)
    return GraphedModel(runner.model, own, graph_sizes(max(bench.scale.batches)), width, Remembered)


def layout(pool: Tensor, rows: int, context: int, chunk: int) -> PagedBatch:
    """Return a step of ``rows`` sequences that decode at one length and, behind them, a prompt of ``chunk``
    tokens, with blocks anywhere in the pool; shared if it has too few."""
    size, blocks, device = pool.shape[4], pool.shape[0], pool.device
    width = -(-context // size)
    wanted = rows * width + -(-chunk // size)
    places = torch.randperm(blocks, device=device).repeat(-(-wanted // blocks))[:wanted]
    tables = places[: rows * width].view(rows, width)
    table = places[rows * width :]
    positions = torch.full((rows,), context - 1, device=device)
    contexts = positions + 1
    in_chunk = torch.arange(chunk, device=device)
    positions = torch.cat([positions, in_chunk])
    slots = [tables[:, -1]] if rows else []
    return PagedBatch(
        positions,
        torch.cat([*slots, table[in_chunk // size]]).contiguous(),
        positions % size,
        rows,
        tables.contiguous(),
        contexts,
        (Chunk(rows, chunk, chunk, table),) if chunk else (),
    )
