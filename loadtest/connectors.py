"""Goodput of each connector, moving segments of KV blocks between two processes, against the same library's
plain point-to-point messages of the same size; and what queued messages cost in memory.

    python -m loadtest.connectors [--kinds tcp,tcp-tls,ucx,ucx-shm,ucx-tcp,nixl,nixl-cma,gloo] [--rounds 9]
    python -m loadtest.connectors --queued 200

The receiver is this process, the sender its child. A round of the connector and a round of each way to use
the library alone take turns, over the same memory, and medians are compared: the machine may be busy with
something else for part of the time. Every receive is posted before the sender hears that it may start.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from baton.net.certificates import TlsFiles
from baton.net.tls_session import DataTls
from baton.transport.base import Connector, Link
from baton.transport.data_listener import keep_alive
from baton.transport.pool_memory import PoolMemory
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector
from baton.transport.torch_group import GroupConnector

UCX: dict[str, Mapping[str, str]] = {"ucx": {}, "ucx-shm": {"TLS": "posix,self"}, "ucx-tcp": {"TLS": "tcp"}}
NIXL = {"nixl": "^cma", "nixl-cma": "^xpmem"}
"""What UCX may use in NIXL: what Baton allows it, or cross-memory attach as well, by which the sender copies
and which no fence on this end stops."""
NIXL_OPTIONS = {"NET_DEVICES": "lo"}
"""Options of UCX that a worker on the loopback gives NIXL."""
TCP = ("tcp", "tcp-tls")
KINDS = (*TCP, *UCX, *NIXL, "gloo")
CPU = "CPU: seconds of the receiver's for each GB"
CERTIFICATES = "LOADTEST_CERTIFICATES"
"""The environment variable with the folder of both processes' certificates."""
ROUND_BYTES = 1 << 30
POOL_BYTES = 256 << 20
"""The size of a pool in bytes. A round goes over its pool several times."""


@dataclass(frozen=True)
class Case:
    """Messages of ``blocks`` adjacent KV blocks, between pools that may differ in block size."""

    name: str
    shape: tuple[int, int, int]
    """KV heads, layers, head dimension."""
    dtype: torch.dtype
    block_sizes: tuple[int, int]
    """Prefill's and decode's block size, in tokens."""
    blocks: int

    @property
    def wire_block_size(self) -> int:
        return min(self.block_sizes)

    @property
    def message_bytes(self) -> int:
        heads, layers, dim = self.shape
        return self.blocks * self.wire_block_size * heads * layers * 2 * dim * self.dtype.itemsize

    @property
    def messages(self) -> int:
        """The messages of a round."""
        return ROUND_BYTES // self.message_bytes

    @property
    def places(self) -> int:
        """The places for messages in the pool."""
        return POOL_BYTES // self.message_bytes

    def pool(self, block_size: int) -> torch.Tensor:
        heads, layers, dim = self.shape
        blocks = -(-self.places * self.blocks * self.wire_block_size // block_size)
        pool = torch.empty(blocks, heads, layers, 2, block_size, dim, dtype=self.dtype)
        pool.view(torch.uint8).fill_(1)  # touches every page of the pool
        return pool


_LLAMA_8B = (8, 32, 128)
CASES = (
    Case("demo model, 1 block", (2, 6, 64), torch.float32, (16, 16), 1),
    Case("demo model, 16 blocks", (2, 6, 64), torch.float32, (16, 16), 16),
    Case("8B, 1 block", _LLAMA_8B, torch.bfloat16, (16, 16), 1),
    Case("8B, 16 blocks", _LLAMA_8B, torch.bfloat16, (16, 16), 16),
    Case("8B, 16 blocks of 64", _LLAMA_8B, torch.bfloat16, (64, 64), 16),
    Case("8B, 16 blocks, 64 to 16", _LLAMA_8B, torch.bfloat16, (64, 16), 16),
    Case("8B, 16 blocks, 16 to 64", _LLAMA_8B, torch.bfloat16, (16, 64), 16),
)


def chosen(part: str) -> list[Case]:
    return [case for case in CASES if part in case.name]


def certificates() -> DataTls:
    """Load the certificates that the parent has made, in either process."""
    folder = Path(os.environ[CERTIFICATES])
    if not (folder / "certificate").exists():
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-days", "2", "-nodes", "-subj", "/CN=loadtest"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-keyout", folder / "key", "-out", folder / "certificate"),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )
    certificate, key = str(folder / "certificate"), str(folder / "key")
    return DataTls(
        TlsFiles(options="worker_tls", certificate=certificate, key=key, ca=certificate, mutual=True)
    )


def make(kind: str) -> Connector:
    staging = Staging()
    if kind in TCP:
        return TcpConnector(staging, os.abort, certificates() if kind == "tcp-tls" else None)
    if kind == "gloo":
        return GroupConnector("gloo", staging, os.abort)
    if kind in NIXL:
        from baton.transport.nixl import NixlConnector

        return NixlConnector(staging, os.abort, {**NIXL_OPTIONS, "TLS": NIXL[kind]})
    from baton.transport.ucx import UcxConnector

    return UcxConnector(staging, os.abort, UCX[kind])


# --- the libraries alone

Move = Callable[[list[memoryview], Callable[[], None]], None]
"""This process's part of one round. The second argument is called when all receives are posted."""


def plain_tcp(sock: socket.socket, sending: bool) -> Move:
    def move(views: list[memoryview], ready: Callable[[], None]) -> None:
        ready()
        for view in views:
            if sending:
                sock.sendall(view)
            rest = view[:0] if sending else view
            while rest.nbytes:
                rest = rest[sock.recv_into(rest) :]

    return move


def plain_gloo(sock: socket.socket, sending: bool) -> Move:
    from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    if sending:
        port = int.from_bytes(sock.recv(2))
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10))
    else:
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        sock.sendall(store.port.to_bytes(2))
    group = ProcessGroupGloo(store, int(sending), 2, timedelta(seconds=60))
    transfer = group.send if sending else group.recv  # type: ignore[attr-defined]

    def move(views: list[memoryview], ready: Callable[[], None]) -> None:
        tensors = [torch.frombuffer(view, dtype=torch.uint8) for view in views]
        running = [transfer([tensor], int(not sending), 0) for tensor in tensors]
        ready()
        for work in running:
            work.wait()

    return move


def plain_ucx(sock: socket.socket, sending: bool, options: Mapping[str, str]) -> Move:
    """Move tagged messages, all posted at once, progressed by the thread that waits for them."""
    from baton.transport import ucx_driver

    ucp = ucx_driver.load()
    array = importlib.import_module("ucxx._lib.arr").Array
    worker = ucp.UCXWorker(ucp.UCXContext(dict(options), (ucp.Feature.TAG, ucp.Feature.WAKEUP)))
    worker.init_blocking_progress_mode()
    own = bytes(memoryview(worker.address))
    sock.sendall(len(own).to_bytes(2) + own)
    peer = sock.recv(int.from_bytes(sock.recv(2)), socket.MSG_WAITALL)
    endpoint = ucp.UCXEndpoint.create_from_worker_address(
        worker, ucp.UCXAddress.create_from_buffer(peer), False
    )

    def move(views: list[memoryview], ready: Callable[[], None]) -> None:
        transfer = endpoint.tag_send if sending else worker.tag_recv
        waiting = [transfer(array(view), ucp.UCXXTag(tag + 1)) for tag, view in enumerate(views)]
        ready()
        while waiting:
            worker.progress_worker_event(20)
            waiting = [request for request in waiting if not request.completed]

    return move


class PlainNixl:
    """NIXL's own agent: a write for each message, all posted at once, and a notification for each. The pools
    are registered, and what the sender must know of them is sent, when a case begins.

    Both ends poll without a pause. NIXL's progress thread would do it for them, but as its Python class makes
    it, it never sleeps, and would take a core of each process while others are measured.
    """

    def __init__(self, sock: socket.socket, sending: bool, options: Mapping[str, str]) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl_agent("sender" if sending else "receiver", config)
        settings = ",".join(f"{key}={value}" for key, value in options.items())
        self._agent.create_backend("UCX", {"engine_config": settings})
        self._sock = sock
        self._sending = sending
        self._known: object = None
        self._peer = ""
        self._theirs: list[int] = []

    def __call__(self, views: list[memoryview], ready: Callable[[], None]) -> None:
        ready()
        ours = [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in views]
        if self._known is not views:
            self._known = views
            self._meet(ours, views[0].nbytes)
        if self._sending:
            self._write(ours, views[0].nbytes)
        else:
            self._await(len(views))

    def _meet(self, ours: list[int], size: int) -> None:
        first, end = min(ours), max(ours) + size
        self._agent.register_memory([(first, end - first, 0, "")], "DRAM")
        if self._sending:
            metadata, addresses = (self._receive() for _ in range(2))
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            name: str | bytes = self._agent.add_remote_agent(metadata)  # bytes, whatever its hint says
            self._peer = name if isinstance(name, str) else name.decode()
            self._theirs = [address for (address,) in struct.iter_unpack("!Q", addresses)]
        else:
            for said in (self._agent.get_agent_metadata(), struct.pack(f"!{len(ours)}Q", *ours)):
                self._sock.sendall(len(said).to_bytes(4) + said)

    def _receive(self) -> bytes:
        return self._sock.recv(int.from_bytes(self._sock.recv(4, socket.MSG_WAITALL)), socket.MSG_WAITALL)

    def _write(self, ours: list[int], size: int) -> None:
        agent, running = self._agent, []
        for here, there in zip(ours, self._theirs, strict=True):
            local, remote = (agent.get_xfer_descs([(at, size, 0)], "DRAM") for at in (here, there))
            handle = agent.initialize_xfer("WRITE", local, remote, self._peer, b"written")
            if agent.transfer(handle) == "PROC":
                running.append(handle)
            else:
                agent.release_xfer_handle(handle)
        while running:
            ended = [handle for handle in running if agent.check_xfer_state(handle) != "PROC"]
            for handle in ended:
                agent.release_xfer_handle(handle)
            running = [handle for handle in running if handle not in ended]

    def _await(self, count: int) -> None:
        while count:
            count -= sum(map(len, self._agent.get_new_notifs().values()))


def plain(kind: str, sock: socket.socket, sending: bool) -> dict[str, Move]:
    """Return the library's own ways to move messages, by name. UCX and NIXL are tried with their defaults
    within what the kind allows, and with all options that Baton sets for them."""
    if kind in TCP:
        return {"plain": plain_tcp(sock, sending)}
    if kind == "gloo":
        return {"plain": plain_gloo(sock, sending)}
    if kind in NIXL:
        return {
            "plain": PlainNixl(sock, sending, {}),
            "tuned": PlainNixl(sock, sending, {**NIXL_OPTIONS, "TLS": NIXL[kind]}),
        }
    from baton.transport import ucx_driver

    scheme = "am" if UCX[kind] else "get_zcopy"
    tuned = {**ucx_driver.OPTIONS, "RNDV_THRESH": "0", "RNDV_SCHEME": scheme, **UCX[kind]}
    return {
        "plain": plain_ucx(sock, sending, UCX[kind]),
        "tuned": plain_ucx(sock, sending, tuned),
    }


# --- the two processes

GO, DONE, END = b"g", b"d", b"e"


class End:
    """One process's end of a case: its pool as the connector moves it, and as the library alone does."""

    def __init__(self, case: Case, sending: bool) -> None:
        self.case = case
        pool, size = case.pool(case.block_sizes[0 if sending else 1]), case.message_bytes
        self.memory = PoolMemory(pool).part(case.wire_block_size)
        whole = pool.view(torch.uint8).view(-1).numpy().data
        views = [whole[i * size : (i + 1) * size] for i in range(case.places)]
        self.views = [views[i % case.places] for i in range(case.messages)]

    def blocks(self, message: int) -> range:
        first = message % self.case.places * self.case.blocks
        return range(first, first + self.case.blocks)


async def send(kind: str, rounds: int, queued: int, cases: str, port: int, address: str) -> None:
    """Run the child: one round on each byte from the parent."""
    sock = socket.create_connection(("127.0.0.1", port))
    keep_alive(sock)
    alone = {} if queued else plain(kind, sock, sending=True)
    connector = make(kind)
    for case in chosen(cases):
        end = End(case, sending=True)
        token = sock.recv(32, socket.MSG_WAITALL)
        link = await connector.connect(address, token, end.memory, lambda: None)
        if queued:
            sock.recv(1)
            before = forget_peak()
            await asyncio.gather(*(link.send(tag, end.blocks(tag)) for tag in range(queued)))
            sock.sendall(max(0, peak() - before).to_bytes(8))
        for number in range(0 if queued else rounds):
            for move in alone.values():
                sock.recv(1)
                move(end.views, lambda: None)
            sock.recv(1)
            first = number * case.messages
            await asyncio.gather(*(link.send(first + i, end.blocks(i)) for i in range(case.messages)))
            sock.sendall(DONE)
        sock.recv(1)
        await link.close()
    await connector.close()


async def receive(kind: str, rounds: int, queued: int, cases: str) -> None:
    connector = make(kind)
    address = await connector.listen("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        argv = (sys.executable, "-m", __spec__.name, "--child", kind, str(rounds), str(queued), cases)
        child = subprocess.Popen([*argv, str(port), address])  # noqa: ASYNC220 (nothing else waits here)
        sock, _ = await asyncio.to_thread(listener.accept)
    keep_alive(sock)
    alone = {} if queued else await asyncio.to_thread(plain, kind, sock, False)
    for case in chosen(cases):
        end = End(case, sending=False)
        token = os.urandom(32)
        link = connector.expect(token, end.memory, lambda: None)
        sock.sendall(token)
        if queued:
            await queue_up(kind, case, end, link, queued, sock)
        else:
            # One round more than asked for is run: in the first, both sides touch their memory for the first
            # time.
            rates = {name: list[float]() for name in ("baton", CPU, *alone)}
            for number in range(rounds + 1):
                for name, rate in (await one_round(end, link, number, alone, sock)).items():
                    rates[name] += [rate] if number else []
            report(kind, case, rates)
        sock.sendall(END)
        await link.close()
    await connector.close()
    await asyncio.to_thread(child.wait)


async def one_round(
    end: End, link: Link, number: int, alone: Mapping[str, Move], sock: socket.socket
) -> dict[str, float]:
    """Return the GB/s of each way, and the connector's use of this process's CPU, in seconds per GB."""
    volume, rates, started = end.case.messages * end.case.message_bytes / 1e9, {}, 0.0

    def go() -> None:
        nonlocal started
        started = time.perf_counter()
        sock.sendall(GO)

    for name, move in alone.items():
        await asyncio.to_thread(move, end.views, go)
        rates[name] = volume / (time.perf_counter() - started)
    first = number * end.case.messages
    receives = [link.post_receive(first + i, end.blocks(i)) for i in range(end.case.messages)]
    used = time.process_time()
    go()
    await asyncio.gather(*receives)
    rates["baton"] = volume / (time.perf_counter() - started)
    rates[CPU] = (time.process_time() - used) / volume
    await asyncio.to_thread(sock.recv, 1)  # DONE
    return rates


def report(kind: str, case: Case, rates: Mapping[str, list[float]]) -> None:
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    baton, cpu = medians.pop("baton"), medians.pop(CPU)
    others = "".join(f"{rate:8.2f}{baton / rate:6.2f}" for rate in medians.values())
    size = case.message_bytes / 1e6
    print(f"{kind:<8} {case.name:<24} {size:8.1f} {baton:7.2f}{cpu:7.2f}{others}", flush=True)


# --- memory


def peak() -> int:
    """Return the most bytes that this process has had in memory since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def forget_peak() -> int:
    """Reset the peak, and return the bytes in memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


async def queue_up(kind: str, case: Case, end: End, link: Link, queued: int, sock: socket.socket) -> None:
    """Move ``queued`` messages at once, into and out of the same pages, and print the memory that they
    took."""
    before = forget_peak()
    receives = [link.post_receive(tag, end.blocks(tag)) for tag in range(queued)]
    sock.sendall(GO)
    await asyncio.gather(*receives)
    sent = int.from_bytes(await asyncio.to_thread(sock.recv, 8))
    print(
        f"{kind:<8} {case.name:<24} {case.message_bytes / 1e6:8.1f} "
        f"{sent / 1e6:8.1f} {max(0, peak() - before) / 1e6:8.1f}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--child"]:
        kind, rounds, queued, cases, port, address = sys.argv[2:]
        asyncio.run(send(kind, int(rounds) + 1, int(queued), cases, int(port), address))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default="", help="those whose name contains this")
    parser.add_argument("--queued", type=int, default=0)
    options = parser.parse_args()
    if options.queued:
        print(f"{options.queued} messages queued at once: growth of either process's peak, in MB")
        print(f"{'':<8} {'message':<24} {'MB':>8} {'sender':>8} {'receiver':>8}")
    else:
        print(f"GB/s, medians of {options.rounds} rounds of at least {ROUND_BYTES >> 20} MiB; {CPU}")
        words = f"{'baton':>7}{'CPU':>7}{'plain':>8}{'ratio':>6}{'tuned':>8}{'ratio':>6}"
        print(f"{'':<8} {'message':<24} {'MB':>8} {words}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CERTIFICATES] = folder
        for kind in options.kinds.split(","):
            asyncio.run(receive(kind, options.rounds, options.queued, options.cases))


if __name__ == "__main__":
    main()
