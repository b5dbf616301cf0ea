"""The bounds of reading a body in a process."""

from __future__ import annotations

import msgspec


class BodyLimits(msgspec.Struct, frozen=True):
    """The bounds of a process that reads bodies. Beyond one, it ends."""

    cpu_s: float
    """The most CPU time for one body, in seconds."""
    render_s: float
    """The most CPU time of a chat template for one body, in seconds."""
    wall_s: float
    """The time after which a process that has not answered is killed, in seconds, whatever CPU time it used:
    the machine may be too busy."""
    address_bytes: int
    """The most address space, in bytes."""
    beside_bytes: int | None = None
    """The most address space beside what the process has when it is ready, in bytes; None: no further
    bound."""


USUAL = BodyLimits(cpu_s=20.0, render_s=5.0, wall_s=60.0, address_bytes=1 << 30)
"""The bounds for large bodies. The largest ones that can be answered take two seconds. A million tokens are
270 MiB of encoding, and JSON of 8 MiB may be 150 MiB."""
QUICK = BodyLimits(
    cpu_s=2.0, render_s=1.0, wall_s=20.0, address_bytes=USUAL.address_bytes, beside_bytes=256 << 20
)
"""The bounds for small bodies, of which none takes a twentieth of a second with a template that only writes
messages."""
OUT_OF_MEMORY = 3
"""The exit status of a process that has no memory left to say so otherwise."""
TOO_MUCH_MEMORY = "The request takes too much memory to be read; send less, or less deeply nested."
RENEW_BYTES = 96 << 20
"""The memory of a process beyond what it has with its models loaded, in bytes, above which it ends after a
body, and another takes its place."""
NICENESS = 10
"""The niceness of a process for large bodies: the event loop, and workers on the same machine, go first where
there are fewer cores than work."""
MAX_ANSWER_BYTES = 256 << 20

MIN_PROCESSES, MAX_PROCESSES = 2, 8
"""Bounds on the number of processes. With at least two, one reads small bodies while another reads a large
one."""
LARGE_BYTES = 128 << 10
PROCESSES_PER_LARGE = 4
"""The number of processes for each that reads bodies of more than ``LARGE_BYTES``; one does in any case. Only
such bodies take much memory and time, up to 200 MiB and a second or two."""
IDLE_S = 60.0
"""The time after which an idle process ends, in seconds; one process stays."""

QUICK_BYTES = 16 * 1024
"""The most bytes of a body that processes of their own read, which are ready before it comes."""
QUICK_SEATS = 4
"""The most processes for such bodies."""
GROW_S = 0.05
"""The wait of a small body, in seconds, after which another process for small bodies is started."""
START_S = 120.0
"""The time that such a process has to load the tokenizers of all models, in seconds."""
START_AGAIN_S = 1.0
"""The time until another is started in place of one that could not be, in seconds."""

QUEUED_BODIES = 256
QUEUED_BYTES = 64 << 20
"""The most bytes of all bodies that wait."""
MAX_WAIT_S = 10.0
"""The longest wait for a process, in seconds; a wait that takes three times as long is given up."""
BYTES_PER_S = 4 << 20
"""The bytes that a process usually reads per second: a second of its time counts as many for its tenant."""

IDS_AT_ONCE = 64 * 1024
"""The number of token ids that are unpacked in one turn of the event loop."""
