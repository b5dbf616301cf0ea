"""The planner program: a loop beside the ring, with its own metrics and health page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from prometheus_client import CollectorRegistry

from baton.net.channels import Dialer
from baton.planner.config import PlannerConfig
from baton.planner.policy import Planner
from baton.planner.prometheus import Prometheus
from baton.planner.queries import Queries
from baton.planner.scales import Scales
from baton.planner.service import PlannerService
from baton.planner.workers import Workers
from baton.process import logs
from baton.process.options import StartError
from baton.router.discovery.api_server import ApiServer, checked, own_namespace
from baton.router.discovery.kubernetes import KubernetesDiscovery
from baton.telemetry.discovery import DiscoveryCounts
from baton.telemetry.identity import export_identity
from baton.telemetry.planner import PlannerMetrics
from baton.telemetry.serve import serve_metrics
from baton.telemetry.supervision import Supervision
from baton.telemetry.tasks import TaskMetrics

log = logging.getLogger(__name__)


def run(config: PlannerConfig) -> int:
    """Plan until SIGTERM or SIGINT. Returns the exit status.

    Raises StartError, with one line for a person, when there are no credentials or the port cannot be had.
    """
    logs.configure(config.log_level)
    return asyncio.run(_serve(config))


async def _serve(config: PlannerConfig) -> int:
    connect = await checked(config.kubeconfig, config.kubernetes_context)
    namespace = config.kubernetes_namespace or own_namespace() or "default"
    registry = CollectorRegistry()
    metrics = _metrics(config, registry)
    discovery = KubernetesDiscovery(
        ApiServer(connect, namespace, config.kubernetes_selector),
        config.kubernetes_port,
        DiscoveryCounts(registry),
    )
    scales = Scales(
        connect, namespace, {"prefill": config.prefill_deployment, "decode": config.decode_deployment}
    )
    workers = Workers(config.cluster_keys, Dialer(config.worker_tls))
    async with contextlib.AsyncExitStack() as stack:
        prometheus = await stack.enter_async_context(Prometheus(config.prometheus_url))
        stack.push_async_callback(scales.close)
        stack.push_async_callback(workers.close)
        port = await _serve_metrics(config, registry, stack)
        service = PlannerService(
            Planner(config.targets, config.bounds, config.times, switches=config.switching),
            Queries(config.prometheus_selector or f'namespace="{namespace}"'),
            prometheus,
            scales,
            discovery,
            workers,
            metrics,
            config.bounds,
            stale_s=config.times.stale_s,
            dry_run=config.dry_run,
        )
        log.info("planner of %s ready, metrics on port %s", namespace, port)
        tasks = Supervision(TaskMetrics(registry))
        watching = tasks.start("discovery", lambda: discovery.run(service.hear))
        planning = tasks.start("planning", lambda: service.run(config.interval))
        await _until_told(watching, planning)
    return 0


def _metrics(config: PlannerConfig, registry: CollectorRegistry) -> PlannerMetrics:
    export_identity(registry, list)  # no identities: the planner serves no model
    metrics = PlannerMetrics(registry)
    metrics.target.labels("ttft").set(config.targets.ttft_s)
    metrics.target.labels("itl").set(config.targets.itl_s)
    metrics.gpu_budget.set(config.gpu_budget)
    return metrics


async def _serve_metrics(
    config: PlannerConfig, registry: CollectorRegistry, stack: contextlib.AsyncExitStack
) -> int | None:
    try:
        return await serve_metrics(config.host, config.metrics_port, registry, stack)
    except OSError as error:
        raise StartError(f"--metrics-port {config.metrics_port}: {error.strerror or error}") from error


async def _until_told(*tasks: asyncio.Task[None]) -> None:
    """Wait for a signal. Raises the error of a task that ends before, which no task should: Kubernetes then
    restarts the planner."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    waiting = asyncio.create_task(stopping.wait())
    try:
        done, _ = await asyncio.wait((waiting, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:
            task.result()
    finally:
        for task in (waiting, *tasks):
            task.cancel()
        await asyncio.gather(waiting, *tasks, return_exceptions=True)
