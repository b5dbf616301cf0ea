"""A decode step and a prompt of a whole model, as shares of what the device does at best."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.graphs import GraphedModel, Model, graph_sizes
from baton.engine.runner import ModelRunner
from baton.engine.sampler import choose
from baton.engine.startup import build_runner
from baton.models.config import ModelConfig
from baton.models.loader import new_kv_pool
from baton.sampling_params import SamplingParams
from baton_kernels.paged import Chunk, PagedBatch
from loadtest.gpu.bench import PREFILL_TARGET, TARGETS, Bench, Roof, Section, against
from loadtest.shapes import SHAPES, save_unfilled

PARAMS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "top-p": SamplingParams(max_tokens=1, top_k=50, top_p=0.95),
}


@dataclass
class Remembered:
    """What a dry run replays instead of a graph."""

    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


@dataclass(frozen=True)
class Loaded:
    """The model, twice: with its steps replayed and without."""

    config: ModelConfig
    runner: ModelRunner
    eager: Model
    replayed: Model
    weight_bytes: int
    """That every step reads: all but the embedding, of which it takes a row for each token."""

    @classmethod
    def load(cls, bench: Bench) -> Loaded:
        scale, device = bench.scale, bench.device
        path = save_unfilled(bench.tmp / scale.model, SHAPES[scale.model])
        most = max(*scale.contexts, *scale.prefill) + scale.block_size
        config = EngineConfig(
            path,
            dtype=str(scale.dtype).removeprefix("torch."),
            device=str(device),
            load_format="dummy",
            block_size=scale.block_size,
            kv_cache_bytes=scale.kv_bytes,
            max_num_seqs=max(scale.batches),
            max_num_batched_tokens=most,
            max_model_len=most,
        )
        runner = build_runner(config).runner
        replayed = runner.model
        if isinstance(replayed, GraphedModel):
            eager: Model = replayed.model
        else:
            eager = runner.model
            sizes = ModelConfig.from_dir(path)
            own = new_kv_pool(sizes, runner.pool.shape[0] + 1, scale.block_size, scale.dtype, device)
            runner.pool = own[:-1]
            width = -(-most // scale.block_size)
            replayed = GraphedModel(eager, own, graph_sizes(max(scale.batches)), width, Remembered)
        assert isinstance(eager, torch.nn.Module)
        parameters = {name: p.nbytes for name, p in eager.named_parameters()}
        tied = "lm_head.weight" not in parameters
        read = sum(size for name, size in parameters.items() if tied or "embed_tokens" not in name)
        return cls(ModelConfig.from_dir(path), runner, eager, replayed, read)

    @property
    def kv_token_bytes(self) -> int:
        pool = self.runner.pool
        return pool[0].nbytes // pool.shape[4]


def decode_step(loaded: Loaded, batch: int, context: int) -> tuple[Tensor, PagedBatch]:
    """Sequences of one length, their blocks anywhere in the pool; shared if it has too few."""
    pool = loaded.runner.pool
    size, blocks, device = pool.shape[4], pool.shape[0], pool.device
    width = -(-context // size)
    places = torch.randperm(blocks, device=device).repeat(-(-batch * width // blocks))
    tables = places[: batch * width].view(batch, width)
    positions = torch.full((batch,), context - 1, device=device)
    token_ids = torch.randint(loaded.config.vocab_size, (batch,), device=device)
    paged = PagedBatch(
        positions, tables[:, -1].contiguous(), positions % size, batch, tables, positions + 1, ()
    )
    return token_ids, paged


def decode(bench: Bench, loaded: Loaded, roof: Roof) -> Section:
    section = Section(
        "Decode step",
        ("rows", "context", "sampling", "replayed, ms", "eager, ms", "GB/s", "of a copy"),
        notes=[
            "Forward pass, logits and the choice of a token for each row. The bytes are those of the weights "
            "but the embedding, and of the keys and values; the share is the replayed step's. Where "
            "sequences share blocks the pool is smaller than all of theirs, and far larger than the cache.",
        ],
    )
    for batch in bench.scale.batches:
        for context in bench.scale.contexts:
            token_ids, paged = decode_step(loaded, batch, context)
            moved = loaded.weight_bytes + batch * context * loaded.kv_token_bytes
            for name, params in PARAMS.items():

                def run(model: Model, params: SamplingParams = params, step: PagedBatch = paged) -> Tensor:
                    logits = model.logits(model.forward(token_ids, step, loaded.runner.pool))  # noqa: B023
                    return choose(logits, [params] * step.num_decode, range(step.num_decode))

                with torch.inference_mode():
                    replayed = bench.seconds(partial(run, loaded.replayed))
                    eager = bench.seconds(partial(run, loaded.eager))
                rate = moved / replayed
                share = against(rate / roof.bytes_per_s, TARGETS.get(batch))
                times = (f"{replayed * 1e3:.3f}", f"{eager * 1e3:.3f}", f"{rate / 1e9:.0f}")
                section.rows.append((str(batch), str(context), name, *times, share))
    return section


def prefill(bench: Bench, loaded: Loaded, roof: Roof) -> Section:
    section = Section("Prompt", ("tokens", "ms", "tokens/s", "TF/s", "of a matmul"))
    pool, config = loaded.runner.pool, loaded.config
    head = config.vocab_size * config.hidden_size
    matrices = loaded.weight_bytes // bench.scale.dtype.itemsize - head
    for tokens in bench.scale.prefill:
        blocks = -(-tokens // pool.shape[4])
        positions = torch.arange(tokens, device=pool.device)
        table = torch.randperm(pool.shape[0], device=pool.device)[:blocks]
        none = torch.empty(0, dtype=torch.int64, device=pool.device)
        paged = PagedBatch(
            positions,
            table[positions // pool.shape[4]],
            positions % pool.shape[4],
            0,
            none.view(0, 0),
            none,
            (Chunk(0, tokens, tokens, table),),
        )
        token_ids = torch.randint(config.vocab_size, (tokens,), device=pool.device)

        def run(token_ids: Tensor = token_ids, paged: PagedBatch = paged) -> Tensor:
            return loaded.eager.logits(loaded.eager.forward(token_ids, paged, pool)[-1:])

        with torch.inference_mode():
            taken = bench.seconds(run)
        pairs = tokens * (tokens + 1) // 2
        attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
        rate = (2 * tokens * matrices + attention + 2 * head) / taken
        share = against(rate / roof.flops, PREFILL_TARGET if tokens == 8192 else None)
        section.rows.append(
            (str(tokens), f"{taken * 1e3:.2f}", f"{tokens / taken:.0f}", f"{rate / 1e12:.1f}", share)
        )
    return section


def measure(bench: Bench) -> list[Section]:
    roof = bench.roof()
    found = Section(
        "The device at best",
        ("copy, GB/s", "matmul, TF/s"),
        [(f"{roof.bytes_per_s / 1e9:.0f}", f"{roof.flops / 1e12:.1f}")],
    )
    loaded = Loaded.load(bench)
    sections = [found, decode(bench, loaded, roof), prefill(bench, loaded, roof)]
    del loaded
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return sections
