"""Rings of real processes over real sockets, for end-to-end tests and measurements."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.process import ready
from tests.support import warm
from tests.support.warm import WarmProcess

START_S = 480.0
PORT_TRIES = 20
PORT_PAUSE_S = 0.5
CLUSTER_KEY = "the cluster key of tests"
SMALL = "64MiB"
"""Of KV blocks: a worker of tests does not spend its start on clearing the gibibyte of the default."""


@dataclass
class Service:
    """One Baton process. ``restart`` starts it again on the same addresses."""

    name: str
    argv: tuple[str, ...]
    log: Path
    program: str = "baton"
    """The module to run: Baton, or something that makes a fault of it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | WarmProcess = field(init=False)
    ready: ready.WorkerReady | ready.RouterReady = field(init=False)

    def start(self) -> None:
        environment = {**os.environ, "BATON_CLUSTER_KEY": CLUSTER_KEY, **self.environment}
        address = environment.pop(warm.ADDRESS, None)
        with self.log.open("a") as log:
            if address is not None and self.program == "baton":
                argv = (self.program, *self.argv)
                self.process = warm.WarmProcess(address, argv, environment, log.fileno())
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.program, *self.argv],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
                env=environment,
            )

    def wait_ready(self) -> None:
        """Until it says that it is. It is started again while somebody else has its port: an outgoing
        connection may be given that of a worker that is dead."""
        for _ in range(PORT_TRIES):
            if self._said_ready():
                return
            status, log = self.process.wait(), self.log.read_text()
            if "in use" not in log.rstrip().rpartition("\n")[2]:
                break
            time.sleep(PORT_PAUSE_S)
            self.start()
        raise RuntimeError(f"{self.name} ended with {status}:\n{log}")

    def _said_ready(self) -> bool:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = ready.parse(line)
            if isinstance(message, ready.WorkerReady | ready.RouterReady):
                self.ready = message
                if isinstance(message, ready.WorkerReady):
                    self._keep_port(message.address.rpartition(":")[2])
                return True
        return False

    def _keep_port(self, port: str) -> None:
        """For the next start."""
        at = self.argv.index("--port") + 1
        self.argv = (*self.argv[:at], port, *self.argv[at + 1 :])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the end of the process."""
        self.process.send_signal(number)
        self.process.wait(30)

    def freeze(self) -> None:
        """SIGSTOP, and proof that it took effect."""
        self.process.send_signal(signal.SIGSTOP)
        for _ in range(200):
            if Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
                return
            time.sleep(0.005)
        raise RuntimeError(f"{self.name} was not stopped by SIGSTOP")

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def restart(self) -> None:
        """Start the process again where it was."""
        self.stop()
        self.start()
        self.wait_ready()

    def metrics(self) -> dict[str, float]:
        """This worker's own metrics: name with labels → value."""
        assert isinstance(self.ready, ready.WorkerReady)
        return scrape(f"http://{self.ready.metrics}/metrics")

    def handoffs(self) -> list[dict[str, float]]:
        """This worker's own account of each handoff that went through, in order: stage → when, on the host's
        monotonic clock. With ``--log-level debug`` only."""
        lines = re.findall(r"handoff (\{.*\})$", self.log.read_text(), re.MULTILINE)
        return [json.loads(line)["at"] for line in lines]

    def blocks(self) -> dict[str, int]:
        """KV blocks by state: free, cached, held."""
        found: dict[str, int] = {}
        for name, value in self.metrics().items():
            match = re.fullmatch(r'baton_kv_blocks\{.*state="(\w+)".*\}', name)
            if match:
                found[match[1]] = int(value)
        return found


@dataclass
class Ring:
    """A router and its workers."""

    router: Service
    workers: list[Service]
    processes: int = 1
    """Of the router."""

    @property
    def url(self) -> str:
        assert isinstance(self.router.ready, ready.RouterReady)
        return f"http://{self.router.ready.http}"

    @property
    def grpc(self) -> str:
        assert isinstance(self.router.ready, ready.RouterReady)
        assert self.router.ready.grpc is not None
        return self.router.ready.grpc

    def of_role(self, role: str) -> list[Service]:
        return [w for w in self.workers if isinstance(w.ready, ready.WorkerReady) and w.ready.role == role]

    def wait_workers(self, timeout_s: float = 30.0) -> None:
        """Wait until the router is connected to every worker."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            up = [v for k, v in scrape(f"{self.url}/metrics").items() if k.startswith("baton_worker_ready")]
            if len(up) == len(self.workers) * self.processes and all(up):
                return
            time.sleep(0.05)
        raise TimeoutError(f"not every worker is ready after {timeout_s} s")

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until no worker holds a block for anyone; AssertionError with the account otherwise."""
        deadline = time.monotonic() + timeout_s
        accounts: dict[str, dict[str, int]] = {}
        while time.monotonic() < deadline:
            accounts = {w.name: w.blocks() for w in self.workers}
            if all(account["held"] == 0 for account in accounts.values()):
                return
            time.sleep(0.05)
        raise AssertionError(f"blocks are still held after {timeout_s} s: {accounts}")


def scrape(url: str) -> dict[str, float]:
    """Every sample of a Prometheus page."""
    with urllib.request.urlopen(url, timeout=60) as response:
        lines = response.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def worker(
    tmp: Path,
    name: str,
    role: str,
    model: str,
    *options: str,
    program: str = "baton",
    kv_cache_memory: str | None = SMALL,
) -> Service:
    """A worker that is not started, with one thread. It has a free port, and the same when it is started
    again. ``kv_cache_memory``: unless ``options`` give it a pool; None: the default."""
    argv = (role, "--model", model, "--dtype", "float32", "--threads", "1", "--port", "0", *options)
    if kv_cache_memory is not None and not {"--num-blocks", "--kv-cache-memory"} & set(options):
        argv = (*argv, "--kv-cache-memory", kv_cache_memory)
    return Service(name, argv, tmp / f"{name}.log", program)


def simulated(tmp: Path, name: str, role: str, *options: str, model: str = "demo") -> Service:
    """Likewise a worker without a model."""
    argv = ("worker-sim", "--role", role, "--model", model, "--port", "0", *options)
    return Service(name, argv, tmp / f"{name}.log")


@contextmanager
def running(workers: Sequence[Service]) -> Iterator[None]:
    """Start workers, all at once; stop them at the end."""
    with ExitStack() as stack:
        for service in workers:
            service.start()
            stack.callback(service.stop)
        for service in workers:
            service.wait_ready()
        stack.callback(terminate, workers)
        yield


def terminate(services: Iterable[Service]) -> None:
    """Ask processes to end, all at once; waiting for them is left to their ``stop``."""
    for service in services:
        if service.process.poll() is None:
            service.process.terminate()


@contextmanager
def running_routers(
    tmp: Path,
    model: str,
    groups: Mapping[str, Sequence[Service]],
    options: Sequence[str] = (),
    *,
    disaggregation: str = "always",
    processes: int = 1,
) -> Iterator[dict[str, Ring]]:
    """Start a router, of the group's name, for each group of running workers; stop them at the end. A worker
    may be in several rings. ``disaggregation``: not the default, by which an idle decode worker would rather
    compute a prompt itself, and nothing would be handed on."""
    rings: dict[str, Ring] = {}
    with ExitStack() as stack:
        for name, workers in groups.items():
            addresses = [w.ready.address for w in workers if isinstance(w.ready, ready.WorkerReady)]
            flags = [flag for address in addresses for flag in ("--worker", address)]
            flags += ["--disaggregation", disaggregation, "--processes", str(processes)]
            argv = ("router", "--model", model, "--port", "0", "--grpc-port", "0", *flags, *options)
            router = Service(name, argv, tmp / f"{name}.log")
            router.start()
            stack.callback(router.stop)
            rings[name] = Ring(router, list(workers), processes)
        for ring in rings.values():
            ring.router.wait_ready()
        for ring in rings.values():
            ring.wait_workers()
        stack.callback(terminate, [ring.router for ring in rings.values()])
        yield rings


@contextmanager
def running_ring(
    tmp: Path,
    *,
    model: str = "demo",
    prefill: int = 1,
    decode: int = 1,
    both: int = 0,
    dtype: str = "float32",
    options: Sequence[str] = (),
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    decode_program: str = "baton",
    disaggregation: str = "always",
    kv_cache_memory: str | None = SMALL,
) -> Iterator[Ring]:
    """Start workers and a router on free ports; stop them all at the end. ``kv_cache_memory``: of a worker
    whose options do not give it a pool; None: the default."""
    tmp.mkdir(parents=True, exist_ok=True)
    workers = [
        worker(
            tmp,
            f"{role}-{i}",
            role,
            model,
            *("--dtype", dtype, *options, *extra),
            program=program,
            kv_cache_memory=kv_cache_memory,
        )
        for role, count, extra, program in (
            ("prefill", prefill, prefill_options, "baton"),
            ("decode", decode, decode_options, decode_program),
            ("both", both, (), "baton"),
        )
        for i in range(count)
    ]
    with (
        running(workers),
        running_routers(
            tmp, model, {"router": workers}, router_options, disaggregation=disaggregation
        ) as rings,
    ):
        yield rings["router"]
