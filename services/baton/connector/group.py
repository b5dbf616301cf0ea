"""The connectors ``nccl`` (CUDA) and ``gloo`` (CPU): a two-rank process group of torch for each link.

The group is the link's own, made from a store that decode hosts; there is no default group, so one dead peer
concerns one link. Neither library can withdraw a posted receive, so none is posted before its message is
announced: the header of a message goes over the link's socket, as in ``tcp``, and only then do both ends
start its transfer, one after another in the order of the headers. NCCL has no tags and needs that order, and
it makes cancelling exact: what nothing has matched was never given to the library.

The fence: ``close`` breaks off the running transfer and waits for the link's thread. NCCL's communicator is
aborted. Gloo's groups do nothing on ``abort``, but a wait that times out closes the pair's connection.

Torch is imported when a connector is made: this package must be importable without. ``nccl`` goes through
host memory like everything over ``PageMemory`` and is untested, two ranks on one device need differing
``NCCL_HOSTID``.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from baton.connector.door import Door, dial, receive_exactly
from baton.connector.tcp import ReceivingLink, SendingLink
from baton.connector.transport import Link, PageMemory, TransferError

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

log = logging.getLogger(__name__)

_MAGIC = b"baton-grp-1\n"
_PORT = struct.Struct("!H")
_MEET_S = 5.0
_LONGEST = timedelta(seconds=60)
"""A message that takes longer than this ends the link: the library then closes its connection by itself."""
_BREAK_OFF = timedelta(milliseconds=1)
_LOOK_S = 0.05
"""How often a running transfer looks whether it is to be broken off."""
_DECODE, _PREFILL = 0, 1


class _PeerToPeer(Protocol):
    """What both kinds of group have, which torch's stubs leave out."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class _Pair:
    """One end of a two-rank group: one transfer at a time, on the link's thread.

    The library is waited for on a thread of its own. Gloo does not wake a waiter whose peer died in the
    middle of a message; once the pair's connection is closed, nothing is written, and that thread is left
    to its timeout.
    """

    def __init__(self, backend: str, store: Store, rank: int, host: str) -> None:
        self._on_cuda = backend == "nccl"
        self._aborted = threading.Event()
        self._group = _nccl(store, rank) if self._on_cuda else _gloo(store, rank, host)

    def send(self, data: Tensor, peer_lives: Callable[[], bool]) -> None:
        place = data.cuda() if self._on_cuda else data
        self._run(lambda: self._group.send([place], _DECODE, 0), peer_lives)

    def receive(self, data: Tensor, peer_lives: Callable[[], bool]) -> None:
        place = data.cuda() if self._on_cuda else data
        self._run(lambda: self._group.recv([place], _PREFILL, 0), peer_lives)
        if place is not data:
            data.copy_(place)

    def abort(self) -> None:
        """Have the running transfer broken off; from any thread."""
        self._aborted.set()

    def _run(self, start: Callable[[], Work], peer_lives: Callable[[], bool]) -> None:
        if self._aborted.is_set():
            raise TransferError("the link was closed")
        over = threading.Event()
        errors: list[RuntimeError] = []
        try:
            work = start()
        except RuntimeError as error:  # torch's own errors derive from it
            raise TransferError(str(error)) from error

        def wait() -> None:
            try:
                work.wait(_LONGEST)
                if self._on_cuda:
                    _synchronize()
            except RuntimeError as error:
                errors.append(error)
            over.set()

        threading.Thread(target=wait, name="library-wait", daemon=True).start()
        while not over.wait(_LOOK_S):
            if self._aborted.is_set() or not peer_lives():
                self._break_off(work)
                raise TransferError("a transfer was broken off")
        if errors:
            raise TransferError(str(errors[0])) from errors[0]

    def _break_off(self, work: Work) -> None:
        """When this returns, the library has closed its connection and moves no byte."""
        if self._on_cuda:
            self._group.abort()
            return
        try:
            work.wait(_BREAK_OFF)
        except RuntimeError:
            log.debug("a transfer was broken off")


def _synchronize() -> None:
    import torch

    torch.cuda.current_stream().synchronize()


def _gloo(store: Store, rank: int, host: str) -> _PeerToPeer:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=_MEET_S)
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    group: object = ProcessGroupGloo(store, rank, 2, options)
    return cast(_PeerToPeer, group)


def _nccl(store: Store, rank: int) -> _PeerToPeer:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _LONGEST
    group: object = ProcessGroupNCCL(store, rank, 2, options)
    return cast(_PeerToPeer, group)


def _tensor(views: list[memoryview]) -> Tensor:
    """One tensor over the bytes; a copy if they are in several runs, of which there is one at a time."""
    import torch

    data = views[0] if len(views) == 1 else bytearray(b"".join(views))
    return torch.frombuffer(data, dtype=torch.uint8)


class _GroupReceivingLink(ReceivingLink):
    _pair: _Pair | None = None
    make_pair: Callable[[], _Pair]

    def _run(self, sock: socket.socket) -> None:
        self._pair = _made(self.make_pair)
        try:
            super()._run(sock)
        finally:
            self._pair = None  # closes what the library has open

    def _fill(self, sock: socket.socket, views: list[memoryview]) -> None:
        assert self._pair is not None
        whole = _tensor(views)
        self._pair.receive(whole, partial(_lives, sock))
        if len(views) > 1:
            received = memoryview(whole.numpy().data)
            for view in views:
                view[:], received = received[: view.nbytes], received[view.nbytes :]

    def _discard(self, sock: socket.socket, size: int) -> None:
        self._fill(sock, [memoryview(bytearray(size))])

    def _wake(self) -> None:
        pair = self._pair
        if pair is not None:
            pair.abort()


class _GroupSendingLink(SendingLink):
    _pair: _Pair | None = None

    def __init__(
        self,
        memory: PageMemory,
        sock: socket.socket,
        on_lost: Callable[[], None],
        make_pair: Callable[[], _Pair],
    ) -> None:
        self._make_pair = make_pair
        super().__init__(memory, sock, on_lost)

    def _run(self, sock: socket.socket) -> None:
        self._pair = _made(self._make_pair)
        try:
            super()._run(sock)
        finally:
            self._pair = None  # closes what the library has open

    def _write(self, sock: socket.socket, views: list[memoryview]) -> None:
        assert self._pair is not None
        self._pair.send(_tensor(views), partial(_lives, sock))

    def _wake(self) -> None:
        super()._wake()
        pair = self._pair
        if pair is not None:
            pair.abort()


def _lives(sock: socket.socket) -> bool:
    """Whether the peer still holds its end of the link's socket."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _made(make_pair: Callable[[], _Pair]) -> _Pair:
    try:
        return make_pair()
    except RuntimeError as error:  # torch's own errors derive from it
        raise TransferError(f"no process group: {error}") from error


class GroupConnector:
    """``Connector`` over torch's process groups. Not encrypted: keep it on a network of your own."""

    drained_is_proof = False

    def __init__(self, backend: str) -> None:
        """``backend``: nccl or gloo."""
        self.name = backend
        self._host = "127.0.0.1"
        self._store: Store | None = None
        self._store_port = 0
        self._expected: dict[bytes, _GroupReceivingLink] = {}
        self._door = Door(_MAGIC, self._expected, self._admitted)

    async def listen(self, host: str, port: int) -> str:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, 0, None, True, timedelta(seconds=_MEET_S), wait_for_workers=False)
        self._store, self._store_port = store, store.port
        return self._door.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        def forget() -> None:
            self._expected.pop(token, None)

        link = _GroupReceivingLink(memory, on_lost, forget)
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, sock: socket.socket) -> None:
        link = self._expected.pop(token)
        store, name, backend = self._store, token.hex(), self.name
        assert store is not None
        host = sock.getsockname()[0]
        link.make_pair = lambda: _Pair(backend, _room(store, name), _DECODE, host)
        sock.setblocking(True)
        sock.sendall(_PORT.pack(self._store_port))
        link.attach(sock)

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        sock = await dial(address, _MAGIC, token)
        try:
            (port,) = _PORT.unpack(await receive_exactly(sock, _PORT.size))
        except BaseException:
            sock.close()
            raise
        backend, name = self.name, token.hex()
        store_host, own_host = sock.getpeername()[0], sock.getsockname()[0]

        def make_pair() -> _Pair:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            store = TCPStore(store_host, port, None, False, timedelta(seconds=_MEET_S))
            return _Pair(backend, _room(store, name), _PREFILL, own_host)

        return _GroupSendingLink(memory, sock, on_lost, make_pair)

    async def close(self) -> None:
        await self._door.close()
        self._store = None


def _room(store: Store, name: str) -> Store:
    """A link's own names within the store of all."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(name, store)
