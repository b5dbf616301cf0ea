"""The limit of files and sockets that the process may have open at once."""

from __future__ import annotations

import resource

MOST = 1 << 20
"""The highest soft limit set. A hard limit may be far higher than any process needs, and some programs
iterate over all possible descriptors."""


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
