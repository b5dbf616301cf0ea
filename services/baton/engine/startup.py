"""Loading the model, finding out how many KV blocks there is room for, and the first forward passes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.graphs import CudaRecord, GraphedModel, graph_sizes
from baton.engine.rank_start import (
    LoadedRank,
    checked_blocks,
    layout_of,
    load_rank,
    meet,
    part_of,
    spare_device_memory,
    start_ranks,
    threads_of_rank,
)
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.loader import Progress
from baton.parallel.layout import Layout
from baton.parallel.messages import NewPool, Scratch, Spare
from baton.parallel.ranks import ONE_NODE, Group, Nodes, Ranks
from baton.parallel.shard import check_split
from baton.sampling_params import SamplingParams
from baton.speculation.choice import Target, plan_drafter
from baton.speculation.speculator import Speculator
from baton.telemetry.startup import StartClock

CPU_KV_BYTES = 1 << 30

CUDA_WARM_UP = (2, 8, 32, 128)
"""Tokens of the prompts that are run before a device serves: among them is one for each kernel that prompts
of any length need, whatever the model's number of heads. None is then built while a request waits."""


@dataclass(frozen=True, slots=True)
class Built:
    runner: ModelRunner
    model_config: ModelConfig
    num_blocks: int
    num_host_blocks: int
    """Slots of the host tier."""
    block_bytes: int
    """Of a block of the pool, on all ranks together."""
    speculator: Speculator | None


def build_runner(
    config: EngineConfig,
    progress: Progress | None = None,
    clock: StartClock | None = None,
    nodes: Nodes = ONE_NODE,
) -> Built:
    """The model and its KV pool on the device, or on those of all ranks, which are on ``nodes``, warmed up.
    ValueError if no block fits, RankError if a rank cannot start."""
    clock = clock or StartClock()
    layout = layout_of(config, nodes.count)
    if config.world == 1:
        return _build(config, layout, None, Group(), progress, clock)
    with clock.phase("ranks"):
        sizes = ModelConfig.from_dir(config.model)  # before any process is started
        check_split(sizes, config.tensor_parallel_size, config.pipeline_parallel_size)
        ranks, group = start_ranks(config, layout, nodes)
    try:
        return _build(config, layout, ranks, group, progress, clock)
    except RuntimeError as error:
        cause = ranks.cause(error)
        ranks.close(str(cause))
        raise cause from error
    except BaseException as error:
        ranks.close(f"the leader does not start: {error}")
        raise


def _build(
    config: EngineConfig,
    layout: Layout,
    ranks: Ranks | None,
    group: Group,
    progress: Progress | None,
    clock: StartClock,
) -> Built:
    num_threads = threads_of_rank(config, layout)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    loaded = load_rank(part_of(config, 0, layout, group.host), clock, progress)
    model, device = loaded.model, loaded.device
    with clock.phase("ranks"):
        others = meet(ranks, loaded, group.host) if ranks is not None else []
    most = config.limits(model.config.max_model_len).max_model_len
    with clock.phase("drafter"):
        plan = plan_drafter(config.speculation, _target(config, model, device))
    block_bytes = [loaded.block_bytes + (plan.block_bytes if plan else 0), *others]
    with_lengths = model.config.rope.kind == "dynamic"
    scratch = int(replays(config, device))

    def runner_of(pool: Tensor) -> ModelRunner:
        return ModelRunner(model, pool, config.block_size, device, with_lengths=with_lengths, ranks=ranks)

    kv_bytes = loaded.block_bytes + sum(others)
    num_host_blocks = _host_blocks(config, kv_bytes)
    with clock.phase("pool"):
        num_blocks = config.num_blocks
        if num_blocks is None and config.kv_cache_bytes is None and device.type == "cuda":
            step_tokens = min(most, config.max_num_batched_tokens)
            num_blocks = _blocks_that_fit(config, loaded, runner_of, step_tokens, block_bytes[0], scratch)
        elif num_blocks is None:
            budget = CPU_KV_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
            num_blocks = checked_blocks(budget, sum(block_bytes), scratch)
        whole = _new_pools(loaded, ranks, num_blocks, num_host_blocks, scratch)
        runner = runner_of(whole[:num_blocks])
    room = min(num_blocks * config.block_size, most)
    with clock.phase("warm_up"):
        for num_tokens in CUDA_WARM_UP if device.type == "cuda" else (2,):
            if num_tokens < room:
                warm_up(runner, num_tokens)
    if scratch:
        with clock.phase("graphs"):
            width = -(-room // config.block_size)
            runner.model = GraphedModel(model, whole, graph_sizes(config.max_num_seqs), width, CudaRecord())
    speculator = None
    if plan is not None:
        with clock.phase("drafter"):
            drafter = plan.build(num_blocks)
        speculator = Speculator(drafter, config.num_speculative_tokens, model.config.vocab_size)
    return Built(runner, model.config, num_blocks, num_host_blocks, kv_bytes, speculator)


def _new_pools(
    loaded: LoadedRank, ranks: Ranks | None, num_blocks: int, num_host_blocks: int, scratch: int
) -> Tensor:
    """This rank's pool, with ``scratch`` blocks behind it. All other ranks have theirs afterwards."""
    if ranks is None:
        return loaded.new_pool(num_blocks + scratch)
    question = ranks.question()
    ranks.tell(NewPool(question, num_blocks, num_host_blocks))
    pool = loaded.new_pool(num_blocks + scratch)
    ranks.answers(question)
    return pool


def replays(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps are replayed: not those of several ranks. It takes the pool a block of its own."""
    return device.type == "cuda" and not config.enforce_eager and config.world == 1


def _target(config: EngineConfig, model: CausalLM, device: torch.device) -> Target:
    return Target(
        model,
        config.model,
        device,
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.load_format,
    )


def _host_blocks(config: EngineConfig, block_bytes: int) -> int:
    if 0 < config.host_kv_bytes < block_bytes:
        raise ValueError(
            f"host_kv_bytes is {config.host_kv_bytes}; allowed: 0, or {block_bytes} and more (a block)"
        )
    return config.host_kv_bytes // block_bytes


def warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Runs a prompt of ``num_tokens`` and a decode step in the pool's first blocks, while nobody owns any."""
    seq = Sequence("warm-up", 0, [0] * num_tokens, SamplingParams(max_tokens=2))
    seq.block_ids = array("q", range(num_tokens // runner.block_size + 1))
    for num_new in (num_tokens, 1):
        batch = ScheduledBatch((Scheduled(seq, num_new),), 1 if num_new == 1 else 0)
        [sampled] = runner.run(batch).tokens[seq]
        seq.num_computed += num_new
        seq.append(sampled.token)


def _blocks_that_fit(
    config: EngineConfig,
    loaded: LoadedRank,
    runner_of: Callable[[Tensor], ModelRunner],
    step_tokens: int,
    block_bytes: int,
    scratch: int,
) -> int:
    """Blocks that every rank's device has memory for beside a step of ``step_tokens`` at its peak: measured,
    by running one in pools of their own. ``block_bytes``: what a block takes on this rank;
    ``scratch``: blocks of this rank that are nobody's."""
    num_scratch = step_tokens // config.block_size + 1
    pool = loaded.new_pool(num_scratch)
    runner = runner_of(pool)
    if runner.ranks is not None:
        question = runner.ranks.question()
        runner.ranks.ask(question, Scratch(question, num_scratch))
    torch.cuda.reset_peak_memory_stats(loaded.device)
    warm_up(runner, step_tokens)
    scratch_bytes = pool.nbytes
    del runner.pool, pool
    budget = spare_device_memory(loaded.device, scratch_bytes, config.device_memory_fraction)
    counts = [checked_blocks(budget, block_bytes, scratch)]
    if runner.ranks is not None:
        question = runner.ranks.question()
        counts += runner.ranks.ask(question, Spare(question, config.device_memory_fraction))
    return min(counts)
