"""Rings of real processes, started from a source tree."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from baton.hub import resolve_model
from baton.process import ready
from baton.router.security.keys import entry_line, new_key
from loadtest.hostile.proxy import proxied
from loadtest.hostile.vocabulary import Place, Setup, Target
from loadtest.hostile.wire import free_port, loopback
from loadtest.trees import HERE, python_path
from tests.support import warm
from tests.support.ring import Ring, Service, scrape

STEP_MS = 20.0
PROFILE = {
    "step_base_ms": STEP_MS,
    "step_row_ms": 0,
    "context_ms_per_1k": 0,
    "prefill_ms_per_1k": 20,
    "link_bytes_per_s": 1e9,
}
TENANTS = {
    "acme": "{weight: 1}",
    "bolt": "{weight: 1}",
    "evil": "{weight: 1}",
    "mean": "{weight: 1, requests_per_minute: 1, concurrent_requests: 1}",
    "small": "{weight: 1, tokens_per_minute: 1000}",
}
"""Two honest tenants, a tenant that attacks, and two tenants that attack and have limits."""
HONEST = ("acme", "bolt")
START_S = 300.0
"""The time that a process has to start, in seconds: there may be twenty busy ones beside it."""
_LIMITED = 'ulimit -n "$1" && shift && exec "$@"'


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process that runs the Baton of a source tree."""
    return {**os.environ, "PYTHONPATH": python_path(tree)}


@dataclass
class TreeService(Service):
    """A process of Baton of a source tree."""

    tree: Path = HERE
    cluster_key: str | None = None
    """The cluster key; None: the process gets none."""
    descriptors: int | None = None
    """The limit of open file descriptors, soft and hard."""

    def start(self) -> None:
        given = {**environment(self.tree), **self.environment}
        given.pop("BATON_CLUSTER_KEY", None)
        given.pop(warm.ADDRESS, None)
        if self.cluster_key is not None:
            given["BATON_CLUSTER_KEY"] = self.cluster_key
        argv = [sys.executable, "-m", self.program, *self.argv]
        if self.descriptors is not None:
            argv = ["sh", "-c", _LIMITED, "sh", str(self.descriptors), *argv]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=self.tree,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_ready(self) -> None:
        """Wait until the process is ready. Raises RuntimeError if it ends instead, or takes longer than
        ``START_S``."""
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            super().wait_ready()
        finally:
            timer.cancel()

    def stop(self) -> None:
        """Kill the process: after an attack it need not end well."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Attacked:
    """A running ring, and the target that attackers are told of."""

    router: TreeService
    workers: list[TreeService]
    target: Target


def keys_file(tmp: Path) -> tuple[Path, dict[str, str]]:
    """Write the file of all tenants; return it and the keys. The honest tenants' keys see everything of their
    own only."""
    keys = {name: new_key() for name in TENANTS}
    lines = ["tenants:", *(f"  {name}: {limits}" for name, limits in TENANTS.items())]
    lines += ["keys:", *(entry_line(key, name, name) for name, key in keys.items())]
    path = tmp / "keys.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path, keys


def simulated(
    tmp: Path, name: str, role: str, tree: Path, cluster_key: str | None, *options: str
) -> TreeService:
    """Return a worker without a model, not started."""
    profile = tmp / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    argv: tuple[str, ...] = (
        "worker-sim",
        "--role",
        role,
        "--model",
        "demo",
        "--port",
        "0",
        "--profile",
        str(profile),
    )
    argv = (*argv, "--max-num-seqs", "128", "--num-blocks", "20000", "--max-model-len", "4096", *options)
    return TreeService(name, argv, tmp / f"{name}.log", tree=tree, cluster_key=cluster_key)


def real(tmp: Path, name: str, role: str, tree: Path, cluster_key: str | None, *options: str) -> TreeService:
    """Return a worker with the demo model, not started."""
    argv: tuple[str, ...] = (
        role,
        "--model",
        "demo",
        "--port",
        "0",
        "--max-num-seqs",
        "128",
        "--num-blocks",
        "2000",
    )
    argv = (*argv, "--threads", "1", *options)
    return TreeService(name, argv, tmp / f"{name}.log", tree=tree, cluster_key=cluster_key)


def _with_template(tmp: Path, template: str) -> Path:
    """Make a folder with the demo model's tokenizer and another chat template."""
    folder = tmp / "model"
    folder.mkdir()
    for file in resolve_model("demo", weights=False).glob("*.json"):
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@contextmanager
def running(tmp: Path, tree: Path, setup: Setup) -> Iterator[Attacked]:
    """A router before simulated workers, by ``setup``; all are killed at the end."""
    for name, content in setup.files:
        (tmp / name).write_bytes(content)
    cluster_key = secrets.token_hex(32)
    with ExitStack() as stack:
        workers, ports = _workers(tmp, tree, setup, cluster_key)
        for each in workers:
            each.start()
            stack.callback(each.stop)
        for each in workers:
            each.wait_ready()
        addresses = [_address(each) for each in workers]
        recorded = tmp / "recorded"
        if setup.recorded:
            addresses[0] = stack.enter_context(proxied(addresses[0], recorded)).address
        options = [option.format(tmp=tmp) for option in setup.router]
        keys: dict[str, str] = {}
        if setup.keys:
            file, keys = keys_file(tmp)
            options += ["--api-keys", str(file)]
        flags = [flag for address in addresses for flag in ("--worker", address)]
        model = str(_with_template(tmp, setup.template)) if setup.template else "demo"
        options += ["--served-model-name", "demo"] if setup.template else []
        argv = ("router", "--model", model, "--port", "0", "--grpc-port", "0", *flags)
        argv = (*argv, "--disaggregation", "always", *options)
        router = TreeService("router", argv, tmp / "router.log", tree=tree, cluster_key=cluster_key)
        router.descriptors = setup.descriptors
        router.start()
        stack.callback(router.stop)
        router.wait_ready()
        ring = Ring(router, [*workers])
        _wait_workers(ring.url, 2)
        yield Attacked(router, workers, _target(tmp, setup, router, workers, ports, keys))


def _workers(tmp: Path, tree: Path, setup: Setup, cluster_key: str) -> tuple[list[TreeService], list[int]]:
    """Return the workers, not started, and the ports of their data."""
    named: list[tuple[str, str, tuple[str, ...]]] = [("prefill", "prefill", ()), ("decode", "decode", ())]
    if setup.stranger:
        named.append(("stranger", "both", ("--served-model-name", "another", "--revision", "another")))
    ports = [free_port() for _ in named]
    make = real if setup.real else simulated
    workers = [
        make(tmp, name, role, tree, cluster_key, "--data-port", str(port), *options)
        for (name, role, options), port in zip(named, ports, strict=True)
    ]
    return workers, ports


def _wait_workers(url: str, count: int) -> None:
    """Wait until the router has ``count`` workers. Raises TimeoutError if it does not find them."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        page = scrape(f"{url}/metrics")
        if sum(value for name, value in page.items() if name.startswith("baton_worker_ready")) >= count:
            return
        time.sleep(0.1)
    raise TimeoutError(f"the router does not find its {count} workers")


def _address(worker: Service) -> str:
    assert isinstance(worker.ready, ready.WorkerReady)
    return worker.ready.address


def _target(
    tmp: Path,
    setup: Setup,
    router: Service,
    workers: Sequence[Service],
    ports: Sequence[int],
    keys: dict[str, str],
) -> Target:
    assert isinstance(router.ready, ready.RouterReady)
    assert router.ready.grpc is not None
    places = []
    for worker, port in zip(workers, ports, strict=True):
        assert isinstance(worker.ready, ready.WorkerReady)
        assert worker.ready.metrics is not None
        loopback(worker.ready.address)
        places.append(
            Place(
                name=worker.name,
                role=worker.ready.role,
                grpc=worker.ready.address,
                data=f"127.0.0.1:{port}",
                metrics=worker.ready.metrics,
                log=str(worker.log),
            )
        )
    loopback(router.ready.http)
    return Target(
        http=router.ready.http,
        grpc=router.ready.grpc,
        keys=keys,
        workers=places,
        router_log=str(router.log),
        recorded=str(tmp / "recorded") if setup.recorded else "",
    )
