"""Processes of ranks for tests: torch is imported once, and a process forked for each rank.

    python -m tests.support.rank_process FD

On the socket FD comes, for each rank, a line of JSON with the socket to its worker; the answer is its process
id. The pool is a file that the test maps as well, so that it sees every byte that the rank's process writes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks import server
from baton.transport.ranks.shard import KVShard

_MOST = 4096


def mapped(path: Path, shape: Sequence[int]) -> Tensor:
    """A pool of bfloat16 in a file."""
    flat = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=torch.bfloat16)
    return flat.view(tuple(shape))


@dataclass
class RankProcesses:
    """Starts ranks' processes; those that are left are killed with it."""

    control: socket.socket
    pids: list[int] = field(default_factory=list)

    def start(self, sock: socket.socket, pool: Path, shape: Sequence[int], share: KVShard) -> int:
        """Returns the process id. The socket is the process's from here on."""
        [part] = share.groups
        heads, layers = part.heads, part.layers
        ask = {
            "pool": str(pool),
            "shape": list(shape),
            "heads": [heads.start, heads.stop],
            "layers": [layers.start, layers.stop],
        }
        socket.send_fds(self.control, [json.dumps(ask).encode()], [sock.fileno()])
        sock.close()
        pid = int(self.control.recv(_MOST))
        self.pids.append(pid)
        return pid


@contextmanager
def rank_processes() -> Iterator[RankProcesses]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = (sys.executable, "-m", __name__, str(theirs.fileno()))
    process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
    theirs.close()
    ranks = RankProcesses(ours)
    try:
        yield ranks
    finally:
        ours.close()
        process.wait(60)


def _serve(sock: socket.socket, asked: dict[str, object]) -> None:
    pool = mapped(Path(str(asked["pool"])), asked["shape"])  # type: ignore[arg-type]
    share = KVShard.of_one(range(*asked["heads"]), range(*asked["layers"]))  # type: ignore[misc]

    def crash() -> None:
        os._exit(70)

    asyncio.run(server.serve(sock, PoolMemory(pool), share, crash))


def _main(fd: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    control = socket.socket(fileno=fd)
    children: list[int] = []
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MOST, 1)
        if not message:
            break
        pid = os.fork()
        if pid == 0:
            control.close()
            status = 1
            try:
                _serve(socket.socket(fileno=fds[0]), json.loads(message))
                status = 0
            finally:
                os._exit(status)
        os.close(fds[0])
        children.append(pid)
        control.send(str(pid).encode())
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    _main(int(sys.argv[1]))
