"""The program of a simulated worker: the real one, around an engine whose steps are simulated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton import hub, logs
from baton.connector.ranks.end import LocalEnd
from baton.connector.ranks.ends import Ends
from baton.connector.ranks.share import Share
from baton.connector.staging import Staging
from baton.connector.tcp import TcpConnector
from baton.engine.block_pool import BlockPool
from baton.engine.engine import Engine
from baton.engine.scheduler import Scheduler, SchedulerLimits
from baton.errors import ModelError
from baton.models.config import ModelConfig
from baton.options import StartError
from baton.simulated.config import DEFAULT_BLOCKS, SimulatedConfig
from baton.simulated.faults import Faults
from baton.simulated.link import PacedEnd, WordMemory
from baton.simulated.openai import Front
from baton.simulated.record import Record
from baton.simulated.runner import SimulatedRunner
from baton.telemetry.startup import StartClock
from baton.tls.session import DataTls
from baton.worker.config import WorkerConfig
from baton.worker.main import KVForm, Served, Worker

log = logging.getLogger(__name__)

LAYOUT = "block,slot"
FIRST_WORD = 64
"""Tokens of answers come from here on in the vocabulary: below are what models mark things with."""


def run(config: SimulatedConfig, clock: StartClock) -> int:
    """Serve until SIGTERM or SIGINT, then until what is open has ended. Returns the exit status.

    Raises StartError, with one line for a person, when the model's configuration or a port cannot be had.
    """
    logs.configure(config.worker.log_level)
    log.warning("this worker is simulated: its answers mean nothing, and its times are made up")
    try:
        with clock.phase("config"):
            path = hub.resolve_model(config.worker.model, weights=False)
            model = ModelConfig.from_dir(path)
            revision = config.revision or hub.revision_of(path)
    except ModelError as error:
        raise StartError(str(error)) from error
    engine, runner = make_engine(config, model)
    with clock.phase("weights"):
        time.sleep(config.profile.load_s)
    served = Served(
        engine,
        revision,
        _form(config),
        lambda on_crash: _ends(config, runner, on_crash),
        lambda role: config.worker.mixed_prefill_tokens,
    )
    return asyncio.run(_serve(config, served, clock))


async def _serve(config: SimulatedConfig, served: Served, clock: StartClock) -> int:
    worker = Worker(config.worker, served, clock)
    if config.http_port >= 0:
        front = Front(served.engine, worker.routers, config.worker.model_name)
        await front.listen(config.worker.host, config.http_port)
    return await worker.serve()


def make_engine(config: SimulatedConfig, model: ModelConfig) -> tuple[Engine, SimulatedRunner]:
    """An engine whose steps take as long as the profile says. StartError if options and model disagree."""
    worker = config.worker
    num_blocks = worker.num_blocks or DEFAULT_BLOCKS
    if worker.kv_cache_memory is not None:
        num_blocks = worker.kv_cache_memory // (worker.block_size * config.profile.kv_bytes_per_token)
    if num_blocks < 2:
        raise StartError("--kv-cache-memory: there is no room for two blocks")
    eos = frozenset(token for token in model.eos_token_ids if token < model.vocab_size)
    runner = SimulatedRunner(
        config.profile,
        num_blocks,
        worker.block_size,
        range(min(FIRST_WORD, model.vocab_size - 1), model.vocab_size),
        eos,
        Faults(config.faults),
        Record(config.record) if config.record is not None else None,
        config.revision,
    )
    scheduler = Scheduler(_limits(worker, model), BlockPool(num_blocks, worker.block_size))
    return Engine(runner, scheduler, eos, model.vocab_size), runner


def _limits(worker: WorkerConfig, model: ModelConfig) -> SchedulerLimits:
    longest = worker.max_model_len or model.max_model_len
    return SchedulerLimits(
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        prefill_chunk=worker.prefill_chunk,
        max_model_len=longest,
        chunked_prefill=worker.chunked_prefill,
        prefix_caching=worker.prefix_caching,
        priority_aging=worker.priority_aging if worker.scheduling_policy == "priority" else None,
        mixed_prefill_tokens=worker.mixed_prefill_tokens,
    )


def _form(config: SimulatedConfig) -> KVForm:
    """Told is what a token's KV would weigh: K and V of one head, in bytes."""
    return KVForm(LAYOUT, "simulated", 1, config.profile.kv_bytes_per_token // 2)


async def _ends(config: SimulatedConfig, runner: SimulatedRunner, on_crash: Callable[[], None]) -> Ends:
    tls = None if config.worker.tls is None else DataTls(config.worker.tls)
    end = LocalEnd(
        {"tcp": TcpConnector(Staging(), on_crash, tls)}, WordMemory(runner.pool), Share(range(1), range(1))
    )
    profile = config.profile
    return Ends([PacedEnd(end, profile.kv_bytes_per_token, profile.link_bytes_per_s)])
