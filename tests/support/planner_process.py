"""The planner's program before a running ring, on an API server of its own that knows the ring's workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import yaml
from aiohttp import web

from baton.process.ready import WorkerReady
from tests.support.fake_kubernetes import NAMESPACE, PORT_NAME, FakeKubernetes, pod
from tests.support.planner_world import FakeScales
from tests.support.release import kubeconfig
from tests.support.ring import Ring, Service

SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
SCALE = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{{name}}/scale"
TARGETS = ("--ttft-target-ms", "2000", "--itl-target-ms", "50", "--gpu-budget", "8")


@contextmanager
def running_planner(
    tmp: Path, ring: Ring, prometheus_url: str, metrics_port: int, selector: str
) -> Iterator[None]:
    """A dry run, with ``selector`` for the ring's series at Prometheus."""
    with _api_server(ring) as url:
        credentials = tmp / "kubeconfig"
        credentials.write_text(yaml.safe_dump(kubeconfig(url)))
        argv = (
            *("planner", "--dry-run", "--interval", "1", *TARGETS),
            *("--prometheus-url", prometheus_url, "--prometheus-selector", selector),
            *("--kubernetes-namespace", NAMESPACE, "--kubeconfig", str(credentials)),
            *("--metrics-port", str(metrics_port)),
        )
        planner = Service("planner", argv, tmp / "planner.log")
        planner.start()
        try:
            yield
        finally:
            planner.stop()


@contextmanager
def _api_server(ring: Ring) -> Iterator[str]:
    """EndpointSlices with the workers, and a scale for each role. Yields its URL."""
    slices, roles = FakeKubernetes(), []
    for service in ring.workers:
        assert isinstance(service.ready, WorkerReady)
        host, _, port = service.ready.address.rpartition(":")
        ports = [{"name": PORT_NAME, "port": int(port)}]
        slices.put(service.name, [pod(host, uid=service.name)], service.ready.role, ports=ports)
        roles.append(service.ready.role)
    scales = FakeScales(roles.count("prefill"), roles.count("decode"))
    app = web.Application()
    app.router.add_get(SLICES, slices.get)
    app.router.add_get(SCALE, scales.get)
    started: Future[tuple[str, Callable[[], object]]] = Future()
    serving = threading.Thread(target=lambda: asyncio.run(_serve(app, started)), name="api server")
    serving.start()
    url, stop = started.result(10)
    try:
        yield url
    finally:
        stop()
        serving.join()


async def _serve(app: web.Application, started: Future[tuple[str, Callable[[], object]]]) -> None:
    """Until the second of what ``started`` is given is called; the first is the URL."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    started.set_result((url, lambda: loop.call_soon_threadsafe(stopping.set)))
    await stopping.wait()
    await runner.cleanup()
