"""How each rank, the leader too, loads its part of a model, and how ranks connect."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.device import enter_device, exact_device
from baton.models.base import CausalLM
from baton.models.config import KVCacheDtype, LoadFormat, ModelConfig
from baton.models.loader import (
    Progress,
    kv_dtype,
    kv_layout,
    kv_scale_bytes,
    kv_scales_of,
    load_model,
    new_page_pool,
    torch_dtype,
)
from baton.models.quantization.registry import Quantization
from baton.parallel.collectives import Alone, GroupCollectives, Parallel, listening_store, store_at
from baton.parallel.layout import LOOPBACK, Layout
from baton.parallel.messages import Connect, Start
from baton.parallel.ranks import Nodes, RankError, Ranks, RemoteRanks
from baton.parallel.shard import Shard
from baton.process.start_clock import StartClock
from baton_kernels.cpu.library import native
from baton_kernels.kv_fp8 import KVScales
from baton_kernels.kv_layout import KVLayout

_LOAD = 1
"""The number of the first question: all ranks are asked to load before anything else."""


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank with its weights on its device."""

    model: CausalLM
    device: torch.device
    block_size: int

    layout: KVLayout
    """The layout of the rank's pool."""
    kv_dtype: torch.dtype
    """The type of the pool's numbers."""

    @property
    def block_bytes(self) -> int:
        """The size of a page of the rank's pool, in bytes."""
        return self.layout.page_bytes

    @property
    def kv_scales(self) -> dict[int, KVScales]:
        """See ``baton.models.loader.kv_scales_of``."""
        return kv_scales_of(self.model)

    def new_pool(self, num_blocks: int) -> Tensor:
        return new_page_pool(self.layout, num_blocks, self.kv_dtype, self.device)

    def connect(self, host: str, port: int) -> None:
        """Connects to the other ranks through the leader's store."""
        if isinstance(self.model.collectives, GroupCollectives):
            self.model.collectives.connect(store_at(host, port, self.model.shard.world))


def layout_of(config: EngineConfig, nodes: int) -> Layout:
    """The layout of the ranks. ValueError if they cannot be split over ``nodes`` nodes."""
    return Layout.of(config.tensor_parallel_size, config.pipeline_parallel_size, nodes)


def part_of(config: EngineConfig, rank: int, layout: Layout, host: str = LOOPBACK, model: str = "") -> Start:
    """The part that a rank has to load. ``host``: the address at which other ranks reach it. ``model``: the
    model's directory on the rank's node, if it differs."""
    return Start(
        reply=_LOAD,
        rank=rank,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        place=layout.place_of(rank),
        per_node=layout.per_node,
        host=host,
        model=model or str(config.model),
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        load_format=config.load_format,
        load_seed=config.load_seed,
        block_size=config.sizes.block_size,
        num_threads=threads_of_rank(config, layout),
        log_level=logging.getLogger().getEffectiveLevel(),
    )


def start_ranks(config: EngineConfig, layout: Layout, nodes: Nodes) -> tuple[Ranks, RemoteRanks]:
    """Starts all ranks but the first, which begin to load. Returns all of them, and the ranks of other nodes
    by themselves. RankError if those do not start."""
    num_threads = threads_of_rank(config, layout)
    group = nodes.gather(num_threads)
    ranks = Ranks(layout.ranks_of(0)[1:], num_threads, group)
    assert ranks.question() == _LOAD
    ranks.ask_each(lambda member: part_of(config, member.rank, layout, member.host, member.model))
    return ranks, group


def load_rank(part: Start, clock: StartClock, progress: Progress | None = None) -> LoadedRank:
    """Loads a rank's part. ValueError (a ModelError) if it cannot be loaded."""
    with clock.phase("config"):
        device = _device(part)
        sizes = ModelConfig.from_dir(Path(part.model))
        kept_in = kv_dtype(
            cast(KVCacheDtype, part.kv_cache_dtype), sizes, torch_dtype(part.dtype, sizes), device.type
        )
    with clock.phase("kernels"):
        if device.type == "cpu":
            native()  # built now, so that the time for it is not counted elsewhere
    shard = Shard.of(sizes, part.rank, part.tensor_parallel_size, part.pipeline_parallel_size)
    collectives = GroupCollectives(shard, device, part.host, part.per_node) if shard.world > 1 else Alone()
    model = load_model(
        Path(part.model),
        part.dtype,
        device,
        cast(LoadFormat, part.load_format),
        part.load_seed,
        progress,
        Parallel(shard, collectives),
        clock,
        cast(Quantization, part.quantization),
    )
    scale_bytes = kv_scale_bytes(cast(KVCacheDtype, part.kv_cache_dtype))
    layout = kv_layout(model.config, part.block_size, kept_in, model.shard, scale_bytes)
    model.lay_out(layout)
    return LoadedRank(model, device, part.block_size, layout, kept_in)


def meet(ranks: Ranks, leader: LoadedRank, host: str) -> list[int]:
    """Waits until all ranks are loaded, and connects them, at ``host``. Returns the bytes of a block of each
    rank's pool but the leader's. RankError if a rank is dead."""
    block_bytes = ranks.answers(_LOAD)
    try:
        store, port = listening_store(leader.model.shard.world, host)
    except OSError as error:
        raise RankError(
            f"cannot listen on {host}, which other ranks are told (--advertise): {error}"
        ) from error
    question = ranks.question()
    ranks.tell(Connect(question, host, port))
    assert isinstance(leader.model.collectives, GroupCollectives)
    leader.model.collectives.connect(store)
    ranks.answers(question)
    abort = leader.model.collectives.abort
    ranks.call_on_death(lambda what: abort())
    return block_bytes


def checked_blocks(budget: int, block_bytes: int, scratch: int = 0) -> int:
    """Blocks that fit into ``budget`` bytes beside ``scratch`` of them. ValueError if none fits."""
    blocks = budget // block_bytes - scratch
    if blocks < 1:
        raise ValueError(f"{budget} bytes are left for the KV cache; one block takes {block_bytes}")
    return blocks


def spare_device_memory(device: torch.device, peak: int, fraction: float) -> int:
    """The part of the device's allowed share that is left beside a ``peak`` of this process, in bytes. Memory
    of other processes counts as used."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    return int(total * fraction) - elsewhere - peak


def threads_of_rank(config: EngineConfig, layout: Layout) -> int | None:
    """Threads of torch in a rank's process, on the assumption that nodes are alike. None: as torch
    chooses."""
    if config.num_threads is not None or config.world == 1 or config.device != "cpu":
        return config.num_threads
    return max(1, _cores() // layout.per_node)


def _cores() -> int:
    """Cores this process may use, which in a container can be fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device(part: Start) -> torch.device:
    """The rank's device, which on CUDA becomes the calling thread's own. There, the ranks of a node use
    consecutive devices from the named one on. ValueError if there are too few."""
    device = torch.device(part.device)
    world = part.tensor_parallel_size * part.pipeline_parallel_size
    if device.type != "cuda" or world == 1:
        device = exact_device(part.device)
        enter_device(device)
        return device
    first, there = device.index or 0, torch.cuda.device_count()
    if first + part.per_node > there:
        raise ValueError(
            f"{part.per_node} ranks (of tensor_parallel_size x pipeline_parallel_size) on a node from "
            f"cuda:{first} on; allowed: at most {max(there - first, 0)}, the devices there"
        )
    device = torch.device("cuda", first + part.place)
    enter_device(device)
    return device
