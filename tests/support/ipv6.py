"""Whether there is IPv6 here: tests of it run wherever ``::1`` can be listened on."""

from __future__ import annotations

import socket

import pytest


def _why_not() -> str:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"NOT TESTED: no IPv6 here, as ::1 cannot be listened on ({error.strerror})"
    return ""


needs_ipv6 = pytest.mark.skipif(bool(_why_not()), reason=_why_not())
