"""The worker program: one process, any role. What computes is given: this imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client import CollectorRegistry

from baton import options, wakeups
from baton.connector.choice import encryption
from baton.connector.identity import PROTOCOL, compatibility_digest
from baton.connector.liveness import NO_PROBES
from baton.connector.ranks.end import Place
from baton.connector.ranks.ends import Ends
from baton.connector.ranks.share import Share
from baton.connector.wiring import Wiring
from baton.decode.role import DecodeRole
from baton.decoding import DecodingInterceptor
from baton.engine.engine import Engine
from baton.nodes.others import Nobody, Others
from baton.options import StartError
from baton.prefill.role import PrefillRole
from baton.ready import WorkerReady, announce
from baton.supervision import Supervision
from baton.telemetry.grammar import GrammarCollector, MaskStats
from baton.telemetry.handoff import HandoffMetrics
from baton.telemetry.identity import Identity, export_identity
from baton.telemetry.roles import CountedByRole
from baton.telemetry.stages import StageMetrics, Stages
from baton.telemetry.startup import StartClock, StartCollector
from baton.telemetry.switches import SwitchMetrics
from baton.telemetry.tasks import TaskMetrics
from baton.telemetry.vllm import with_vllm_names
from baton.telemetry.worker import WorkerCollector, serve_metrics
from baton.tls.channels import Dialer, add_port
from baton.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.worker.config import RoleName, WorkerConfig
from baton.worker.drain import LIVE_SERVICE, READY_SERVICES, Drain
from baton.worker.engine_loop import EngineLoop
from baton.worker.post import Post
from baton.worker.role_switch import RoleSwitch
from baton.worker.routers import Routers
from baton.worker.service import WorkerService
from baton.worker.switch_request import TO_PROTO

log = logging.getLogger(__name__)

EXIT_CUT_SHORT = 1
"""Told to end at once, or --drain-timeout ran out, while something was open."""
EXIT_CRASHED = 70
EXIT_RETIRED = 75
STOP_GRACE_S = 1.0
LONGEST_END_S = 5.0
"""Whatever hangs: a worker that retires must end, as nothing else proves that its memory is quiet."""

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    *NO_PROBES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A router that was given up while it read nothing: its stream ends with its connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A second worker on a port in use must fail to start, not share it.
    ("grpc.so_reuseport", 0),
)


def end_process(status: int) -> NoReturn:
    """The end, once everything is closed. The interpreter is not taken down: threads of UCX, gloo and NCCL
    outlive what they served, and one of them that is still at work then ends the process with a signal
    (SIGABRT seen with gloo, SIGSEGV with UCX)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_process_after(seconds: float, status: int) -> None:
    """End without waiting for anyone, unless the process has ended in order by then."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def start_timers(
    tasks: Supervision,
    service: WorkerService,
    prefill: PrefillRole,
    decode: DecodeRole,
    on_crash: Callable[[], None],
) -> Sequence[asyncio.Task[None]]:
    """What a worker does as time goes by.

    An error in the timers of a handoff ends the worker: what they were about to resend, give up or free would
    hold its pages, and nobody would know. After one in those of the requests, which only report and cancel,
    they go on.
    """
    return (
        tasks.start("request timers", service.run_timers),
        tasks.start("prefill timers", prefill.run_timers, on_failure=on_crash),
        tasks.start("decode timers", decode.run_timers, on_failure=on_crash),
    )


@dataclass(frozen=True, slots=True)
class KVForm:
    """What the KV of one head of one layer looks like."""

    layout: str
    dtype: str
    element_bytes: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Served:
    """What a worker serves, and what computes it."""

    engine: Engine
    revision: str
    """Of the model."""
    kv: KVForm
    make_ends: Callable[[Callable[[], None]], Awaitable[Ends]]
    """Its ends of all links. What it is given is called when a thread of theirs met what it did not expect.
    May raise StartError."""
    mixed_prefill_tokens: Callable[[RoleName], int | None]
    """What a role makes of ``SchedulerLimits.mixed_prefill_tokens``."""
    mask_stats: Callable[[], MaskStats] | None = None
    others: Others = field(default_factory=Nobody)
    """The nodes that its ranks are on."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Those of a worker that are told of its role."""

    prefill: PrefillRole
    decode: DecodeRole
    service: WorkerService
    wiring: Wiring
    hello: worker_pb2.WorkerHello
    """The first one."""
    registry: CollectorRegistry
    counted: CountedByRole
    stages: Stages


class Worker:
    """A loaded engine and everything that serves it."""

    def __init__(self, config: WorkerConfig, served: Served, clock: StartClock) -> None:
        self._config = config
        self._clock = clock
        self._served = served
        self._engine = served.engine
        self._revision = served.revision
        self._post = Post.new(config.role)
        self.routers = Routers()
        self._signalled = False
        self._told_to_drain = asyncio.Event()
        self._exit = asyncio.Event()
        self._exit_status = 0

    async def serve(self) -> int:
        """Serve until told to stop, and drain; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

        def on_leaving(node: str) -> None:
            loop.call_soon_threadsafe(self._drain_for, node)

        self._served.others.call_on_leaving(on_leaving)
        async with contextlib.AsyncExitStack() as stack:
            drain, switch = await self._start(stack)
            draining = asyncio.create_task(self._drain_when_told(drain, switch), name="drain")
            await self._exit.wait()
            draining.cancel()
            log.info("stopping")
            end_process_after(LONGEST_END_S, self._exit_status)
        return self._exit_status

    def _on_signal(self) -> None:
        """The first signal starts the drain, the second ends the worker at once."""
        if self._signalled:
            log.warning("told to stop twice: ending at once")
            self._end(EXIT_CUT_SHORT)
        self._signalled = True
        self._told_to_drain.set()

    def _drain_for(self, node: str) -> None:
        """Another node was told to stop, which waits for this one."""
        log.info("%s was told to stop: this worker drains", node)
        self._told_to_drain.set()

    async def _drain_when_told(self, drain: Drain, switch: RoleSwitch) -> None:
        await self._told_to_drain.wait()
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
        wakeups.take_all()
        config, engine = self._config, self._engine
        stack.callback(engine.close)
        with self._clock.phase("connector"):
            ends = await self._served.make_ends(self._crash)
        stack.push_async_callback(ends.close)
        routers = self.routers
        server = grpc.aio.server(interceptors=[DecodingInterceptor()], options=_SERVER_OPTIONS)
        address = options.join_address(config.advertised_host, self._bind(server))
        registry = CollectorRegistry()
        compatibility = self._compatibility(ends.whole)
        counted = CountedByRole(config.role)
        wiring = self._wiring(address, ends, compatibility, registry)
        prefill = PrefillRole(engine, wiring, routers, self._crash)
        stack.push_async_callback(prefill.close)
        decode = DecodeRole(
            engine,
            wiring,
            config.cluster_key.encode(),
            routers,
            on_retire=lambda: self._end(EXIT_RETIRED),
            on_crash=self._crash,
        )
        hello = self._hello(address, ends.whole, compatibility)
        stages = StageMetrics(registry).of(config.role, config.model_name)
        service = WorkerService(engine, hello, routers, prefill, decode, stages=stages)
        registry.register(WorkerCollector(counted, service.stats))
        export_identity(registry, lambda: [Identity(counted.role, config.model_name, self._revision)])
        if engine.grammars is not None:
            masks = self._served.mask_stats
            registry.register(GrammarCollector(counted, engine.grammars.stats, masks))
        engine_loop = EngineLoop(engine, service.on_outputs, self._crash, service.on_start)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(decode, server)
        health = await self._add_health(server)
        try:
            with self._clock.phase("connector"):
                decode.data_addresses = await self._listen(ends)
            decode.takes_over = config.role != "prefill"
            shown = with_vllm_names(registry, config.model_name) if config.vllm_metric_names else registry
            metrics_port = await serve_metrics(config.host, config.metrics_port, shown, stack)
        except OSError as error:
            raise StartError(f"cannot listen on {config.host}: {error}") from error
        engine_loop.start()
        stack.callback(engine_loop.stop)
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
        self._served.others.say_serving()
        log.info("%s of %s ready at %s after %s", config.role, config.model_name, address, times)
        parts = _Parts(prefill, decode, service, wiring, hello, registry, counted, stages)
        drain = Drain(service, engine_loop, health)
        switch = RoleSwitch(
            self._post,
            drain,
            lambda post: self._take_post(post, parts),
            SwitchMetrics(registry),
            cluster_key=config.cluster_key.encode(),
            timeout=config.drain_timeout,
        )
        service.switching = switch
        return drain, switch

    def _take_post(self, post: Post, parts: _Parts) -> None:
        """Serve in another role under another name: in one turn of the event loop, in which nothing is open
        and no link is there, so that nobody sees half of it."""
        for _ in parts.registry.collect():
            pass  # what was counted up to now was counted in the old role
        parts.counted.change(post.role)
        parts.stages.role = parts.wiring.metrics.role = post.role
        wiring = replace(parts.wiring, incarnation=post.incarnation)
        parts.prefill.rename(wiring)
        parts.decode.rename(wiring)
        parts.decode.takes_over = post.role != "prefill"
        self._engine.mix(self._served.mixed_prefill_tokens(post.role))
        parts.service.greet_anew(self._greeting(parts.hello, post))

    def _greeting(self, hello: worker_pb2.WorkerHello, post: Post) -> worker_pb2.WorkerHello:
        """``hello``, with what hangs on the post."""
        limits = self._engine.scheduler.limits
        greeting = worker_pb2.WorkerHello()
        greeting.CopyFrom(hello)
        greeting.incarnation = post.incarnation
        greeting.role = TO_PROTO[post.role]
        greeting.mixed_prefill_tokens = limits.mixed_prefill_tokens or limits.max_num_batched_tokens
        return greeting

    def _wiring(
        self,
        address: str,
        ends: Ends,
        compatibility: handoff_pb2.Compatibility,
        registry: CollectorRegistry,
    ) -> Wiring:
        return Wiring(
            incarnation=self._post.incarnation,
            address=address,
            ends=ends,
            compatibility=compatibility,
            metrics=HandoffMetrics(registry, self._config.role),
            verify=self._config.verify_handoff,
            patience_s=self._config.handoff_patience,
            dialer=Dialer(self._config.tls),
            tasks=Supervision(TaskMetrics(registry)),
        )

    async def _listen(self, ends: Ends) -> dict[str, list[str]]:
        """Connector → the address of each rank to hand to peers. A worker that prefills is not called, but
        may come to decode."""
        elsewhere = self._served.others.places
        here = [Place(self._config.host, self._config.advertised_host)] * (len(ends.shares) - len(elsewhere))
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
        self, address: str, whole: Share, compatibility: handoff_pb2.Compatibility
    ) -> worker_pb2.WorkerHello:
        limits, pool = self._engine.scheduler.limits, self._engine.pool
        kv = self._served.kv
        head_bytes = 2 * kv.head_dim * kv.element_bytes  # K and V of one head of one layer
        hello = worker_pb2.WorkerHello(
            model=self._config.model_name,
            revision=self._revision,
            # A request that the pool can never hold is better refused by the router, with a reason.
            max_model_len=min(limits.max_model_len, pool.num_blocks * pool.block_size),
            vocab_size=self._engine.vocab_size,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            handoff_address=address,
            max_running=limits.max_num_seqs,
            eos_token_ids=sorted(self._engine.eos_token_ids),
            takes_priorities=limits.priority_aging is not None,
            chunk_tokens=min(limits.prefill_chunk, limits.max_num_batched_tokens),
            tells_blocks=limits.prefix_caching,
            longest_shared_prompt=limits.longest_shared_prompt or 0,
            kv_bytes_per_token=len(whole.heads) * len(whole.layers) * head_bytes,
            compatibility=compatibility_digest(compatibility),
        )
        return self._greeting(hello, self._post)

    def _compatibility(self, whole: Share) -> handoff_pb2.Compatibility:
        kv = self._served.kv
        return handoff_pb2.Compatibility(
            protocol=PROTOCOL,
            model=self._config.model_name,
            revision=self._revision,
            kv_dtype=kv.dtype,
            layout=kv.layout,
            num_kv_heads=len(whole.heads),
            num_layers=len(whole.layers),
            head_dim=kv.head_dim,
            block_size=self._engine.pool.block_size,
            quantization="" if self._config.quantization == "none" else self._config.quantization,
            encryption=encryption(self._config.connector, self._config.tls),
        )
