"""Trials on processes of their own, without honest clients: starts, nodes that join, failing Redis."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from baton.process import ready
from loadtest.hostile import ring
from loadtest.hostile.proxy import Proxy, proxied
from loadtest.hostile.ring import TreeService, environment
from loadtest.hostile.vocabulary import Found, Trial
from loadtest.hostile.wire import free_port
from loadtest.trees import HERE
from tests.support.redis_server import RedisServer
from tests.support.ring import scrape

NODES = 3
JOIN_S = 30.0
FAULT_S = 3.0
TOGETHER_S = 5.0
"""The time after Redis has recovered within which limits must be shared again, in seconds."""
RATE_S = 0.05
UP = "baton_shared_state_up"
STRANGERS = 30


# --- starts of services


def _started(worker: TreeService, found: Found) -> bool:
    worker.start()
    try:
        worker.wait_ready()
    except RuntimeError as error:
        found.count("no start")
        found.said = str(error).strip().splitlines()[-1][-160:]
        return False
    found.count("started")
    return True


def on_ipv6(tree: Path, tmp: Path) -> Found:
    found = Found()
    worker = ring.simulated(tmp, "worker", "decode", tree, secrets.token_hex(32), "--host", "::1")
    try:
        found.figures["started"] = float(_started(worker, found))
    finally:
        worker.stop()
    return found


def without_key(tree: Path, tmp: Path) -> Found:
    """Start a worker that listens on all addresses without a cluster key; then send an order signed with no
    key."""
    found = Found()
    places = ("--host", "0.0.0.0", "--advertise", "127.0.0.1")
    worker = ring.simulated(tmp, "worker", "decode", tree, None, *places)
    try:
        found.figures["started"] = float(_started(worker, found))
        if found.figures["started"]:
            assert isinstance(worker.ready, ready.WorkerReady)
            said = subprocess.run(
                [sys.executable, "-m", "loadtest.hostile.forger", worker.ready.address],
                cwd=HERE,
                env=environment(tree),
                capture_output=True,
                text=True,
                timeout=30,
            )
            found.count("obeyed" if said.returncode == 0 else "not obeyed")
            found.said = (said.stdout or said.stderr).strip()[-160:]
    finally:
        worker.stop()
    return found


# --- nodes


def node_port(tree: Path, tmp: Path) -> Found:
    """Have a node join, and leave; then strangers repeat the node's bytes, or the leader's, or send noise."""
    found, cluster_key = Found(), secrets.token_hex(32)
    port = free_port()
    argv: tuple[str, ...] = ("decode", "--model", "demo", "--port", "0", "--threads", "1")
    argv = (
        *argv,
        "--num-blocks",
        "64",
        "--pipeline-parallel-size",
        str(NODES),
        "--nodes",
        str(NODES),
        "--node-port",
        str(port),
    )
    leader = TreeService("leader", argv, tmp / "leader.log", tree=tree, cluster_key=cluster_key)
    leader.start()
    try:
        _await(lambda: "waiting for" in leader.log.read_text())
        with (
            proxied(f"127.0.0.1:{port}", tmp / "node-said") as proxy,
            _node(tree, tmp, int(proxy.address.rpartition(":")[2]), cluster_key),
        ):
            _await(lambda: _joined(leader) == 1)
        time.sleep(1.0)
        said = (tmp / "node-said").read_bytes()
        _replay(port, said, found)
        _reflect(port, said, found)
        _strangers(port, found)
        found.figures["strangers_joined"] = _joined(leader) - 1
        with _node(tree, tmp, port, cluster_key), suppress(TimeoutError):
            _await(lambda: _joined(leader) == 2 + found.figure("strangers_joined"))
            found.count("the node is back")
    finally:
        leader.stop()
    return found


def _await(done: Callable[[], bool]) -> None:
    until = time.monotonic() + JOIN_S
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"it did not come to that within {JOIN_S:g} s")
        time.sleep(0.1)


def _joined(leader: TreeService) -> int:
    return sum(line.rstrip().endswith("joined") for line in leader.log.read_text().splitlines())


@contextmanager
def _node(tree: Path, tmp: Path, port: int, cluster_key: str) -> Iterator[None]:
    argv: tuple[str, ...] = (
        "node",
        "--leader-address",
        "127.0.0.1",
        "--nodes",
        str(NODES),
        "--node-index",
        "1",
    )
    argv = (*argv, "--node-port", str(port), "--host", "127.0.0.1")
    node = TreeService("node", argv, tmp / "node.log", tree=tree, cluster_key=cluster_key)
    node.start()
    try:
        yield
    finally:
        node.stop()


def _told(port: int, first: bytes, then: Callable[[bytes], bytes]) -> int:
    """Send ``first``, then what ``then`` makes of the answer. Returns how many bytes came."""
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.settimeout(2.0)
        came = 0
        with suppress(OSError):
            sock.sendall(first)
            answer = sock.recv(4096)
            came = len(answer)
            sock.sendall(then(answer))
            while data := sock.recv(4096):
                came += len(data)
        return came


GREETING = len(b"baton-node-1") + 32


def _replay(port: int, said: bytes, found: Found) -> None:
    came = _told(port, said[:GREETING], lambda answer: said[GREETING:])
    found.figures["bytes_for_replay"] = came
    found.count("replayed")


def _reflect(port: int, said: bytes, found: Found) -> None:
    """Send the leader's own proof, and behind it the node's bytes after its own proof."""
    proof = 32
    came = _told(port, said[:GREETING], lambda answer: answer[-proof:] + said[GREETING + proof :])
    found.figures["bytes_for_reflection"] = came
    found.count("reflected")


def _strangers(port: int, found: Found) -> None:
    """Open connections of strangers, of which half send nothing and half send noise."""
    with ExitStack() as stack:
        for number in range(STRANGERS):
            with suppress(OSError):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
                if number % 2:
                    sock.sendall(secrets.token_bytes(100))
                found.count("stranger")
        time.sleep(1.0)


# --- Redis


@contextmanager
def _router(tree: Path, tmp: Path, proxy: Proxy, *options: str) -> Iterator[TreeService]:
    """A router with a limit, which it keeps in Redis, and its worker."""
    cluster_key = secrets.token_hex(32)
    worker = ring.simulated(tmp, "worker", "both", tree, cluster_key)
    with ExitStack() as stack:
        worker.start()
        stack.callback(worker.stop)
        worker.wait_ready()
        assert isinstance(worker.ready, ready.WorkerReady)
        argv: tuple[str, ...] = ("router", "--model", "demo", "--port", "0", "--grpc-port", "-1")
        argv = (*argv, "--worker", worker.ready.address, "--limit-requests-per-minute", "100000")
        argv = (*argv, "--redis-url", f"redis://{proxy.address}/0", *options)
        router = TreeService("router", argv, tmp / "router.log", tree=tree, cluster_key=cluster_key)
        router.start()
        stack.callback(router.stop)
        router.wait_ready()
        _await(lambda: _metric(router, "baton_worker_ready") == 1 and _metric(router, UP) == 1)
        yield router


def _metric(router: TreeService, name: str) -> float:
    assert isinstance(router.ready, ready.RouterReady)
    page = scrape(f"http://{router.ready.http}/metrics")
    return sum(value for told, value in page.items() if told.partition("{")[0] == name)


def _load(router: TreeService, found: Found, seconds: float) -> None:
    """Send requests one after the other."""
    assert isinstance(router.ready, ready.RouterReady)
    url = f"http://{router.ready.http}/v1/completions"
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        asked = urllib.request.Request(url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                found.count(answer.status)
        except urllib.error.HTTPError as error:
            found.count(error.code)
            found.figures["failed"] = found.figure("failed") + 1
        except OSError:
            found.count("no answer")
            found.figures["failed"] = found.figure("failed") + 1
        time.sleep(RATE_S)


def _recovered(router: TreeService, found: Found) -> None:
    """Measure the time until limits are shared again."""
    began = time.monotonic()
    while _metric(router, UP) != 1 and time.monotonic() - began < TOGETHER_S:
        _load(router, found, 0.2)
    _load(router, found, 1.0)
    found.figures |= {"up": _metric(router, UP), "up_after_s": round(time.monotonic() - began - 1.0, 2)}


def redis_password(tree: Path, tmp: Path) -> Found:
    """Fill the password's file with bytes that are no text for a while, and end every connection."""
    found, file = Found(), tmp / "password"
    file.write_text("right")
    server = RedisServer(tmp, "right")
    server.start()
    try:
        with (
            proxied(f"127.0.0.1:{server.port}") as proxy,
            _router(tree, tmp, proxy, "--redis-password-file", str(file)) as router,
        ):
            file.write_bytes(b"\xff\xfe\x80")
            server.client().client_kill_filter(_type="normal", skipme=True)
            _load(router, found, FAULT_S)
            file.write_text("right")
            _recovered(router, found)
    finally:
        server.kill()
    return found


def redis_failover(tree: Path, tmp: Path) -> Found:
    """Make the primary the replica of the other server, which the name leads to from then on."""
    found = Found()
    with ExitStack() as stack:
        servers = [RedisServer(_folder(tmp, name)) for name in ("one", "two")]
        for server in servers:
            server.start()
            stack.callback(server.kill)
        one, two = servers
        proxy = stack.enter_context(proxied(f"127.0.0.1:{one.port}"))
        router = stack.enter_context(_router(tree, tmp, proxy))
        _load(router, found, 1.0)
        proxy.lead_to(f"127.0.0.1:{two.port}")
        one.client().slaveof("127.0.0.1", two.port)
        _load(router, found, FAULT_S)
        _recovered(router, found)
    return found


def _folder(tmp: Path, name: str) -> Path:
    (tmp / name).mkdir()
    return tmp / name


def _apart(found: Found) -> bool:
    return found.figure("up") != 1 or found.figure("failed") > 0


TRIALS: Mapping[str, Trial] = MappingProxyType(
    {
        trial.name: trial
        for trial in (
            Trial(
                name="ipv6",
                finding="S4",
                aim="no worker starts on ::1",
                run=on_ipv6,
                reached=lambda found: not found.figure("started"),
            ),
            Trial(
                name="no-cluster-key",
                finding="S9",
                aim="a worker for everybody starts without a cluster key",
                run=without_key,
                reached=lambda found: bool(found.figure("started")),
            ),
            Trial(
                name="node-port",
                finding="",
                aim="a stranger joins a worker of several nodes",
                run=node_port,
                reached=lambda found: (
                    found.figure("strangers_joined") > 0 or "the node is back" not in found.got
                ),
            ),
            Trial(
                name="redis-password",
                finding="S11",
                aim="a request fails, or limits are apart 5 s after the password was right again",
                run=redis_password,
                reached=_apart,
                needs="redis-server",
            ),
            Trial(
                name="redis-failover",
                finding="S10",
                aim="a request fails, or limits are apart 8 s after a failover",
                run=redis_failover,
                reached=_apart,
                needs="redis-server",
            ),
        )
    }
)
