"""The router program: HTTP and gRPC servers in front of one ring of workers per model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import grpc
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.applications import Starlette

from baton import hub
from baton.grammar.compiler import GrammarStats
from baton.greeting.cluster_key import MIN_BYTES, OPEN_WARNING, suffices
from baton.net import grpc_wakeups, sockets
from baton.net.channels import Dialer, add_port
from baton.net.https import FollowingContext
from baton.process import descriptors, logs, options
from baton.process.ending import MAX_END_S, end_process_after, end_process_in_loop
from baton.process.options import ModelError, StartError
from baton.process.ready import RouterReady, announce
from baton.request.defaults import SamplingDefaults
from baton.router.admission.capacity import Capacity, capacity_of
from baton.router.admission.gate import Gate
from baton.router.admission.queue import QueueBounds
from baton.router.api.audit import AuditLog
from baton.router.api.authentication import Authentication
from baton.router.api.grpc.front import interceptors_for
from baton.router.api.grpc.service import add_services, server_options
from baton.router.api.http.app import app_for
from baton.router.api.http.ops.draining import draining_app
from baton.router.api.http.server.cors import Cors
from baton.router.api.http.server.cut_streams import CutStreams
from baton.router.api.http.server.http_server import HttpServer
from baton.router.api.http.server.local_pages import is_loopback
from baton.router.api.http.server.slots import ConnectionSlots, SlotLimits
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.config import RouterConfig
from baton.router.discovery.api_server import ApiServer, checked, own_namespace
from baton.router.discovery.endpoint import Discovery
from baton.router.discovery.kubernetes import KubernetesDiscovery
from baton.router.discovery.static import StaticDiscovery
from baton.router.dispatch.retries import Retries, RetryPolicy
from baton.router.dispatch.ring import WorkerRing
from baton.router.fleet.expected import ExpectedModel
from baton.router.models_file import each_model
from baton.router.parent import Parent
from baton.router.preparation.frames import ModelSetup
from baton.router.preparation.pool import PreparationPool
from baton.router.processes.gc import collect
from baton.router.processes.siblings import Siblings
from baton.router.processes.slot import ProcessSlot
from baton.router.pulse.turns import Turns
from baton.router.pulse.watch import LoopWatch
from baton.router.security.keys import KeyFile
from baton.router.security.salts import CacheSalts
from baton.router.shared.limits import Tenant
from baton.router.shared.redis_store import RedisStore, connect
from baton.router.shared.state import SharedState
from baton.router.traces.store import Traces
from baton.router.ui.history import History
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.audit import AuditMetrics
from baton.telemetry.discovery import DiscoveryCollector, DiscoveryCounts, DiscoverySource
from baton.telemetry.identity import Identity, export_identity
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.preparation import PreparationMetrics
from baton.telemetry.resumes import ResumeMetrics
from baton.telemetry.ring import RingCollector, RingSource
from baton.telemetry.roles import CountedByRole
from baton.telemetry.shared import SharedStateMetrics
from baton.telemetry.stats_collector import StatsCollector
from baton.telemetry.supervision import Supervision
from baton.telemetry.tasks import TaskMetrics
from baton.telemetry.turns import TurnMetrics
from baton.text.digest import tokenizer_digest
from baton.text.tokenizer import Tokenizer
from baton.tools.formats import reasoning_format, tool_format
from baton.tools.holding import marker_faults

log = logging.getLogger(__name__)

BACKLOG = 2048
LAST_ANSWERS_S = 1
"""The time that open answers, pages of metrics, are given once the drain is over, in seconds."""
KEEP_ALIVE_S = 75
"""The time that idle connections are kept, in seconds. Longer than clients and load balancers keep them
(mostly 60 s): if we closed first, our close could cross a request."""
FORCED_LOOK_S = 0.1
WORKERS_LOOK_S = 0.02
BEAT_S = 1.0


def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT. A router of one process ends here; the parent of several returns its
    exit status.

    Raises StartError, with one line for a person, when the tokenizer cannot be loaded or a port cannot be
    bound.
    """
    logs.configure(config.log_level)
    if not suffices(config.cluster_key):
        log.warning(OPEN_WARNING, MIN_BYTES)
    logging.getLogger("uvicorn.error").addFilter(CutStreams())
    descriptors.raise_limit()
    if config.processes > 1:
        return Parent(config, _serve_place, _listen).run()
    return _serve_place(config, None)


def _serve_place(config: RouterConfig, place: ProcessSlot | None) -> NoReturn:
    """Serve as one process, and end it. ``place``: the process's slot; None if it is the only one."""
    models = [_load(each) for each in each_model(config)]
    uvloop.run(_serve_and_end(config, models, place))
    raise AssertionError("the process has not ended")


async def _serve_and_end(
    config: RouterConfig, models: Sequence[_Model], place: ProcessSlot | None
) -> NoReturn:
    await _serve(config, models, place)
    await end_process_in_loop(0)


class _Model(NamedTuple):
    """The router's own part of a model: no weights."""

    config: RouterConfig
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    expected: ExpectedModel


def _load(config: RouterConfig) -> _Model:
    try:
        path = hub.resolve_model(config.model, weights=False)
    except ModelError as error:
        raise StartError(str(error)) from error
    defaults = SamplingDefaults.of(path, config.generation_config)
    if defaults != SamplingDefaults():
        log.info("%s: requests are taken to ask for %s", config.model_names[0], defaults)
    tokenizer = Tokenizer.from_dir(path)
    for fault in _marker_faults(config, tokenizer):
        log.warning("%s: %s", config.model_names[0], fault)
    # A worker without a configured name names its model as a router without a configured name does.
    names = frozenset((*config.model_names, options.served_name(config.model, None)))
    expected = ExpectedModel(names, tokenizer_digest(path), tokenizer.vocab_size)
    return _Model(config, tokenizer, defaults, expected)


def _marker_faults(config: RouterConfig, tokenizer: Tokenizer) -> list[str]:
    template = tokenizer.chat_template
    return marker_faults(
        tokenizer,
        tool_format(config.tool_call_parser, template.tool_source if template else None),
        reasoning_format(config.reasoning_parser, template.source if template else None),
    )


async def _serve(config: RouterConfig, models: Sequence[_Model], place: ProcessSlot | None) -> None:
    grpc_wakeups.take_all()
    siblings = Siblings(place)
    metrics = RouterMetrics(CollectorRegistry(), config.targets, vllm_names=config.vllm_metric_names)
    tasks = Supervision(TaskMetrics(metrics.registry))
    _count_tasks(metrics.registry)
    _count_restarts(metrics.registry, place)
    configs = [model.config for model in models]
    rings = await _rings(models, metrics.registry, tasks)
    shared = _shared_state(config, rings, metrics.registry, tasks)
    key_file = None if config.api_keys is None else KeyFile(config.api_keys, config.limits)
    authentication = _authentication(config, key_file)
    audit = _audit_log(config, metrics.registry)
    admission = AdmissionMetrics(metrics.registry)
    traces, close_traces = _traces(config)
    pool = _preparation_pool(config, models, metrics.registry)
    services = [
        CompletionService(
            ring,
            model.tokenizer,
            _settings(model),
            metrics,
            shared,
            names=model.config.model_names,
            authentication=authentication,
            gate=_gate(config, ring, shared, admission),
            audit=audit,
            traces=traces,
            salts=CacheSalts(config.cluster_key.encode()),
            elsewhere=pool,
        )
        for ring, model in zip(rings, models, strict=True)
    ]
    metrics.registry.register(StatsCollector(CountedByRole("router"), lambda: _grammar_stats(services)))
    export_identity(metrics.registry, lambda: [_identity(service) for service in services])
    async with contextlib.AsyncExitStack() as stack:
        _watch_loop(metrics.registry, rings, stack)
        if audit is not None:
            stack.callback(audit.close)
            stack.callback(tasks.start("audit log", audit.run).cancel)
        stack.push_async_callback(asyncio.to_thread, close_traces)
        stack.push_async_callback(pool.close)
        await pool.start()
        listener = _listen(config) if place is None else place.listener
        stack.callback(listener.close)
        history = None
        if config.ui:
            named = zip(configs, rings, strict=True)
            sources = [_ring_source(each.model_name, ring) for each, ring in named]
            history = History(metrics, sources, admission, siblings)
            stack.callback(tasks.start("live page", history.run).cancel)
        app = app_for(
            *services,
            cors=_cors(config),
            history=history,
            siblings=siblings,
            local=is_loopback(config.host),
        )
        slots = ConnectionSlots(SlotLimits.of_descriptors(descriptors.raise_limit()), metrics.http)
        http = HttpServer(_http_config(config, app, config.drain_timeout), slots, tasks)
        if key_file is not None:
            stack.callback(tasks.start("keys", key_file.run).cancel)
        await stack.enter_async_context(siblings.listening())
        shared.start()
        stack.push_async_callback(shared.close)
        for ring in rings:
            ring.start()
            stack.push_async_callback(ring.close)
        if place is not None and place.restarts:
            await _until_workers(rings, config.queue_timeout)
        # From now on there may be requests to end. Until now a signal has ended the process at once.
        stopping = _stop_on_signals(http, config.drain_timeout)
        grpc_server, grpc_address = await _serve_grpc(config, services, stack, stopping)
        garbage = partial(collect, lambda: all(ring.idle for ring in rings))
        stack.callback(tasks.start("garbage", garbage).cancel)
        answers_last = draining_app(*services, siblings=siblings)
        last = HttpServer(_http_config(config, answers_last, LAST_ANSWERS_S), slots, tasks)
        serving_last = asyncio.create_task(_serve_last(last, listener.dup(), stopping))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        if place is None:
            announce(RouterReady(sockets.own_address(listener), grpc_address))
        else:
            stack.callback(tasks.start("process beat", partial(_keep_beating, place)).cancel)
            place.tell_ready()
        names = ", ".join(each.model_name for each in configs)
        log.info("router ready at %s for %s", sockets.own_address(listener), names)
        draining = asyncio.create_task(_drain_grpc(grpc_server, stopping, config.drain_timeout))
        await serving
        stopping.set()
        await _unless_forced(draining, http)
        if grpc_server is not None and not draining.done():
            await grpc_server.stop(None)
        await draining
        last.should_exit = True
        await serving_last


def _watch_loop(
    registry: CollectorRegistry, rings: Sequence[WorkerRing], stack: contextlib.AsyncExitStack
) -> None:
    """Measure the turns of the event loop, and send beats to workers during long turns."""
    turns = Turns(TurnMetrics(registry), lambda: all(ring.idle for ring in rings))
    watch = LoopWatch(turns, [ring.beats for ring in rings])
    turns.start()
    stack.callback(turns.stop)
    watch.start()
    stack.callback(watch.stop)


async def _keep_beating(place: ProcessSlot) -> NoReturn:
    while True:
        place.beat()
        await asyncio.sleep(BEAT_S)


async def _until_workers(rings: Sequence[WorkerRing], timeout_s: float) -> None:
    """Wait until workers are connected, for at most ``timeout_s`` seconds. Connections that wait for the
    process which this one replaces must not be refused only because no worker is connected yet."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for ring in rings:
                while True:
                    if ring.ready:
                        break
                    await asyncio.sleep(WORKERS_LOOK_S)


async def _serve_last(server: uvicorn.Server, listener: socket.socket, stopping: asyncio.Event) -> None:
    """Serve connections that come while the router drains. The main server closes its listener first: without
    this one, the last metrics could not be scraped, and liveness probes would fail."""
    with contextlib.closing(listener):
        await stopping.wait()
        await server.serve(sockets=[listener])


async def _unless_forced(draining: asyncio.Task[None], server: uvicorn.Server) -> None:
    """Wait until gRPC's calls have ended, or a second signal has come."""
    while not (draining.done() or server.force_exit):
        await asyncio.wait((draining,), timeout=FORCED_LOOK_S)


async def _drain_grpc(server: grpc.aio.Server | None, stopping: asyncio.Event, timeout_s: float) -> None:
    """Drain gRPC when the process is told to stop, together with HTTP and not after it: a channel that is not
    closed would go on to send calls here."""
    await stopping.wait()
    if server is not None:
        await server.stop(timeout_s)


def _audit_log(config: RouterConfig, registry: CollectorRegistry) -> AuditLog | None:
    metrics = AuditMetrics(registry)
    if config.audit_log is None:
        return None
    return AuditLog(
        config.audit_log,
        prompts=config.log_prompts,
        required=config.audit_log_required,
        metrics=metrics,
    )


def _traces(config: RouterConfig) -> tuple[Traces, Callable[[], None]]:
    """Return the store of traces, and the function that closes its exporter. Raises StartError."""
    kept = config.trace_requests, config.trace_memory
    if config.otlp_endpoint is None:
        return Traces(*kept), lambda: None
    try:
        from baton.router.traces.otlp import Exporter
    except ImportError:
        raise StartError("--otlp-endpoint needs OpenTelemetry: pip install 'baton[otel]'") from None
    exporter = Exporter.to(config.otlp_endpoint)
    return Traces(*kept, exporter.on_end, config.trace_sample), exporter.close


def _count_tasks(registry: CollectorRegistry) -> None:
    """Export the number of tasks, which grows if tasks never end."""
    tasks = Gauge("baton_router_tasks", "Tasks of the router's event loop.", registry=registry)
    loop = asyncio.get_running_loop()
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


def _count_restarts(registry: CollectorRegistry, place: ProcessSlot | None) -> None:
    restarts = Counter(
        "baton_router_process_restarts",
        "Times that this process took the place of one that died.",
        registry=registry,
    )
    restarts.inc(0 if place is None else place.restarts)


async def _rings(
    models: Sequence[_Model], registry: CollectorRegistry, tasks: Supervision
) -> list[WorkerRing]:
    """Return a ring for each model. Counts are of all rings together; gauges of workers are of each ring."""
    counts, resumes = DiscoveryCounts(registry), ResumeMetrics(registry)
    rings = [
        WorkerRing(
            await discovery_for(config, counts),
            config.model_name,
            config.cluster_keys,
            retries=Retries(
                RetryPolicy(max_attempts=config.max_attempts, queue_timeout=config.queue_timeout)
            ),
            metrics=resumes,
            placement=config.placement,
            max_staleness_s=config.discovery_max_staleness or math.inf,
            dialer=Dialer(config.worker_tls),
            tasks=tasks,
            expected=expected,
        )
        for config, _, _, expected in models
    ]
    named = [(model.config.model_name, ring) for model, ring in zip(models, rings, strict=True)]
    registry.register(RingCollector([_ring_source(name, ring) for name, ring in named]))
    registry.register(DiscoveryCollector([_discovery_source(name, ring) for name, ring in named]))
    return rings


def _ring_source(name: str, ring: WorkerRing) -> RingSource:
    return RingSource(
        name,
        ring.fleet.loads,
        lambda: ring.fleet.members.ejections,
        lambda: ring.handoffs,
        ring.open_handoffs,
        ring.unlinked_pairs,
    )


def _discovery_source(name: str, ring: WorkerRing) -> DiscoverySource:
    return DiscoverySource(name, lambda: ring.fleet.discovery.staleness_s, ring.fleet.members.endpoints)


def _grammar_stats(services: Sequence[CompletionService]) -> GrammarStats:
    return sum((service.grammars.stats() for service in services), GrammarStats())


def _identity(service: CompletionService) -> Identity:
    model = service.ring.model
    return Identity("router", service.names[0], "" if model is None else model.revision)


def _settings(model: _Model) -> ApiSettings:
    config = model.config
    return ApiSettings(
        defaults=model.defaults,
        max_body_bytes=config.max_body_bytes,
        max_n=config.max_n,
        max_choices=max(config.max_n, ApiSettings().max_choices),
        max_stop_strings=config.max_stop_strings,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        max_stream_backlog=config.max_stream_backlog,
        slow_client_seconds=config.slow_client_timeout,
    )


def _preparation_pool(
    config: RouterConfig, models: Sequence[_Model], registry: CollectorRegistry
) -> PreparationPool:
    """Return the pool that reads large bodies and chats. The processes of one router share the machine's
    cores."""
    setups = [
        ModelSetup(str(model.tokenizer.directory), _settings(model), model.config.model_names[0])
        for model in models
    ]
    return PreparationPool(
        setups,
        PreparationMetrics(registry),
        shared=config.api_keys is not None,
        cores=(os.cpu_count() or 1) // config.processes,
    )


def _cors(config: RouterConfig) -> Cors:
    return Cors(
        config.allowed_origins, config.allow_credentials, config.allowed_methods, config.allowed_headers
    )


def _shared_state(
    config: RouterConfig, rings: Sequence[WorkerRing], registry: CollectorRegistry, tasks: Supervision
) -> SharedState:
    store = None
    if config.redis_url is not None:
        timeout_s = config.redis_timeout_ms / 1e3
        store = RedisStore(connect(config.redis_url, config.redis_password_file, timeout_s), timeout_s)

    def mine() -> dict[str, tuple[int, int]]:
        return {
            address: count for ring in rings for address, count in ring.fleet.members.unreported().items()
        }

    def elsewhere(reservations: Mapping[str, tuple[int, int]]) -> None:
        for ring in rings:
            ring.fleet.members.note_elsewhere(reservations)

    return SharedState(
        store,
        SharedStateMetrics(registry),
        mine=mine,
        elsewhere=elsewhere,
        replicas=config.processes,
        tasks=tasks,
    )


def _gate(config: RouterConfig, ring: WorkerRing, shared: SharedState, metrics: AdmissionMetrics) -> Gate:
    bounds = QueueBounds(
        requests=config.queue_size,
        prompt_tokens=config.queue_tokens,
        max_wait_s=config.max_queue_wait,
        shared=config.api_keys is not None,
    )

    def capacity() -> Capacity | None:
        if config.max_inflight is not None:
            return Capacity(config.max_inflight)
        return capacity_of(ring.fleet.workers, shared.replicas)

    return Gate(bounds, capacity, metrics)


def _authentication(config: RouterConfig, keys: KeyFile | None) -> Authentication:
    return Authentication(None if keys is None else keys.find, Tenant(limits=config.limits))


def _http_config(config: RouterConfig, app: Starlette, drain_timeout: int) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="none",
        ws="none",
        timeout_graceful_shutdown=drain_timeout,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    settings.load()
    if config.client_tls is not None:
        settings.ssl = FollowingContext(config.client_tls)  # uvicorn's context would not follow the files
    return settings


def _listen(config: RouterConfig, together: bool = False) -> socket.socket:
    """Open the HTTP listener. ``together``: share the port with other listeners, between which the system
    distributes connections."""
    try:
        listener = sockets.listen(config.host, config.port, backlog=BACKLOG, reuse_port=together)
    except OSError as error:
        where = options.join_address(config.host, config.port)
        raise StartError(f"cannot listen on {where}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Bytes that the peer does not acknowledge for so long end a connection, even if all of a document is
        # in the kernel's buffer by then.
        patience_ms = round(config.slow_client_timeout * 1e3)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
    return listener


async def _serve_grpc(
    config: RouterConfig,
    services: Sequence[CompletionService],
    stack: contextlib.AsyncExitStack,
    stopping: asyncio.Event,
) -> tuple[grpc.aio.Server | None, str | None]:
    """Start the gRPC server, if configured. Returns the server and its address, or None twice."""
    if config.grpc_port < 0:
        return None, None
    # A second router on a port in use must fail to start, not share the port. With several processes, their
    # parent ensures that.
    server = grpc.aio.server(
        interceptors=interceptors_for(*services),
        options=[*server_options(services[0].settings), ("grpc.so_reuseport", config.processes > 1)],
    )
    add_services(server, *services, stopping=stopping)
    where = options.join_address(config.host, config.grpc_port)
    try:
        port = add_port(server, where, config.client_tls)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {where}: is the port in use?") from error
    await server.start()
    stack.push_async_callback(server.stop, None)
    return server, options.join_address(config.host, port)


def _stop_on_signals(server: HttpServer, drain_timeout_s: float) -> asyncio.Event:
    """Stop at SIGTERM or SIGINT. Returns an event that is set at the first signal. From then on the process
    ends within its drain timeout, even if something hangs."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        # A second signal ends streams that are still open.
        server.force_exit = server.should_exit
        server.should_exit = True
        end_process_after(MAX_END_S if server.force_exit else drain_timeout_s + MAX_END_S)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


async def discovery_for(config: RouterConfig, counts: DiscoveryCounts) -> Discovery:
    """Return the discovery that ``--discovery`` names. ``counts``: the metrics that it updates.

    Raises StartError when there are no credentials. The API server is not called yet: a router that starts
    while it is down must serve when it is back.
    """
    if config.discovery == "static":
        return StaticDiscovery(config.workers)
    connect = await checked(config.kubeconfig, config.kubernetes_context)
    namespace = config.kubernetes_namespace or own_namespace() or "default"
    api = ApiServer(connect, namespace, config.kubernetes_selector)
    return KubernetesDiscovery(api, config.kubernetes_port, counts)
