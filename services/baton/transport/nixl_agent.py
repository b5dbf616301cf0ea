"""NIXL as one end of a link uses it: an agent of its own, whose end is the fence.

What NIXL 1.5 promises of its UCX backend, and what follows from that:

- A transfer that reports its end is over at both ends: it is flushed first, which the receiving side answers.
  Its notification goes out after that.
- Releasing a transfer that runs is *no* proof: UCX cannot cancel a write, NIXL frees the request all the
  same, and the bytes go on moving. Only the end of the agent stops them: its progress thread is joined and
  its UCX worker destroyed, with every connection (sockets closed, queue pairs gone) and every registration.
  So each link has an agent for itself, which ``close`` ends.
- The end of an agent stops what this process or its network adapter writes. It cannot stop a *peer* that
  writes by itself: cross-memory attach on one host, or CUDA IPC into a pool on a device. The first is not
  used, unless the user's ``UCX_TLS`` allows it. Where one of them may be in use, the link waits for the
  peer, too.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.transport.base import DeviceView, TransferError

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

PACKAGE = "nixl_cu13"
_BACKEND = "UCX"
_WAKE_US = 10_000
"""The longest sleep of an agent's progress thread. UCX wakes it; should UCX ever forget to, little time is
lost. NIXL's own Python class sets 0, with which the thread never sleeps."""
_COPIES_BY_PEER = ("cma", "sm", "shm", "all")
"""Names in ``UCX_TLS`` that allow cross-memory attach."""
MAX_METADATA = 1 << 20
"""Most bytes of an agent's metadata: a few hundred per network device and registered region."""


@dataclass(frozen=True, slots=True)
class AddressRange:
    """Adjacent bytes at an address."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """The memory that addresses are in: the host's (``device`` None), or a CUDA device's."""

    device: int | None = None


HOST = MemoryKind()


def span_of(view: memoryview | DeviceView) -> AddressRange:
    if isinstance(view, DeviceView):
        return AddressRange(view.pointer, view.nbytes)
    return AddressRange(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)


def kind_of(view: memoryview | DeviceView) -> MemoryKind:
    return MemoryKind(view.device) if isinstance(view, DeviceView) else HOST


def load() -> ModuleType:
    """Import NIXL's bindings, or raise ImportError. The package sets up logging when it is imported: to
    standard output, which is Baton's own, and for the whole process."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    raise_exceptions = logging.raiseExceptions
    bindings = importlib.import_module(f"{PACKAGE}._bindings")
    logging.raiseExceptions = raise_exceptions
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    return bindings


def peer_may_copy(tls: str) -> bool:
    """Return whether ``UCX_TLS`` of this value allows cross-memory attach, by which a peer on this host
    writes by itself."""
    names = {name.strip().lstrip("\\") for name in tls.removeprefix("^").split(",")}
    return names.isdisjoint(_COPIES_BY_PEER) == tls.startswith("^")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that the user has not set."""
    added = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


class AgentFactory:
    """Makes the agents of a worker, all with the same options of UCX."""

    def __init__(self, options: Mapping[str, str], device: int | None = None) -> None:
        """``options``: options of UCX, without their prefix ``UCX_``; those in the environment go first.
        ``device``: the CUDA device of the pool. Raises ImportError without NIXL."""
        self._device = device
        self._library = load()
        self._options = {"TLS": "^cma", **options}
        self.peer_may_copy = peer_may_copy(os.environ.get("UCX_TLS", self._options["TLS"]))
        self._starting = threading.Lock()
        """Held while an agent starts, as its options may pass through the environment."""

    def make(self) -> NixlAgent:
        """Start an agent. Raises TransferError where UCX does not start."""
        if self._device is not None:
            _enter(self._device)
        # NIXL splits what it is given for UCX at commas, so that lists can only come from the environment.
        lists = {f"UCX_{key}": value for key, value in self._options.items() if "," in value}
        single = ",".join(f"{key}={value}" for key, value in self._options.items() if "," not in value)
        with self._starting, _environment(lists):
            return NixlAgent(self._library, single)


class NixlAgent:
    """One end of one link. Methods raise TransferError for what NIXL refuses; they are for one thread."""

    def __init__(self, library: ModuleType, engine_config: str) -> None:
        self._library = library
        self._errors = tuple(
            error
            for name, error in vars(library).items()
            if name.endswith("Error") and isinstance(error, type) and issubclass(error, Exception)
        )
        self._registered: list[memoryview | DeviceView] = []
        self._running: set[int] = set()
        self._peer = ""
        config = library.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = library.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = _WAKE_US
        config.captureTelemetry = False
        with self._refusals("UCX does not start"):
            self._agent = library.nixlAgent(os.urandom(16).hex(), config)
            self._backend = self._agent.createBackend(_BACKEND, {"engine_config": engine_config})

    @contextmanager
    def _refusals(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(f"{what}: {error}") from None  # a traceback would keep the agent

    def _segment(self, kind: MemoryKind) -> object:
        return self._library.DRAM_SEG if kind.device is None else self._library.VRAM_SEG

    def register(self, memory: memoryview | DeviceView) -> bytes:
        """Let the peer write to this memory, and this end read it. Returns what the peer must be told
        (``meet``) before it writes there."""
        kind, span = kind_of(memory), span_of(memory)
        regions = self._library.nixlRegDList(
            self._segment(kind), [(span.address, span.nbytes, kind.device or 0, "")]
        )
        with self._refusals(f"{span.nbytes} bytes could not be registered"):
            self._agent.registerMem(regions, [self._backend])
            self._registered.append(memory)
            metadata: bytes = self._agent.getLocalPartialMD(regions, True, [self._backend])
        return metadata

    def meet(self, metadata: bytes) -> None:
        """Take what the peer's ``register`` returned."""
        with self._refusals("the peer's NIXL metadata is malformed"):
            name = self._agent.loadRemoteMD(metadata).decode()
        if self._peer not in ("", name):
            raise TransferError("the peer's NIXL metadata is another agent's")
        self._peer = name

    def write(
        self,
        ours: tuple[MemoryKind, Sequence[AddressRange]],
        theirs: tuple[MemoryKind, Sequence[AddressRange]],
        notice: bytes,
    ) -> int:
        """Start a transfer to the peer's memory, span by span, and let ``notice`` follow it. Returns its
        handle, for ``over``."""
        lists = [
            self._library.nixlXferDList(
                self._segment(kind), [(span.address, span.nbytes, kind.device or 0) for span in spans]
            )
            for kind, spans in (ours, theirs)
        ]
        with self._refusals("the write was refused"):
            handle: int = self._agent.createXferReq(
                self._library.NIXL_WRITE, *lists, self._peer, notice, [self._backend]
            )
            self._running.add(handle)
            self._agent.postXferReq(handle, notice)
        return handle

    def over(self, handle: int) -> bool:
        """Return whether the peer has all bytes of a transfer. After True the handle is no more. Raises
        TransferError if it never will."""
        with self._refusals("a write failed"):
            status = self._agent.getXferStatus(handle)
            if status == self._library.NIXL_IN_PROG:
                return False
            self._running.discard(handle)
            self._agent.releaseXferReq(handle)
        if status != self._library.NIXL_SUCCESS:
            raise TransferError(f"a write ended with {status}")
        return True

    def notices(self) -> list[bytes]:
        """Return the notices that have come, each after its bytes."""
        with self._refusals("no notices"):
            return [notice for some in self._agent.getNotifs({}, []).values() for notice in some]

    def close(self) -> None:
        """End the agent: when this returns, no byte moves between this end's memory and any connection."""
        for handle in self._running:
            with suppress(*self._errors):  # the end of the agent ends it all the same
                self._agent.releaseXferReq(handle)
        self._running.clear()
        del self._agent  # joins its thread and destroys its connections and registrations
        for device in {kind_of(memory).device for memory in self._registered} - {None}:
            _synchronize(device)
        self._registered.clear()


def _enter(device: int) -> None:
    """Make a device's context the calling thread's: without one UCX takes its memory for host memory."""
    import torch

    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).synchronize()  # setting the device alone may make no context


def _synchronize(device: int | None) -> None:
    """Wait for the copies that a device does by itself, as CUDA IPC has them done."""
    import torch

    torch.cuda.synchronize(device)
