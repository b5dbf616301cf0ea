"""The addresses of callers, as bounds count them."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

SUBNET = 64
"""The bits of an IPv6 address that count: a client with one address of such a network usually has all of
them."""


def counted_address(address: str) -> tuple[str, bool]:
    """Return the name under which ``address`` counts, and whether it is of this machine."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a Unix socket's address
        return address, True
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            if parsed.is_loopback:
                return str(parsed), True
            return str(ipaddress.ip_network((parsed, SUBNET), strict=False)), False
        parsed = parsed.ipv4_mapped
    return str(parsed), parsed.is_loopback


def counted_peer(peer: str) -> str:
    """Return the name under which a gRPC caller counts. ``peer``: as gRPC names it, ``ipv4:127.0.0.1:80`` or
    ``ipv6:[::1]:80``, whose brackets may be escaped."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return counted_address(rest.rpartition(":")[0].strip("[]"))[0]
