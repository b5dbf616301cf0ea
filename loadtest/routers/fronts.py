"""The routers that are compared, each started before the same workers."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from baton.process import ready
from loadtest.routers.fleet import NOTHING_MORE, ROUTER_CORE, FakeWorkers, free_port, on_core, plain_urls
from tests.support.ring import Service, running_routers, scrape

START_S = 120.0


@dataclass(frozen=True)
class Front:
    """A router that is up."""

    name: str
    urls: tuple[str, ...]
    pids: tuple[int, ...]
    """The process ids of the router, whose children count too."""
    path: str = "/v1/completions"
    model: str = "demo"
    headers: tuple[tuple[str, str], ...] = ()


@contextmanager
def baton(tmp: Path, fleet: Sequence[Service], *options: str) -> Iterator[Front]:
    with on_core(ROUTER_CORE), running_routers(tmp, "demo", {"baton": fleet}, options) as rings:
        router = rings["baton"].router
        assert isinstance(router.ready, ready.RouterReady)
        yield Front("Baton", (f"http://{router.ready.http}",), (router.process.pid,))


@contextmanager
def baton_before(
    tmp: Path,
    addresses: Sequence[str],
    *,
    confined: bool,
    environment: Mapping[str, str] = NOTHING_MORE,
) -> Iterator[Front]:
    """Start Baton's router before these workers. ``confined``: to its core. ``environment``: its own, beside
    ours."""
    flags = [flag for address in addresses for flag in ("--worker", address)]
    argv = ("router", "--model", "demo", "--port", "0", "--grpc-port", "0", *flags)
    router = Service("baton", argv, tmp / "baton.log", environment=environment)
    with on_core(ROUTER_CORE) if confined else nullcontext():
        router.start()
    try:
        router.wait_ready()
        assert isinstance(router.ready, ready.RouterReady)
        url = f"http://{router.ready.http}"
        deadline = time.monotonic() + START_S
        while _workers_ready(url) < len(addresses):
            if time.monotonic() > deadline:
                raise TimeoutError("the router does not find all workers")
            time.sleep(0.2)
        yield Front("Baton", (url,), (router.process.pid,))
    finally:
        router.stop()


def _workers_ready(url: str) -> float:
    page = scrape(f"{url}/metrics")
    return sum(value for name, value in page.items() if name.startswith("baton_worker_ready"))


def none(fake_workers: FakeWorkers) -> Front:
    """Return no router: the client is dealt out to the workers themselves."""
    return Front("no router", fake_workers.urls, ())


@contextmanager
def litellm(tmp: Path, fleet: Sequence[Service], peers: Path) -> Iterator[Front]:
    """Start LiteLLM: one process, passing text completions on in turns, with nothing kept of them."""
    lines = ["model_list:"]
    for url in plain_urls(fleet):
        lines += [
            "  - model_name: demo",
            "    litellm_params:",
            "      model: text-completion-openai/demo",
            f"      api_base: {url}/v1",
            "      api_key: none",
        ]
    lines += ["litellm_settings:", "  telemetry: false", "  num_retries: 0", "  request_timeout: 600"]
    lines += ["router_settings:", "  routing_strategy: simple-shuffle"]
    config = tmp / "litellm.yaml"
    config.write_text("\n".join(lines) + "\n")
    port = free_port()
    argv = [
        str(peers / "bin" / "litellm"),
        "--config",
        str(config),
        "--port",
        str(port),
        "--num_workers",
        "1",
    ]
    with _running(tmp, "litellm", argv, f"http://127.0.0.1:{port}", "/health/liveliness") as pid:
        yield Front("LiteLLM proxy", (f"http://127.0.0.1:{port}",), (pid,))


@contextmanager
def vllm_router(tmp: Path, fleet: Sequence[Service], peers: Path) -> Iterator[Front]:
    """Start vLLM's gateway in Rust, which deals requests out in turns."""
    port, metrics = free_port(), free_port()
    argv = [
        str(peers / "bin" / "vllm-router"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
        *("--policy", "round_robin", "--log-level", "error", "--max-concurrent-requests", "10000"),
        *("--worker-urls", *plain_urls(fleet)),
    ]
    with _running(tmp, "vllm-router", argv, f"http://127.0.0.1:{port}", "/health") as pid:
        yield Front("vllm-router (Rust)", (f"http://127.0.0.1:{port}",), (pid,))


@contextmanager
def _running(tmp: Path, name: str, argv: Sequence[str], url: str, health: str) -> Iterator[int]:
    quiet = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # Baton asks for no key here either
        "TOKIO_WORKER_THREADS": "1",
        "PYTHONPATH": "",
    }
    with (tmp / f"{name}.log").open("a") as log, on_core(ROUTER_CORE):
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **quiet})
    try:
        _wait(process, url + health, tmp / f"{name}.log")
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer:\n{log.read_text()[-3000:]}")
