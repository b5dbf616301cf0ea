"""Loading the model, finding out how many KV blocks there is room for, and the first forward passes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.borrowed_pages import borrow_pages, moves_in_place
from baton.engine.config import EngineConfig
from baton.engine.graphs import GraphedModel, GraphSize, graph_sizes, recorder_of
from baton.engine.kv.page_counts import PageCounts
from baton.engine.memory import StepRecorder, blocks_that_fit, recordings_bytes
from baton.engine.pieces import PiecewiseModel, piece_sizes
from baton.engine.rank_start import (
    LoadedRank,
    checked_blocks,
    layout_of,
    load_rank,
    meet,
    part_of,
    start_ranks,
    threads_of_rank,
)
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence
from baton.engine.start_progress import LOAD, StartProgress, ToldRecorder
from baton.engine.warm_up import (
    warm_up_choices,
    warm_up_continuation,
    warm_up_drafter,
    warm_up_swaps,
)
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.loader import kv_layout, new_kv_pool
from baton.parallel.layout import Layout
from baton.parallel.messages import NewPool, Record
from baton.parallel.ranks import ONE_NODE, Nodes, Ranks, RemoteRanks
from baton.parallel.shard import Shard, check_split
from baton.process.start_clock import StartClock
from baton.speculation.choice import Target, plan_drafter
from baton.speculation.draft_model import Forward, Replay
from baton.speculation.speculator import Speculator
from baton_kernels.cuda.shapes import MIN_ARCH, Shape
from baton_kernels.kv_layout import KVLayout

log = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30

CUDA_WARM_UP = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of the prompts that are run before a device serves: together they build every kernel that prompts of
any length need, whatever the model's number of heads. No kernel is then built while a request waits."""


@dataclass(frozen=True, slots=True)
class Built:
    runner: ModelRunner
    model_config: ModelConfig
    num_blocks: int
    num_host_blocks: int
    """Slots of the host tier."""
    block_bytes: int
    """The size of a block of the pool, in bytes, on all ranks together."""
    speculator: Speculator | None
    layout: KVLayout


def build_runner(
    config: EngineConfig,
    progress: StartProgress | None = None,
    clock: StartClock | None = None,
    nodes: Nodes = ONE_NODE,
) -> Built:
    """The model and its KV pool on the device, or on the devices of all ranks on ``nodes``, with the kernels
    of a GPU compiled. ValueError if no block fits, RankError if a rank cannot start."""
    clock = clock or StartClock()
    layout = layout_of(config, nodes.count)
    if config.world == 1:
        return _build(config, layout, None, RemoteRanks(), progress, clock)
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
    group: RemoteRanks,
    progress: StartProgress | None,
    clock: StartClock,
) -> Built:
    num_threads = threads_of_rank(config, layout)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    told = partial(progress, LOAD) if progress is not None else None
    loaded = load_rank(part_of(config, 0, layout, group.host), clock, told)
    model, device = loaded.model, loaded.device
    with clock.phase("ranks"):
        others = meet(ranks, loaded, group.host) if ranks is not None else []
    most = config.limits(model.config.max_model_len).max_model_len
    with clock.phase("drafter"):
        plan = plan_drafter(config.speculation, _target(config, model, device, most))
    block_bytes = [loaded.block_bytes + (plan.block_bytes if plan else 0), *others]
    _tell_waste(loaded)
    with_lengths = model.config.rope.by_length
    # Steps with lengths are never replayed.
    recorded = recorded_sizes(config, model) if replays(config, device) and not with_lengths else ()
    suits = PiecewiseModel.suits(loaded.layout)
    pieces = pieces_of(config, device) if recorded and suits else ()
    scratch = int(bool(recorded))

    def runner_of(pool: Tensor) -> ModelRunner:
        return ModelRunner(
            model,
            pool,
            config.sizes.block_size,
            device,
            with_lengths=with_lengths,
            ranks=ranks,
            layout=loaded.layout,
            kv_scales=loaded.kv_scales,
        )

    kv_bytes = loaded.block_bytes + sum(others)
    num_host_blocks = _host_blocks(config, kv_bytes)
    with clock.phase("pool"):
        num_blocks = config.num_blocks
        if num_blocks is None and config.kv_cache_bytes is None and device.type == "cuda":
            drafting = _draft_recordings(config, plan.model, device, most) if plan and recorded else 0
            num_blocks = blocks_that_fit(
                config, loaded, runner_of, most, block_bytes[0], recorded, pieces, drafting
            )
        elif num_blocks is None:
            budget = CPU_KV_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
            num_blocks = checked_blocks(budget, sum(block_bytes), scratch)
        whole = _new_pools(loaded, ranks, num_blocks, num_host_blocks, scratch)
        runner = runner_of(whole[:num_blocks])
    counts = PageCounts(loaded.layout, config.sizes.block_size)
    room = counts.most_tokens(num_blocks, most)
    if not room:
        raise ValueError(
            f"the KV cache of {num_blocks} pages of {sum(block_bytes)} bytes holds no sequence; one takes "
            f"{counts.of(1)} pages, {counts.state_pages} of them for its state"
        )
    if device.type == "cuda":
        with clock.phase("warm_up"):
            warm_up_device(runner, room)
    if recorded:
        with clock.phase("graphs"):
            _record(runner, whole, recorded, -(-room // config.sizes.block_size), pieces, progress)
    if launches_ahead(config, device):
        runner.launcher = runner
    speculator = None
    if plan is not None:
        with clock.phase("drafter"):
            drafter = plan.build(num_blocks)
            if device.type == "cuda":
                warm_up_drafter(drafter, CUDA_WARM_UP)
        speculator = Speculator(drafter, config.num_speculative_tokens, model.config.vocab_size)
    return Built(
        runner,
        model.config,
        num_blocks,
        num_host_blocks,
        kv_bytes,
        speculator,
        loaded.layout,
    )


WASTEFUL = 0.1
"""The share of a group's pages that is worth a word, if it is unused."""
BLOCK_SIZES = (16, 32, 64, 128)


def best_block_size(config: ModelConfig, dtype: torch.dtype, shard: Shard | None) -> tuple[int, float]:
    """The smallest of the usual block sizes that leaves little of the pages unused, or else the one that
    leaves the least; and that share."""
    lost = {size: kv_layout(config, size, dtype, shard).lost for size in BLOCK_SIZES}
    best = next((size for size in BLOCK_SIZES if lost[size] <= WASTEFUL / 2), None)
    best = min(BLOCK_SIZES, key=lambda size: lost[size]) if best is None else best
    return best, lost[best]


def _tell_waste(loaded: LoadedRank) -> None:
    lost = loaded.layout.lost
    if lost <= WASTEFUL:
        return
    model = loaded.model
    best, least = best_block_size(model.config, loaded.kv_dtype, model.shard)
    log.warning(
        "block_size %d leaves %.0f %% of the pages of a group of layers unused; %d leaves %.0f %%",
        loaded.block_size,
        100 * lost,
        best,
        100 * least,
    )


def _new_pools(
    loaded: LoadedRank, ranks: Ranks | None, num_blocks: int, num_host_blocks: int, scratch: int
) -> Tensor:
    """This rank's pool, with ``scratch`` blocks behind it. All other ranks have theirs, alike, on return."""
    if ranks is None:
        return loaded.new_pool(num_blocks + scratch)
    question = ranks.question()
    ranks.tell(NewPool(question, num_blocks, num_host_blocks, scratch))
    pool = loaded.new_pool(num_blocks + scratch)
    ranks.answers(question)
    return pool


def replays(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps are replayed: not with several stages, each of which waits for the one before in
    the middle of a step. Replay takes a block of its own in the pool."""
    return device.type == "cuda" and not config.enforce_eager and config.pipeline_parallel_size == 1


def pieces_of(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """Tokens of the steps with prompts that are replayed in pieces: none with several ranks."""
    most = min(config.max_graph_tokens, config.sizes.max_num_batched_tokens)
    return piece_sizes(most) if replays(config, device) and config.world == 1 and most else ()


def recorded_sizes(config: EngineConfig, model: CausalLM) -> tuple[GraphSize, ...]:
    """The steps to record: decode steps and, if there are drafts, verifications of as many as are allowed,
    unless a tile of attention has too few rows for them."""
    queries = 1 if config.speculative_method == "none" else 1 + config.num_speculative_tokens
    group = len(model.shard.heads) // len(model.shard.kv_heads)
    shape = Shape(config.sizes.block_size, model.config.head_dim, model.dtype, MIN_ARCH)
    if group * queries > shape.most_rows:
        queries = 1
    return graph_sizes(config.sizes.max_num_seqs, queries)


def _record(
    runner: ModelRunner,
    whole: Tensor,
    sizes: tuple[GraphSize, ...],
    width: int,
    pieces: tuple[int, ...],
    progress: StartProgress | None,
) -> None:
    """Has the decode steps of all ranks replayed from here on. All record the same steps in the same order,
    and each step's exchanges between ranks with it; every rank then knows from a step's layout alone whether
    it is replayed, and padded to which size. ``pieces``: tokens of the steps with prompts that are replayed,
    with one rank alone. ``progress`` hears of each step."""
    ranks = runner.ranks
    question = ranks.question() if ranks is not None else 0
    if ranks is not None:
        ranks.tell(Record(question, sizes, width))
    record: StepRecorder = recorder_of(whole.device)
    if progress is not None:
        record = ToldRecorder(record, len(sizes) + len(pieces), progress)
    runner.replay(GraphedModel(runner.model, whole, sizes, width, record, runner.layout))
    if ranks is not None:
        ranks.answers(question)
    log.info("decode steps of up to %d rows are replayed, by %d recordings", sizes[-1].rows, len(sizes))
    if pieces:
        runner.model = PiecewiseModel(runner.model, whole, pieces, record, runner.layout)
        log.info("steps with prompts of up to %d tokens are replayed in pieces", pieces[-1])


def draft_sizes(config: EngineConfig) -> tuple[GraphSize, ...]:
    """The passes of a draft model to record. A sequence whose drafts were all accepted has two tokens to
    compute, the last draft and the token behind it; each token is a row of its own."""
    return graph_sizes(2 * config.sizes.max_num_seqs)


def _replay_drafts(config: EngineConfig, longest: int) -> Replay:
    """Records the passes of a draft model for sequences of up to ``longest`` tokens."""
    width = -(-longest // config.sizes.block_size)

    def replay(model: CausalLM, pool: Tensor) -> Forward:
        return GraphedModel(model, pool, draft_sizes(config), width, recorder_of(pool.device)).forward

    return replay


def _draft_recordings(
    config: EngineConfig, model: CausalLM | None, device: torch.device, longest: int
) -> int:
    """The memory that the recordings of a draft model will take, in bytes."""
    if model is None:
        return 0
    size = config.sizes.block_size
    pool = new_kv_pool(model.config, 1, size, model.dtype, device)
    return recordings_bytes(model, pool, draft_sizes(config), -(-longest // size))


def launches_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps are launched before the tokens of the one before are known. Other ranks do not have them,
    and a drafter needs them."""
    if config.async_scheduling != "auto":
        return config.async_scheduling == "on"
    return device.type == "cuda" and config.world == 1 and config.speculative_method == "none"


def _target(config: EngineConfig, model: CausalLM, device: torch.device, longest: int) -> Target:
    """``longest``: tokens of the longest sequence."""
    return Target(
        model,
        config.model,
        device,
        config.sizes.block_size,
        config.sizes.max_num_seqs,
        config.sizes.max_num_batched_tokens,
        config.load_format,
        _replay_drafts(config, longest) if replays(config, device) else None,
    )


def _host_blocks(config: EngineConfig, block_bytes: int) -> int:
    if 0 < config.host_kv_bytes < block_bytes:
        raise ValueError(
            f"host_kv_bytes is {config.host_kv_bytes}; allowed: 0, or {block_bytes} and more (a block)"
        )
    return config.host_kv_bytes // block_bytes


def warm_up_device(runner: ModelRunner, room: int) -> None:
    """Launches every kernel that serving launches. ``room``: most tokens of a sequence."""
    for num_tokens in CUDA_WARM_UP:
        if num_tokens < room:
            warm_up(runner, num_tokens)
    if runner.block_size + 1 < room:
        warm_up_continuation(runner)
    warm_up_choices(runner)
    warm_up_swaps(runner.pool)


def warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Runs a prompt of ``num_tokens`` and a decode step in the pool's first blocks, while nobody owns any
    block."""
    seq = Sequence("warm-up", 0, [0] * num_tokens, ResolvedSampling(max_tokens=2))
    borrow_pages(seq, runner.layout, num_tokens // runner.block_size + 1, len(runner.pool))
    for num_new in (num_tokens, 1):
        item = Scheduled(seq, num_new, seq.num_computed, chooses=True)
        batch = ScheduledBatch((item,), 1 if num_new == 1 else 0, moves=moves_in_place((item,)))
        [sampled] = runner.run(batch).tokens[seq]
        seq.num_computed += num_new
        seq.append(sampled.token)
