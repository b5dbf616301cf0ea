"""The start of a worker: loading its model, and serving it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from baton import hub
from baton.core.role import Role, may_decode
from baton.engine.config import EngineConfig
from baton.engine.defaults import defaults_of
from baton.engine.device import choose_device, choose_dtype, device_memory
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.greeting.cluster_key import MIN_BYTES, OPEN_WARNING, suffices
from baton.models.config import ModelConfig
from baton.models.loader import scheme_of
from baton.nodes.cluster import Cluster, SingleNode
from baton.nodes.leader import Leader, NodeTerms
from baton.parallel.ranks import RankError
from baton.process import descriptors, logs
from baton.process.ending import end_process
from baton.process.options import ModelError, StartError
from baton.process.ready import ChosenSizes, Progress, announce
from baton.process.start_clock import StartClock
from baton.text.digest import tokenizer_digest
from baton.text.errors import TokenizerError
from baton.transport.kv_types import FP8_DYNAMIC
from baton.transport.pool_memory import PoolMemory
from baton.worker.config import WorkerConfig
from baton.worker.kv_endpoints import make_ends
from baton.worker.main import EXIT_CRASHED, KVForm, Served, WorkerServer
from baton_kernels.paged import LAYOUT

log = logging.getLogger(__name__)


def run(config: WorkerConfig, clock: StartClock) -> int:
    """Load the model and serve until SIGTERM or SIGINT, then until open requests have ended. Returns the exit
    status. ``clock`` has run since the start began.

    Raises StartError, with one line for a person, when the model cannot be loaded or a port cannot be bound.
    """
    logs.configure(config.log_level)
    if not suffices(config.cluster_key):
        log.warning(OPEN_WARNING, MIN_BYTES)
    descriptors.raise_limit()
    try:
        with clock.phase("config"):
            path = hub.resolve_model(config.model)
            revision = hub.revision_of(path)
            tokenizer = tokenizer_digest(path)
            scheme = scheme_of(ModelConfig.from_dir(path), config.quantization)
        with clock.phase("kernels"):
            dtype = choose_dtype(config.dtype, choose_device(config.device), path)
        engine_config = _engine_config(config, path, dtype)
        announce(ChosenSizes(engine_config.described()))
        log.info("%s", engine_config.described())
        cluster = _cluster(config, revision)
        engine = Engine.from_config(engine_config, _announce_progress, clock, cluster)
    except (ModelError, TokenizerError, ValueError, RankError) as error:
        raise StartError(str(error)) from error
    engine.call_on_rank_death(_rank_died)
    if config.kv_revision is None:
        of_weights = revision, scheme.description
    else:
        log.warning("KV counts as %s's, whatever the weights: --kv-revision", config.kv_revision)
        of_weights = config.kv_revision, _scales_told(config, path)
    served = _served(config, engine, *of_weights, tokenizer, cluster)
    return asyncio.run(WorkerServer(config, served, clock).serve())


def _scales_told(config: WorkerConfig, path: Path) -> str:
    """What workers of one ``kv_revision`` still compare: the checkpoint's scales of K and V, where codes mean
    nothing without them."""
    if config.kv_cache_dtype != "fp8" and config.kv_convert != "allow":
        return ""
    digest = hub.kv_scales_digest(path)
    return f"KV scales {digest}" if digest else ""


def _cluster(config: WorkerConfig, revision: str) -> Cluster:
    """Return the nodes of this worker. The engine waits for them when it is made."""
    if config.nodes == 1:
        return SingleNode()
    return Leader(
        NodeTerms(
            layout=config.layout,
            model=config.model,
            revision=revision,
            host=config.host,
            advertised=config.advertised_host,
            port=config.node_port,
            keys=config.cluster_keys,
            timeout_s=config.join_timeout,
            log_level=config.log_level,
        )
    )


def _served(
    config: WorkerConfig, engine: Engine, revision: str, quantization: str, tokenizer: str, cluster: Cluster
) -> Served:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    kv, masks = runner.pool, runner.masks
    layout = engine.layout
    if engine.host is None:
        memory = PoolMemory(kv, layout=layout, kv_scales=runner.kv_scales)
    else:
        memory = PoolMemory(kv, engine.host.settle, layout, runner.kv_scales)
    return Served(
        engine,
        revision,
        quantization,
        tokenizer,
        KVForm(
            LAYOUT,
            FP8_DYNAMIC if layout.scale_bytes else str(kv.dtype).removeprefix("torch."),
            kv.element_size(),
            tuple(group.kv for group in layout.groups),
        ),
        lambda on_crash: make_ends(
            memory,
            runner.ranks,
            config.connector,
            config.host,
            cluster.places,
            on_crash,
            config.tls,
            require_rdma=config.require_rdma,
        ),
        lambda role: _mixed_prefill_tokens(config, choose_device(config.device), role),
        lambda: masks.stats,
        cluster,
    )


def _announce_progress(stage: str, done: int, total: int) -> None:
    announce(Progress(stage, done, total))


def _engine_config(config: WorkerConfig, path: Path, dtype: str) -> EngineConfig:
    device = choose_device(config.device)
    settings = config.engine_settings() | {
        "dtype": dtype,
        "device": device,
        "device_bytes": device_memory(device),
        "mixed_prefill_tokens": _mixed_prefill_tokens(config, device, config.role),
    }
    if not may_decode(config.role):  # its requests end with the first token: there is nothing to draft
        settings |= {"speculative_method": "none", "speculative_model": None}
    return EngineConfig(path, **settings)


def _mixed_prefill_tokens(config: WorkerConfig, device: str, role: Role) -> int | None:
    """Return the most prompt tokens of a step with running answers."""
    if config.mixed_prefill_tokens is not None:
        return config.mixed_prefill_tokens
    return defaults_of(device).mixed_prefill_tokens(role)


def _rank_died(what: str) -> None:
    """End the process at once: threads in the engine or a library may wait for the dead rank for ever."""
    log.error("%s; the worker cannot go on", what)
    end_process(EXIT_CRASHED)
