"""Loading what a worker serves, and serving it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from baton import hub, logs
from baton.engine.config import EngineConfig
from baton.engine.device import choose_device, choose_dtype
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.errors import ModelError
from baton.nodes.leader import Leader, Wanted
from baton.nodes.others import Nobody, Others
from baton.options import StartError
from baton.parallel.ranks import RankError
from baton.ready import Progress, announce
from baton.telemetry.startup import StartClock
from baton.worker.config import RoleName, WorkerConfig
from baton.worker.ends import make_ends
from baton.worker.main import EXIT_CRASHED, KVForm, Served, Worker, end_process
from baton_kernels.paged import LAYOUT

log = logging.getLogger(__name__)

MIXED_PREFILL_CPU = 64
"""A chunk of 64 multiplies almost as fast as one of 512 there (docs/benchmarks/2026-11-22-split.md)."""
MIXED_PREFILL_CUDA = 256
"""Weights are read once for all rows of a step: on an H100 about as many rows come with them for nothing."""


def run(config: WorkerConfig, clock: StartClock) -> int:
    """Load the model and serve until SIGTERM or SIGINT, then until what is open has ended. Returns the exit
    status. ``clock`` has run since the start began.

    Raises StartError, with one line for a person, when the model or a port cannot be had.
    """
    logs.configure(config.log_level)
    try:
        with clock.phase("config"):
            path = hub.resolve_model(config.model)
            revision = hub.revision_of(path)
        with clock.phase("kernels"):
            dtype = choose_dtype(config.dtype, choose_device(config.device), path)
        engine_config = _engine_config(config, path, dtype)
        others = _others(config, revision)
        engine = Engine.from_config(engine_config, _announce_progress, clock, others)
    except (ModelError, ValueError, RankError) as error:
        raise StartError(str(error)) from error
    engine.call_on_rank_death(_rank_died)
    return asyncio.run(Worker(config, _served(config, engine, revision, others), clock).serve())


def _others(config: WorkerConfig, revision: str) -> Others:
    """The nodes of this worker. They are waited for when the engine is made."""
    if config.nodes == 1:
        return Nobody()
    return Leader(
        Wanted(
            layout=config.layout,
            model=config.model,
            revision=revision,
            host=config.host,
            advertised=config.advertised_host,
            port=config.node_port,
            cluster_key=config.cluster_key.encode(),
            timeout_s=config.join_timeout,
            log_level=config.log_level,
        )
    )


def _served(config: WorkerConfig, engine: Engine, revision: str, others: Others) -> Served:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    kv, masks = runner.pool, runner.masks
    return Served(
        engine,
        revision,
        KVForm(LAYOUT, str(kv.dtype).removeprefix("torch."), kv.element_size(), kv.shape[-1]),
        lambda on_crash: make_ends(
            runner, config.connector, config.host, others.places, on_crash, config.tls
        ),
        lambda role: _mixed_prefill_tokens(config, choose_device(config.device), role),
        lambda: masks.stats,
        others,
    )


def _announce_progress(done: int, total: int) -> None:
    announce(Progress("load", done, total))


def _engine_config(config: WorkerConfig, path: Path, dtype: str) -> EngineConfig:
    device = choose_device(config.device)
    return EngineConfig(
        model=path,
        dtype=dtype,
        quantization=config.quantization,
        device=device,
        load_format=config.load_format,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_memory,
        host_kv_bytes=config.host_kv_memory,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk,
        mixed_prefill_tokens=_mixed_prefill_tokens(config, device, config.role),
        chunked_prefill=config.chunked_prefill,
        prefix_caching=config.prefix_caching,
        max_model_len=config.max_model_len,
        enforce_eager=config.enforce_eager,
        priority_aging=config.priority_aging if config.scheduling_policy == "priority" else None,
        # What prefill computes ends with its first token: it has nothing to draft.
        speculative_method=config.speculative_method if config.role != "prefill" else "none",
        speculative_model=config.speculative_model if config.role != "prefill" else None,
        num_speculative_tokens=config.num_speculative_tokens,
        speculative_ngram_min=config.speculative_ngram_min,
        speculative_ngram_max=config.speculative_ngram_max,
        num_threads=config.threads,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )


def _mixed_prefill_tokens(config: WorkerConfig, device: str, role: RoleName) -> int | None:
    """A decode worker is there for answers that run; so much of a prompt goes beside them where it costs them
    little more than less of it would."""
    if config.mixed_prefill_tokens is not None or role != "decode":
        return config.mixed_prefill_tokens
    return MIXED_PREFILL_CPU if device == "cpu" else MIXED_PREFILL_CUDA


def _rank_died(what: str) -> None:
    """Not in order: what others wait for, in the engine or in a library, may never come."""
    log.error("%s; the worker cannot go on", what)
    end_process(EXIT_CRASHED)
