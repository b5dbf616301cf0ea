"""The network interface that has an address, for libraries that bind to interfaces, not to addresses, and the
RDMA devices."""

from __future__ import annotations

import array
import ctypes
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s4x4s16x")
"""``struct ifreq`` of 64-bit Linux: name, port, IPv4 address, padding."""
_MAX_ADDRESSES = 1024
_IF_INET6 = Path("/proc/net/if_inet6")
_INFINIBAND = Path("/sys/class/infiniband")


def interface_of(host: str) -> str | None:
    """Return the interface that has the address of ``host``; None for a wildcard address, or if none here has
    it."""
    address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    if address.is_unspecified:
        return None
    return _ipv4().get(address.packed) if address.version == 4 else _ipv6().get(address.packed)


def rdma_ports(infiniband: Path | None = None) -> list[str]:
    """Return this host's RDMA devices by port, as UCX names them: ``mlx5_0:1``. ``infiniband``: the folder
    that shows them; None: the kernel's own."""
    ports = sorted((infiniband or _INFINIBAND).glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]


def has_library(name: str) -> bool:
    """Whether a shared library of this name is found, which loads it."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _ipv4() -> dict[bytes, str]:
    buffer = array.array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    start, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", size, start))
    (filled,) = struct.unpack_from("i", answer)
    entries = _IFREQ.iter_unpack(buffer.tobytes()[:filled])
    # An alias such as eth0:1 is an address of eth0.
    return {address: name.rstrip(b"\0").decode().partition(":")[0] for name, address in entries}


def _ipv6() -> dict[bytes, str]:
    lines = _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else []
    return {bytes.fromhex(line.split()[0]): line.split()[5] for line in lines}
