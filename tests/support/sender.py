"""A process with the sending end of a link, for tests in which it dies or stops.

Run as ``python -m tests.support.sender KIND ADDRESS TOKEN``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from baton.net.tls_session import DataTls
from baton.transport.base import Connector
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector
from baton.transport.torch_group import GroupConnector
from tests.support.certificates import Authority
from tests.support.links import HostMemory

LARGE = 256 << 20
"""Bytes of the message: it is under way for a while."""
UCX = {"ucx": {}, "ucx-shm": {"TLS": "posix,self"}, "ucx-tcp": {"TLS": "tcp"}}
"""What UCX may use: all there is (cross-memory attach), shared memory alone, TCP alone."""


ENCRYPTED = "tcp under TLS as in "


def encrypted(folder: Path) -> str:
    """The kind of ``tcp`` whose certificates, those of the name ``kv``, are in this folder."""
    return f"{ENCRYPTED}{folder}"


def make(kind: str, staging: Staging | None = None, on_crash: Callable[[], None] = lambda: None) -> Connector:
    """``kind`` may be ``encrypted``'s. ``on_crash``: a test that does not care has its transfers time out."""
    staging = staging or Staging()
    if kind.startswith(ENCRYPTED):
        files = Authority.at(Path(kind.removeprefix(ENCRYPTED))).given("kv")
        return TcpConnector(staging, on_crash, DataTls(files))
    if kind == "tcp":
        return TcpConnector(staging, on_crash)
    if kind == "nixl":
        from baton.transport.nixl import NixlConnector

        return NixlConnector(staging, on_crash)
    if kind == "gloo":
        return GroupConnector("gloo", staging, on_crash)
    from baton.transport.ucx import UcxConnector

    return UcxConnector(staging, on_crash, UCX[kind])


async def send_to(kind: str, address: str, token: str) -> None:
    """One large message; then nothing, for a minute."""
    memory = HostMemory(1, LARGE)
    memory.bytes[:] = b"\1" * LARGE
    link = await make(kind).connect(address, bytes.fromhex(token), memory, lambda: None)
    await asyncio.wait([asyncio.ensure_future(link.send(1, [0]))])
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(send_to(*sys.argv[1:]))
