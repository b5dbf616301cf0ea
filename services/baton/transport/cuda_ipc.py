"""Whether a process on this host can read another's CUDA memory, which is tried with the driver itself.

Two pods of one node share no namespace of processes and no host name. What says that they are on one host is
the kernel's boot id, and what says that one can reach the other's device is that it sees a device of that
UUID and can open a handle to the memory. A pool of memory that is mapped piece by piece (torch's expandable
segments) has no such handle.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

UUID_BYTES, HANDLE_BYTES = 16, 64
_LAZY_PEER_ACCESS = 1
_LIBRARY = "libcuda.so.1"


def host_id() -> bytes:
    """Return 32 bytes that are equal for two processes on one running kernel, in whatever containers; empty
    if the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return b""
    return hashlib.sha256(boot.encode()).digest()


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaIpc:
    """The driver's interprocess memory, for the device whose context is current on the calling thread."""

    def __init__(self, library: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> None:
        """Raises OSError where there is no CUDA driver or no context."""
        self._cuda = library(_LIBRARY)
        device = ctypes.c_int()
        self._demand("cuCtxGetDevice", self._cuda.cuCtxGetDevice(ctypes.byref(device)))
        self.uuid = self._uuid_of(device)
        self.visible = frozenset(self._visible())
        """The UUIDs of the devices that this process sees."""

    def _demand(self, call: str, status: int) -> None:
        if status:
            raise OSError(f"{call} ended with the CUDA error {status}")

    def _uuid_of(self, device: ctypes.c_int) -> bytes:
        uuid = (ctypes.c_ubyte * UUID_BYTES)()
        self._demand("cuDeviceGetUuid", self._cuda.cuDeviceGetUuid(ctypes.byref(uuid), device))
        return bytes(uuid)

    def _visible(self) -> list[bytes]:
        count = ctypes.c_int()
        self._demand("cuDeviceGetCount", self._cuda.cuDeviceGetCount(ctypes.byref(count)))
        found = []
        for ordinal in range(count.value):
            device = ctypes.c_int()
            self._demand("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(device), ordinal))
            found.append(self._uuid_of(device))
        return found

    def handle(self, pointer: int) -> bytes:
        """Return a handle by which another process can open the memory at ``pointer``; empty if there is
        none."""
        handle = _Handle()
        status = self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer))
        if status:
            log.info("the KV pool cannot be shared between processes: CUDA error %d", status)
            return b""
        return bytes(handle.reserved)

    def opens(self, handle: bytes) -> bool:
        """Whether this process can open the memory of another by its handle."""
        given = _Handle.from_buffer_copy(handle)
        pointer = ctypes.c_uint64()
        status = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), given, _LAZY_PEER_ACCESS)
        if status:
            log.info("a peer's KV pool on this host cannot be opened: CUDA error %d", status)
            return False
        self._demand("cuIpcCloseMemHandle", self._cuda.cuIpcCloseMemHandle(pointer))
        return True
