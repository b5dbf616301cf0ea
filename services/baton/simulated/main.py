"""The program of a simulated worker: the real one, around an engine whose steps are simulated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton import hub
from baton.engine.defaults import StepSizes
from baton.engine.engine import Engine
from baton.engine.kv.block_pool import BlockPool
from baton.engine.scheduler import Scheduler, SchedulerLimits
from baton.greeting.cluster_key import MIN_BYTES, OPEN_WARNING, suffices
from baton.models.config import ModelConfig
from baton.net.tls_session import DataTls
from baton.process import descriptors, logs
from baton.process.options import ModelError, StartError
from baton.process.start_clock import StartClock
from baton.simulated.config import DEFAULT_BLOCKS, SIZES, SimulatedConfig
from baton.simulated.faults import Faults
from baton.simulated.link import PacedEnd, WordMemory
from baton.simulated.openai import Front
from baton.simulated.record import TokenLog
from baton.simulated.runner import SimulatedRunner
from baton.text.digest import tokenizer_digest
from baton.text.errors import TokenizerError
from baton.transport.ranks.endpoint import LocalEndpoint
from baton.transport.ranks.endpoints import RankEndpoints
from baton.transport.ranks.shard import KVShard
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector
from baton.worker.config import WorkerConfig
from baton.worker.main import KVForm, Served, WorkerServer
from baton_kernels.kv_layout import TokenKV

log = logging.getLogger(__name__)

LAYOUT = "block,slot"
FIRST_WORD = 64
"""The first token id of answers: ids below are those that models use as markers."""


def run(config: SimulatedConfig, clock: StartClock) -> int:
    """Serve until SIGTERM or SIGINT, then until open requests have ended. Returns the exit status.

    Raises StartError, with one line for a person, when the model's configuration or a port cannot be had.
    """
    logs.configure(config.worker.log_level)
    if not suffices(config.worker.cluster_key):
        log.warning(OPEN_WARNING, MIN_BYTES)
    descriptors.raise_limit()
    log.warning("this worker is simulated: its answers mean nothing, and its times are made up")
    try:
        with clock.phase("config"):
            path = hub.resolve_model(config.worker.model, weights=False)
            model = ModelConfig.from_dir(path)
            revision = config.revision or hub.revision_of(path)
            tokenizer = tokenizer_digest(path)
    except (ModelError, TokenizerError) as error:
        raise StartError(str(error)) from error
    engine, runner = make_engine(config, model)
    with clock.phase("weights"):
        time.sleep(config.profile.load_s)
    served = Served(
        engine,
        revision,
        "" if model.quantization is None else model.quantization.description,
        tokenizer,
        _form(config),
        lambda on_crash: _ends(config, runner, on_crash),
        lambda role: config.worker.mixed_prefill_tokens,
    )
    return asyncio.run(_serve(config, served, clock))


async def _serve(config: SimulatedConfig, served: Served, clock: StartClock) -> int:
    worker = WorkerServer(config.worker, served, clock)
    if config.http_port >= 0:
        front = Front(served.engine, worker.routers, config.worker.model_name)
        await front.listen(config.worker.host, config.http_port)
    return await worker.serve()


def make_engine(config: SimulatedConfig, model: ModelConfig) -> tuple[Engine, SimulatedRunner]:
    """Make an engine whose steps take as long as the profile says. Raises StartError if options and model
    disagree."""
    worker = config.worker
    sizes = worker.sizes_with(SIZES)
    num_blocks = worker.num_blocks or DEFAULT_BLOCKS
    if worker.kv_cache_memory is not None:
        num_blocks = worker.kv_cache_memory // (sizes.block_size * config.profile.kv_bytes_per_token)
    if num_blocks < 2:
        raise StartError("--kv-cache-memory: there is no room for two blocks")
    eos = frozenset(token for token in model.eos_token_ids if token < model.vocab_size)
    runner = SimulatedRunner(
        config.profile,
        num_blocks,
        sizes.block_size,
        range(min(FIRST_WORD, model.vocab_size - 1), model.vocab_size),
        eos,
        Faults(config.faults),
        TokenLog(config.record) if config.record is not None else None,
        config.revision,
    )
    scheduler = Scheduler(_limits(worker, sizes, model), BlockPool(num_blocks, sizes.block_size))
    return Engine(runner, scheduler, eos, model.vocab_size), runner


def _limits(worker: WorkerConfig, sizes: StepSizes, model: ModelConfig) -> SchedulerLimits:
    longest = worker.max_model_len or model.max_model_len
    return SchedulerLimits(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        prefill_chunk=sizes.prefill_chunk,
        max_model_len=longest,
        chunked_prefill=worker.chunked_prefill,
        prefix_caching=worker.prefix_caching,
        priority_aging=worker.priority_aging if worker.scheduling_policy == "priority" else None,
        mixed_prefill_tokens=worker.mixed_prefill_tokens,
    )


def _form(config: SimulatedConfig) -> KVForm:
    """Return the KV's form, with the weight that a token's KV would have: K and V of one head, in bytes."""
    return KVForm(LAYOUT, "simulated", 1, (TokenKV(1, 2, config.profile.kv_bytes_per_token // 2),))


async def _ends(
    config: SimulatedConfig, runner: SimulatedRunner, on_crash: Callable[[], None]
) -> RankEndpoints:
    tls = None if config.worker.tls is None else DataTls(config.worker.tls)
    end = LocalEndpoint(
        {"tcp": TcpConnector(Staging(), on_crash, tls)},
        WordMemory(runner.pool),
        KVShard.of_one(range(1), range(1)),
    )
    profile = config.profile
    return RankEndpoints([PacedEnd(end, profile.kv_bytes_per_token, profile.link_bytes_per_s)])
