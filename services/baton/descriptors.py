"""How many files and sockets the process may have open at once."""

from __future__ import annotations

import resource

MOST = 1 << 20
"""A hard limit may be far above what any process needs, and some programs look at each that there may be."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, to a million at most. Returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return soft
