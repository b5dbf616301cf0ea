"""The clock of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from baton.doctor.finding import Finding, note, ok
from baton.doctor.machine import Machine
from baton.doctor.wanted import Wanted

_UNSYNCHRONIZED = 5
"""``TIME_ERROR``: what ``adjtimex`` returns of a clock that nothing synchronizes."""


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Whether something keeps the clock. Nothing waits by it; logs, traces and certificates go by it."""
    state = machine.clock_state()
    if state is None:
        yield note("clock", "the kernel does not say whether it is synchronized")
    elif state == _UNSYNCHRONIZED:
        yield note(
            "clock",
            "nothing synchronizes it: logs and traces of several nodes, and certificates, go by it",
            "run chrony or systemd-timesyncd on the node",
        )
    else:
        yield ok("clock", "synchronized")
