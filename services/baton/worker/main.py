"""The worker program: one process of any role. The engine is passed in: this module imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client import CollectorRegistry

from baton.core.role import Role, may_decode
from baton.core.role_proto import role_to_proto
from baton.engine.engine import Engine
from baton.handoff import wire
from baton.handoff.identity import PROTOCOL, compatibility_digest, with_kv_dtype
from baton.handoff.wiring import Wiring
from baton.net import grpc_wakeups
from baton.net.channels import Dialer, add_port
from baton.nodes.cluster import Cluster, SingleNode
from baton.process import options
from baton.process.ending import EXIT_HUNG, MAX_END_S, end_process_after
from baton.process.options import StartError
from baton.process.ready import WorkerReady, announce
from baton.process.start_clock import StartClock
from baton.roles.decode import DecodeRole
from baton.roles.prefill import PrefillRole
from baton.telemetry.beats import BeatMetrics
from baton.telemetry.handoff import HandoffMetrics
from baton.telemetry.identity import Identity, export_identity
from baton.telemetry.roles import CountedByRole
from baton.telemetry.serve import serve_metrics
from baton.telemetry.stages import StageMetrics, Stages
from baton.telemetry.startup import StartCollector
from baton.telemetry.stats_collector import StatsCollector
from baton.telemetry.supervision import Supervision
from baton.telemetry.switches import SwitchMetrics
from baton.telemetry.tasks import TaskMetrics
from baton.telemetry.vllm import with_vllm_names
from baton.transport.kv_types import KVConvert, convertible_to
from baton.transport.ranks.endpoint import RankAddress
from baton.transport.ranks.endpoints import RankEndpoints
from baton.transport.ranks.shard import KVShard
from baton.transport.registry import encryption
from baton.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.worker.beats import BeatService
from baton.worker.config import WorkerConfig
from baton.worker.drain import LIVE_SERVICE, READY_SERVICES, Drain
from baton.worker.engine_loop import EngineLoop
from baton.worker.kv_groups import groups_of
from baton.worker.metrics import WorkerCollector
from baton.worker.role_switch import RoleSwitch
from baton.worker.routers import Routers
from baton.worker.server import make_server
from baton.worker.service import WorkerService
from baton.worker.switch_request import RoleIncarnation
from baton_kernels.kv_layout import LayerKV, TokenKV

if TYPE_CHECKING:
    from baton.engine.sampling.guidance import MaskStats

log = logging.getLogger(__name__)

EXIT_CUT_SHORT = 1
"""The exit status of a worker that was told to end at once, or whose --drain-timeout ran out, with open
work."""
EXIT_CRASHED = 70
EXIT_RETIRED = 75
STOP_GRACE_S = 1.0


def start_timers(
    tasks: Supervision,
    service: WorkerService,
    prefill: PrefillRole,
    decode: DecodeRole,
    on_crash: Callable[[], None],
) -> Sequence[asyncio.Task[None]]:
    """Start the periodic tasks of a worker.

    An error in the timers of a role ends the worker: what the timers were about to resend, give up or free
    would hold its pages unnoticed. The request timers, which only report and cancel, go on after an error.
    """
    return (
        tasks.start("request timers", service.run_timers),
        tasks.start("prefill timers", prefill.run_timers, on_failure=on_crash),
        tasks.start("decode timers", decode.run_timers, on_failure=on_crash),
    )


@dataclass(frozen=True, slots=True)
class KVForm:
    """The format of the KV of one head of one layer of each group."""

    layout: str
    dtype: str
    element_bytes: int
    groups: tuple[LayerKV, ...]
    """What a layer of each group keeps on a rank."""

    def token_bytes(self, whole: KVShard) -> int:
        """The bytes of a token that stay as long as its sequence, in all layers. Of a model that has only
        windows or states: those of a token in its windows, or 1."""
        kept = [
            (kv, kv.vectors * kv.dim * self.element_bytes * part.size)
            for kv, part in zip(self.groups, whole.groups, strict=True)
            if isinstance(kv, TokenKV)
        ]
        stay = sum(size for kv, size in kept if kv.window is None)
        return stay or sum(size for _, size in kept) or 1

    @property
    def convertible(self) -> tuple[str, ...]:
        """The other types of which K and V can be taken over; none if the model keeps latents or states
        alone."""
        vectors = {kv.vectors for kv in self.groups if isinstance(kv, TokenKV)}
        return convertible_to(self.dtype) if vectors == {2} else ()


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a worker serves, and the engine that computes it."""

    engine: Engine
    revision: str
    """The revision of the model."""
    quantization: str
    """The scheme of the weights: see ``QuantizationScheme.description``."""
    tokenizer: str
    """The digest of the tokenizer; see ``baton.text.digest``."""
    kv: KVForm
    make_ends: Callable[[Callable[[], None]], Awaitable[RankEndpoints]]
    """Makes the worker's endpoints of all links. Its argument is called when a thread of an endpoint crashes.
    Raises StartError."""
    mixed_prefill_tokens: Callable[[Role], int | None]
    """Returns ``SchedulerLimits.mixed_prefill_tokens`` of a role."""
    mask_stats: Callable[[], MaskStats] | None = None
    """Returns the stats of token masks. None: this process computes no masks."""
    cluster: Cluster = field(default_factory=SingleNode)
    """The nodes of the worker's ranks."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a worker that depend on its role."""

    prefill: PrefillRole
    decode: DecodeRole
    service: WorkerService
    wiring: Wiring
    hello: worker_pb2.WorkerHello
    """The greeting with which the worker started."""
    registry: CollectorRegistry
    counted: CountedByRole
    stages: Stages


def _converted(kv_convert: KVConvert, kv: KVForm) -> tuple[str, ...]:
    """Return the types of KV that are converted on arrival. Raises StartError if there can be none."""
    if kv_convert == "none":
        return ()
    if not kv.convertible:
        kinds = ", ".join(group.kind for group in kv.groups)
        raise StartError(
            f"kv_convert (--kv-convert) is {kv_convert}; allowed for {kinds} layers of {kv.dtype}: none"
        )
    return kv.convertible


class WorkerServer:
    """A worker: a loaded engine and everything that serves it."""

    def __init__(self, config: WorkerConfig, served: Served, clock: StartClock) -> None:
        self._config = config
        self._clock = clock
        self._served = served
        self._engine = served.engine
        self._revision = served.revision
        self._converts = _converted(config.kv_convert, served.kv)
        self._current = RoleIncarnation.new(config.role)
        self.routers = Routers()
        self._signalled = False
        self._told_to_drain = asyncio.Event()
        self._exit = asyncio.Event()
        self._exit_status = 0

    async def serve(self) -> int:
        """Serve until told to stop, and drain. Returns the exit status."""
        loop = asyncio.get_running_loop()

        def on_leaving(node: str) -> None:
            loop.call_soon_threadsafe(self._drain_for, node)

        self._served.cluster.call_on_leaving(on_leaving)
        async with contextlib.AsyncExitStack() as stack:
            drain, switch = await self._start(stack)
            draining = asyncio.create_task(self._drain_when_told(drain, switch), name="drain")
            await self._exit.wait()
            draining.cancel()
            log.info("stopping")
            # A worker that retires must end even if something hangs: nothing else proves that no peer's
            # transfer still writes to its memory.
            status = self._exit_status if self._exit_status in (EXIT_CRASHED, EXIT_RETIRED) else EXIT_HUNG
            end_process_after(MAX_END_S, status)
        return self._exit_status

    def _drain_at_signals(self) -> None:
        """Take signals from the moment on that there may be requests to end. Until then one ends the process
        at once, by its default action: loading blocks for longer than a handler may wait."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """Drain at the first signal, and end at once at the second."""
        if self._signalled:
            log.warning("told to stop twice: ending at once")
            self._end(EXIT_CUT_SHORT)
        self._signalled = True
        self._told_to_drain.set()

    def _drain_for(self, node: str) -> None:
        """Drain because another node was told to stop, which waits for this one."""
        log.info("%s was told to stop: this worker drains", node)
        self._told_to_drain.set()

    async def _drain_when_told(self, drain: Drain, switch: RoleSwitch) -> None:
        await self._told_to_drain.wait()
        if self._config.drain_timeout is not None:
            end_process_after(self._config.drain_timeout + MAX_END_S)
        await switch.stop()
        drained = await drain.run(self._config.drain_timeout)
        self._end(0 if drained else EXIT_CUT_SHORT)

    def _crash(self) -> None:
        self._end(EXIT_CRASHED)

    def _end(self, status: int) -> None:
        if not self._exit.is_set():
            self._exit_status = status
            self._exit.set()

    async def _start(self, stack: contextlib.AsyncExitStack) -> tuple[Drain, RoleSwitch]:
        grpc_wakeups.take_all()
        config, engine = self._config, self._engine
        stack.callback(engine.close)
        with self._clock.phase("connector"):
            ends = await self._served.make_ends(self._crash)
        stack.push_async_callback(ends.close)
        routers = self.routers
        server = make_server(engine.scheduler.limits.max_model_len)
        address = options.join_address(config.advertised_host, self._bind(server))
        registry = CollectorRegistry()
        compatibility = self._compatibility(ends.whole)
        counted = CountedByRole(config.role)
        wiring = self._wiring(address, ends, compatibility, registry)
        prefill = PrefillRole(engine, wiring, routers, self._crash)
        stack.push_async_callback(prefill.links.close)
        decode = DecodeRole(
            engine,
            wiring,
            routers,
            on_retire=lambda: self._end(EXIT_RETIRED),
            on_crash=self._crash,
        )
        hello = self._hello(address, ends.whole, compatibility)
        stages = StageMetrics(registry).of(config.role, config.model_name)
        keys = config.cluster_keys
        service = WorkerService(engine, hello, routers, prefill, decode, keys=keys, stages=stages)
        registry.register(WorkerCollector(counted, service.stats))
        export_identity(registry, lambda: [Identity(counted.role, config.model_name, self._revision)])
        if engine.grammars is not None:
            registry.register(StatsCollector(counted, engine.grammars.stats))
            if self._served.mask_stats is not None:
                registry.register(StatsCollector(counted, self._served.mask_stats))
        engine_loop = EngineLoop(engine, service.on_outputs, self._crash, service.on_start)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        beats = BeatService(routers, keys, BeatMetrics(registry))
        worker_pb2_grpc.add_RouterPulseServicer_to_server(beats, server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(decode, server)
        health = await self._add_health(server)
        try:
            with self._clock.phase("connector"):
                decode.data_addresses = await self._listen(ends)
            decode.takes_over = may_decode(config.role)
            shown = with_vllm_names(registry, config.model_name) if config.vllm_metric_names else registry
            metrics_port = await serve_metrics(config.host, config.metrics_port, shown, stack)
        except OSError as error:
            raise StartError(f"cannot listen on {config.host}: {error}") from error
        engine_loop.start()
        stack.callback(engine_loop.stop)
        self._drain_at_signals()
        await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.callback(routers.close)
        for timer in start_timers(wiring.tasks, service, prefill, decode, self._crash):
            stack.callback(timer.cancel)
        metrics = None
        if metrics_port is not None:
            metrics = options.join_address(config.advertised_host, metrics_port)
        times = self._clock.times()
        registry.register(StartCollector(config.role, times))
        announce(WorkerReady(address, config.role, metrics))
        self._served.cluster.say_serving()
        log.info("%s of %s ready at %s after %s", config.role, config.model_name, address, times)
        parts = _Parts(prefill, decode, service, wiring, hello, registry, counted, stages)
        drain = Drain(service, routers, prefill.links, engine_loop, health)
        switch = RoleSwitch(
            self._current,
            drain,
            lambda current: self._serve_as(current, parts),
            SwitchMetrics(registry),
            keys=keys,
            timeout=config.drain_timeout,
        )
        service.switching = switch
        return drain, switch

    def _serve_as(self, current: RoleIncarnation, parts: _Parts) -> None:
        """Serve in another role under another name. The change takes one turn of the event loop, with nothing
        open and no links, so that no caller sees half of it."""
        for _ in parts.registry.collect():
            pass  # assigns all counts up to now to the old role
        parts.counted.change(current.role)
        parts.stages.role = parts.wiring.metrics.role = current.role
        wiring = replace(parts.wiring, incarnation=current.incarnation)
        parts.prefill.rename(wiring)
        parts.decode.rename(wiring)
        parts.decode.takes_over = may_decode(current.role)
        self._engine.set_mixed_prefill_tokens(self._served.mixed_prefill_tokens(current.role))
        parts.service.greet_anew(self._greeting(parts.hello, current))

    def _greeting(self, hello: worker_pb2.WorkerHello, current: RoleIncarnation) -> worker_pb2.WorkerHello:
        """Return ``hello`` with the fields that depend on the current role."""
        limits = self._engine.scheduler.limits
        greeting = worker_pb2.WorkerHello()
        greeting.CopyFrom(hello)
        greeting.incarnation = current.incarnation
        greeting.role = role_to_proto(current.role)
        greeting.mixed_prefill_tokens = limits.mixed_prefill_tokens or limits.max_num_batched_tokens
        return greeting

    def _wiring(
        self,
        address: str,
        ends: RankEndpoints,
        compatibility: handoff_pb2.Compatibility,
        registry: CollectorRegistry,
    ) -> Wiring:
        return Wiring(
            incarnation=self._current.incarnation,
            address=address,
            ends=ends,
            compatibility=compatibility,
            metrics=HandoffMetrics(registry, self._config.role),
            verify=self._config.verify_handoff,
            converts=self._converts,
            patience_s=self._config.handoff_patience,
            dialer=Dialer(self._config.tls),
            tasks=Supervision(TaskMetrics(registry)),
            keys=self._config.cluster_keys,
        )

    async def _listen(self, ends: RankEndpoints) -> dict[str, list[str]]:
        """Listen for data connections. Returns, for each connector, the address of each rank for peers. A
        prefill worker listens too: it may become a decode worker."""
        elsewhere = self._served.cluster.places
        here = [RankAddress(self._config.host, self._config.advertised_host)] * (
            len(ends.shares) - len(elsewhere)
        )
        told = await ends.listen([*here, *elsewhere], self._config.data_port)
        return {name: list(addresses) for name, addresses in told.items()}

    def _bind(self, server: grpc.aio.Server) -> int:
        wanted = options.join_address(self._config.host, self._config.port)
        try:
            return add_port(server, wanted, self._config.tls)
        except RuntimeError as error:
            raise StartError(f"cannot listen on {wanted}: is the port in use?") from error

    @staticmethod
    async def _add_health(server: grpc.aio.Server) -> HealthServicer:
        servicer = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        for service in (*READY_SERVICES, LIVE_SERVICE):
            await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        return servicer

    def _hello(
        self, address: str, whole: KVShard, compatibility: handoff_pb2.Compatibility
    ) -> worker_pb2.WorkerHello:
        limits, pool = self._engine.scheduler.limits, self._engine.pool
        hello = worker_pb2.WorkerHello(
            model=self._config.model_name,
            revision=self._revision,
            # The router refuses a request that the pool can never hold, with a reason.
            max_model_len=self._engine.scheduler.longest_sequence,
            vocab_size=self._engine.vocab_size,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks // self._engine.layout.num_tables,
            handoff_address=address,
            max_running=limits.max_num_seqs,
            eos_token_ids=sorted(self._engine.eos_token_ids),
            takes_priorities=limits.priority_aging is not None,
            chunk_tokens=min(limits.prefill_chunk, limits.max_num_batched_tokens),
            tells_blocks=limits.prefix_caching,
            longest_shared_prompt=limits.longest_shared_prompt or 0,
            kv_groups=groups_of(self._engine.scheduler.layout),
            kv_cache_dtype=pool.kv_dtype,
            kv_bytes_per_token=self._served.kv.token_bytes(whole),
            compatibility=compatibility_digest(compatibility),
            converts=[] if self._config.verify_handoff else self._converted(compatibility),
            tokenizer=self._served.tokenizer,
            verifies=self._config.verify_handoff,
        )
        return self._greeting(hello, self._current)

    def _converted(self, compatibility: handoff_pb2.Compatibility) -> list[str]:
        """Return the terms of the prefill workers whose KV this worker converts on arrival."""
        return [compatibility_digest(with_kv_dtype(compatibility, each)) for each in self._converts]

    def _compatibility(self, whole: KVShard) -> handoff_pb2.Compatibility:
        kv = self._served.kv
        return handoff_pb2.Compatibility(
            protocol=PROTOCOL,
            model=self._config.model_name,
            revision=self._revision,
            kv_dtype=kv.dtype,
            layout=kv.layout,
            groups=[wire.spec_of(kept, part) for kept, part in zip(kv.groups, whole.groups, strict=True)],
            block_size=self._engine.pool.block_size,
            quantization=self._served.quantization,
            encryption=encryption(self._config.connector, self._config.tls),
        )
