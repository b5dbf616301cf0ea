"""The thread that owns UCX for the connector ``ucx``, and the options that UCX gets before it starts.

The thread sleeps until UCX or the event loop has something for it, and UCX's own work runs without the GIL.
Copies between staging memory and the pages of a device, and from staging memory to any pages, are made on a
second thread.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import logging
import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

from baton.process.options import WILDCARDS, is_ipv6
from baton.transport.base import DeviceView
from baton.transport.network_interface import interface_of, rdma_ports

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

_BUSY_WAIT_S, _IDLE_WAIT_S = 0.001, 1.0
"""The longest sleeps, in seconds. UCX wakes its sleeper, but should it ever forget to, little time is
lost."""
_STOP_S = 5.0
OPTIONS = {
    # Without MM_ERROR_HANDLING and CMA_MEMORY_INVALIDATE, UCX uses neither shared memory nor cross-memory
    # attach in error mode PEER.
    "MM_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",
    "KEEPALIVE_INTERVAL": "2s",
    # MM_SEG_SIZE of 65000 gives twice the goodput of UCX's own 8 KiB, measured on loopback and through shared
    # memory; a link through shared memory has FIFO times SEG bytes of it, 4 MB instead of 17.
    "MM_SEG_SIZE": "65000",
    "MM_FIFO_SIZE": "64",
    "TCP_TX_SEG_SIZE": "262144",
    "TCP_RX_SEG_SIZE": "262144",
}
"""Baton's default options of UCX; an environment variable ``UCX_...`` of the same name goes first."""

SHARED_BYTES = 34_000_000
"""The bytes of /dev/shm that one UCX worker takes when it starts (measured with UCX 1.21 and `OPTIONS`). UCX
does without this transport where they are not free."""


class UcxRequest(Protocol):
    @property
    def completed(self) -> bool: ...

    @property
    def status(self) -> int: ...


class UcxEndpoint(Protocol):
    def tag_send(self, array: object, tag: object) -> UcxRequest: ...

    def close_blocking(self) -> None: ...

    def set_close_callback(self, callback: Callable[[], None]) -> None: ...


def load() -> ModuleType:
    """Import ucxx, or raise ImportError. UCX reads its log settings when it is loaded; standard output is
    Baton's own."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    return importlib.import_module("ucxx._lib.libucxx")


def interface_options(host: str) -> dict[str, str]:
    """Return UCX's options for a worker that listens on ``host``, beside those in the environment.

    UCX's TCP transport listens on every interface that it may use, to any peer. A specific host restricts it
    to the interface that has this address, beside RDMA devices (none for the loopback), which serve only
    peers with a queue pair. A wildcard leaves all interfaces, and so does ``UCX_NET_DEVICES`` in the
    environment, which is the user's own choice. UCX uses one address of an interface: one of the family of
    ``host``.
    """
    of_ipv6 = is_ipv6(host) and host not in WILDCARDS and "UCX_TCP_AF_PRIO" not in os.environ
    family = {"TCP_AF_PRIO": "inet6,inet"} if of_ipv6 else {}
    interface = None if "UCX_NET_DEVICES" in os.environ else interface_of(host)
    if interface is None:
        return family
    rdma = rdma_ports() if interface != "lo" else []
    return {"NET_DEVICES": ",".join([interface, *rdma]), **family}


def _leave() -> None:
    """Leave the thread as it is: the pool is in host memory."""


class Driver:
    """One UCX worker and the thread that owns it. Methods named ``on_thread`` run on that thread."""

    def __init__(
        self,
        scheme: str,
        deliver: Callable[[Driver, int, int], bool],
        extra: Mapping[str, str],
        on_crash: Callable[[], None],
        enter_thread: Callable[[], None] = _leave,
    ) -> None:
        """``enter_thread``: see ``ConnectorSettings``."""
        # UCX looks for the thread's device and its context when it starts and on each later call: without a
        # context it leaves CUDA IPC out, or reads a null pointer when it is about to sleep.
        enter_thread()
        self._enter_thread = enter_thread
        self.ucp = load()
        self.array = importlib.import_module("ucxx._lib.arr").Array
        options = {key: value for key, value in OPTIONS.items() if f"UCX_{key}" not in os.environ}
        if "UCX_RNDV_SCHEME" not in os.environ:
            options["RNDV_SCHEME"] = scheme
        options |= extra
        features = (self.ucp.Feature.TAG, self.ucp.Feature.WAKEUP)
        self._context = self.ucp.UCXContext({**options, "RNDV_THRESH": "0"}, features)
        self.worker = self.ucp.UCXWorker(self._context)
        self.worker.init_blocking_progress_mode()
        self.address = bytes(memoryview(self.worker.address))
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._on_crash = on_crash
        self._any_tag = (self.ucp.UCXXTag(0), self.ucp.UCXXTagMask(0))
        self._nothing = self.array(bytearray())
        self._calls: deque[Callable[[], None]] = deque()
        self._posts: list[Callable[[], None]] = []
        self._running: list[tuple[UcxRequest, Callable[[int], None]]] = []
        self._stopping = False
        self._asleep = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kv-ucx-copy", initializer=enter_thread)
        self._thread = threading.Thread(target=self._main, name=f"kv-ucx-{scheme}", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_process)

    @property
    def transports(self) -> frozenset[str]:
        return frozenset(re.findall(r"flags \S+ (\w+)/", self._context.info))

    @property
    def takes_device_memory(self) -> bool:
        """Whether UCX can tell a device's memory from the host's."""
        return bool(self._context.cuda_support)

    def call(self, work: Callable[[], None]) -> None:
        """Have ``work`` done on the thread, soon."""
        self._calls.append(work)
        if self._asleep:
            os.eventfd_write(self._wake, 1)

    def post_on_thread(self, call: Callable[..., None], *args: object) -> None:
        """Have ``call`` made on the event loop, at the end of this turn."""
        self._posts.append(partial(call, *args))

    def look_again(self) -> None:
        """Look at announced pieces again: there may be room for them."""
        self.call(lambda: None)

    def copy_on_thread(self, copy: Callable[[], None], over: Callable[[], None]) -> None:
        """Have ``copy`` made beside the thread, which goes on with UCX's work, and then ``over``."""
        copying = self._copier.submit(copy)

        def end() -> None:
            copying.result()
            over()

        copying.add_done_callback(lambda _: self.call(end))

    def watch_on_thread(self, request: UcxRequest, over: Callable[[int], None]) -> None:
        """Call ``over(status)`` once UCX has reported the request over, however it ended."""
        self._running.append((request, over))

    def _main(self) -> None:
        poller = select.epoll()
        poller.register(self._wake, select.EPOLLIN)
        poller.register(self.worker.epoll_file_descriptor, select.EPOLLIN)
        try:
            self._enter_thread()
            with poller:
                while not self._stopping:
                    self._turn(poller)
        except Exception:
            log.exception("the ucx thread met an error; the worker cannot go on")
            self.post_on_thread(self._on_crash)
        self._make_posts()

    def _turn(self, poller: select.epoll) -> None:
        while self._calls:
            self._calls.popleft()()
        self.worker.progress()
        busy = self._take_messages()
        busy = self._end_requests() or busy
        self._make_posts()
        if not busy and self.worker.arm():  # UCX agrees that nothing is pending
            self._sleep(poller)

    def _sleep(self, poller: select.epoll) -> None:
        self._asleep = True
        if not self._calls and not self._stopping:
            events = poller.poll(_BUSY_WAIT_S if self._running else _IDLE_WAIT_S)
            if any(number == self._wake for number, _ in events):
                os.eventfd_read(self._wake)
        self._asleep = False

    def _take_messages(self) -> bool:
        """Hand announced pieces to the links that posted receives for them, in order, as long as there is
        room."""
        found = False
        while (probe := self.worker.tag_probe(*self._any_tag, False)).matched:
            if not self._deliver(self, probe.sender_tag.value, probe.length):
                break
            found = True
        return found

    def _end_requests(self) -> bool:
        running, self._running = self._running, []
        ended = False
        for request, over in running:
            if request.completed:
                ended = True
                over(request.status)
            else:
                self._running.append((request, over))
        return ended

    def _make_posts(self) -> None:
        posts, self._posts = self._posts, []
        if posts:
            try:
                self._loop.call_soon_threadsafe(_make_soon, self._loop, posts)
            except RuntimeError:  # the loop is closed: the process is ending
                log.debug("a completion came after the event loop had ended")

    def receive_on_thread(self, tag: int, view: memoryview | DeviceView, over: Callable[[int], None]) -> None:
        """Take the first message announced with this tag, which has the size of ``view``."""
        self.watch_on_thread(self.worker.tag_recv(self.array(view), self.ucp.UCXXTag(tag)), over)

    def refuse_on_thread(self, tag: int) -> None:
        """Let the sender of the first message with this tag go: no byte of the message is taken."""
        request = self.worker.tag_recv(self._nothing, self.ucp.UCXXTag(tag))
        self.watch_on_thread(request, _ignore)

    def endpoint_on_thread(self, address: bytes, on_closed: Callable[[], None]) -> UcxEndpoint:
        peer = self.ucp.UCXAddress.create_from_buffer(address)
        endpoint: UcxEndpoint = self.ucp.UCXEndpoint.create_from_worker_address(self.worker, peer, True)
        endpoint.set_close_callback(on_closed)
        return endpoint

    def _stop(self) -> None:
        self._stopping = True

    def _end_with_process(self) -> None:
        """Stop the thread of a process that ends without ``close``: UCX must not be at work when its library
        is unloaded."""
        self.call(self._stop)
        self._thread.join(_STOP_S)

    async def close(self) -> None:
        """Stop the thread. All links must be closed."""
        atexit.unregister(self._end_with_process)
        self.call(self._stop)
        await asyncio.to_thread(self._thread.join)
        self._copier.shutdown()
        os.close(self._wake)
        del self.worker, self._context


def _make_soon(loop: asyncio.AbstractEventLoop, posts: list[Callable[[], None]]) -> None:
    for post in posts:
        loop.call_soon(post)  # each call is separate, so that an error in one leaves the others


def _ignore(status: int) -> None:
    """Ignore the status: a refused message was cut off, as it should be."""
