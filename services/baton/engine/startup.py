"""Loading the model, finding out how many KV blocks there is room for, and the first forward passes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from baton.engine.config import EngineConfig
from baton.engine.graphs import CudaRecord, GraphedModel, graph_sizes
from baton.engine.runner import Model, ModelRunner
from baton.engine.scheduler import Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.loader import Progress, kv_block_bytes, load_model, new_kv_pool
from baton.sampling_params import SamplingParams
from baton.speculation.choice import Target, plan_drafter
from baton.speculation.speculator import Speculator

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
    speculator: Speculator | None


def build_runner(config: EngineConfig, progress: Progress | None = None) -> Built:
    """The model and its KV pool on the device, warmed up. ValueError if no block fits."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = torch.device(config.device)
    model = load_model(config.model, config.dtype, device, config.load_format, config.load_seed, progress)
    most = config.limits(model.config.max_model_len).max_model_len
    plan = plan_drafter(config.speculation, _target(config, model, device))
    num_blocks = config.num_blocks
    scratch = int(replays(config, device))
    if num_blocks is None:
        budget = config.kv_cache_bytes
        if budget is None and device.type == "cuda":
            step = min(most, config.max_num_batched_tokens)
            budget = _spare_device_memory(model, model.config, model.dtype, device, config, step)
        budget = CPU_KV_BYTES if budget is None else budget
        block_bytes = kv_block_bytes(model.config, config.block_size, model.dtype)
        block_bytes += plan.block_bytes if plan else 0
        num_blocks = budget // block_bytes - scratch
        if num_blocks < 1:
            raise ValueError(f"{budget} bytes are left for the KV cache; one block takes {block_bytes}")
    num_host_blocks = _host_blocks(config, kv_block_bytes(model.config, config.block_size, model.dtype))
    whole = new_kv_pool(model.config, num_blocks + scratch, config.block_size, model.dtype, device)
    with_lengths = model.config.rope.kind == "dynamic"
    runner = ModelRunner(model, whole[:num_blocks], config.block_size, device, with_lengths=with_lengths)
    room = min(num_blocks * config.block_size, most)
    for num_tokens in CUDA_WARM_UP if device.type == "cuda" else (2,):
        if num_tokens < room:
            warm_up(runner, num_tokens)
    if scratch:
        width = -(-room // config.block_size)
        runner.model = GraphedModel(model, whole, graph_sizes(config.max_num_seqs), width, CudaRecord())
    speculator = None
    if plan is not None:
        drafter = plan.build(num_blocks)
        speculator = Speculator(drafter, config.num_speculative_tokens, model.config.vocab_size)
    return Built(runner, model.config, num_blocks, num_host_blocks, speculator)


def replays(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps are replayed. It takes the pool a block of its own."""
    return device.type == "cuda" and not config.enforce_eager


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


def _spare_device_memory(
    model: Model,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    step_tokens: int,
) -> int:
    """Bytes of the device's allowed share that a step of ``step_tokens`` leaves at its peak: measured, by
    running one in a pool of its own. What other processes use counts as gone."""
    blocks = step_tokens // config.block_size + 1
    scratch = new_kv_pool(model_config, blocks, config.block_size, dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    warm_up(ModelRunner(model, scratch, config.block_size, device), step_tokens)
    peak = torch.cuda.max_memory_allocated(device) - scratch.nbytes
    del scratch
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    return int(total * config.device_memory_fraction) - elsewhere - peak
