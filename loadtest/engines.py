"""Engines to compare, as contexts: Baton and vLLM's CPU build (``scripts/peers`` installs it), each as one
server and as one prefill and one decode."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest import cores
from tests.support.ring import running_ring

START_S = 600.0
STOP_S = 30.0
KV_GIB = "2"
"""The size of each server's KV cache, in GiB."""
HOST = "127.0.0.1"
NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


@dataclass(frozen=True)
class Engine:
    """An engine that serves, with OpenAI's API. Ask it only while it is awake."""

    url: str
    restless: tuple[int, ...] = ()
    """Process groups that use the cores even when they have nothing to do."""

    @contextmanager
    def awake(self) -> Iterator[str]:
        """Let the engine run; gives its address. Before and after, the restless processes are stopped, so
        that they take nothing from others."""
        self._signal(signal.SIGCONT)
        try:
            yield self.url
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for group in self.restless:
            os.killpg(group, number)


@contextmanager
def baton_both(tmp: Path, model: Path, extra: Sequence[str] = ()) -> Iterator[Engine]:
    """One worker of role ``both``, with every core and ``extra`` options."""
    options = ("--threads", str(len(cores.available())), "--kv-cache-memory", f"{KV_GIB}GiB", *extra)
    with running_ring(
        tmp,
        model=str(model),
        prefill=0,
        decode=0,
        both=1,
        dtype="bfloat16",
        options=options,
        kv_cache_memory=None,
    ) as ring:
        yield Engine(ring.url)


@contextmanager
def baton_split(tmp: Path, model: Path, disaggregation: str = "conditional") -> Iterator[Engine]:
    """A prefill and a decode worker, each with one half of the cores; the router has all."""
    shares = dict(zip(("prefill", "decode"), cores.share_out(cores.available()), strict=True))
    threads = str(len(shares["prefill"]))
    options = ("--threads", threads, "--kv-cache-memory", f"{KV_GIB}GiB")
    with running_ring(
        tmp,
        model=str(model),
        dtype="bfloat16",
        options=options,
        disaggregation=disaggregation,
        kv_cache_memory=None,
    ) as ring:
        for role, share in shares.items():
            for worker in ring.of_role(role):
                cores.pin(worker.process.pid, share)
        yield Engine(ring.url)


@contextmanager
def vllm(tmp: Path, model: Path, peers: Path) -> Iterator[Engine]:
    """``vllm serve`` with every core (its default leaves one to its HTTP server)."""
    with _vllm(tmp, "vllm", model, peers, cores.available()) as server:
        server.wait_healthy()
        yield _at_rest(Engine(server.url, (server.process.pid,)))


@contextmanager
def vllm_split(tmp: Path, model: Path, peers: Path, *, apart: bool = True) -> Iterator[Engine]:
    """Two ``vllm serve`` with NixlConnector behind ``loadtest.proxy``. Each computes on one half of the
    cores; HTTP servers and proxy have all.

    NixlConnector moves the thread that sets it up, which computes later, to the last core of the machine. So
    the workers are pinned again when they are ready, unless ``apart`` is off: then both share that core.
    """
    prefill_cores, decode_cores = cores.share_out(cores.available())
    with (
        _vllm(tmp, "vllm-prefill", model, peers, prefill_cores, _nixl("kv_producer")) as prefill,
        _vllm(tmp, "vllm-decode", model, peers, decode_cores, _nixl("kv_consumer")) as decode,
    ):
        for server, bound in ((prefill, prefill_cores), (decode, decode_cores)):
            server.wait_healthy()
            if apart:
                cores.pin(_worker_of(server), bound)
        port = _free_port()
        addresses = ("--prefill", prefill.url, "--decode", decode.url, "--port", str(port))
        command = (sys.executable, "-m", "loadtest.proxy", *addresses)
        with _running(tmp, "proxy", command, {}, port) as proxy:
            proxy.wait_healthy()
            yield _at_rest(Engine(proxy.url, (prefill.process.pid, decode.process.pid)))


def _at_rest(engine: Engine) -> Engine:
    """Stop an engine that was just started, and return it: vLLM's workers spin while they wait for work."""
    with engine.awake():
        return engine


def _vllm(
    tmp: Path, name: str, model: Path, peers: Path, bound: Sequence[int], options: Sequence[str] = ()
) -> AbstractContextManager[_Server]:
    """``vllm serve`` that computes on the cores ``bound``."""
    port = _free_port()
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, bound)),
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    common = ("--dtype", "bfloat16", "--max-model-len", "8192", "--port", str(port), "--host", HOST)
    command = (str(peers / "bin" / "vllm"), "serve", str(model), *common, *options)
    return _running(tmp, name, command, environment, port)


def _nixl(role: str) -> tuple[str, str]:
    """Return the option that makes a ``vllm serve`` send KV blocks, or receive them."""
    return "--kv-transfer-config", json.dumps({**NIXL, "kv_role": role})


def _worker_of(server: _Server) -> int:
    """Return the process of a vLLM server that computes."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    found = [process.pid for process in below if "VLLM::Worker" in " ".join(process.cmdline())]
    if len(found) != 1:
        raise RuntimeError(f"{server.name} has {len(found)} workers, not 1: {below}")
    return int(found[0])


@dataclass(frozen=True)
class _Server:
    """A process that serves HTTP, or is about to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def wait_healthy(self) -> None:
        """Wait until the server is healthy. Raises RuntimeError with the end of its log if it ends, or takes
        too long."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self._said()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not ready within {START_S:.0f} s:\n{self._said()}")

    def _said(self) -> str:
        return self.log.read_text()[-4000:]


@contextmanager
def _running(
    tmp: Path, name: str, command: Sequence[str], environment: Mapping[str, str], port: int
) -> Iterator[_Server]:
    """Start a server, which need not be ready yet; at the end stop it and every process that it started."""
    tmp.mkdir(parents=True, exist_ok=True)
    path = tmp / f"{name}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield _Server(name, process, path, f"http://{HOST}:{port}")
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server's whole session, which may outlive the server."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)  # a stopped process gets no signal before this
            process.wait(STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
