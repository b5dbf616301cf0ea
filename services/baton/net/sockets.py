"""The TCP sockets that Baton opens itself: one way to listen and one to dial, for IPv4 and IPv6.

A host is a name, an IPv4 address, or an IPv6 address as it is written alone: without brackets, with its zone
(``fe80::1%eth0``) where it has one. Brackets belong to ``host:port`` (``options.join_address``).
"""

from __future__ import annotations

import ipaddress
import socket

from baton.process.options import join_address

BACKLOG = 128


def listen(host: str, port: int, *, backlog: int = BACKLOG, reuse_port: bool = False) -> socket.socket:
    """Return a listener at ``host`` and ``port`` (0: any free one).

    "0.0.0.0" (and "") is every IPv4 address; "::" is every address of both families, or of IPv6 alone where
    the kernel separates them. For a name with addresses of both families, the IPv4 address is used.
    ``reuse_port``: other sockets may listen there too. Raises OSError.
    """
    family, address = _place(host, port)
    return socket.create_server(
        address,
        family=family,
        backlog=backlog,
        reuse_port=reuse_port,
        dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6(),
    )


def _place(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address  # type: ignore[return-value]  # an IPv6 one has two more numbers, which bind takes


def dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection to ``host``, at the first of its addresses that accepts one. It blocks, each
    operation for at most ``timeout_s`` seconds. Raises OSError."""
    return socket.create_connection((host, port), timeout_s)


def own_host(sock: socket.socket) -> str:
    """Return the address of this end. It is an IPv4 address when an IPv4 peer calls a listener of both
    families."""
    host, _, *more = sock.getsockname()
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if more[1]:  # the zone, without which a link-local address means nothing
            return f"{host}%{socket.if_indextoname(more[1])}"
    return str(address)


def own_address(sock: socket.socket) -> str:
    """Return ``host:port`` of this end."""
    return join_address(own_host(sock), sock.getsockname()[1])
