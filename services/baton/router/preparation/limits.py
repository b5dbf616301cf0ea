"""The bounds of reading a body in a process."""

from __future__ import annotations

CPU_S = 20.0
"""The most CPU time for one body, in seconds; the process dies of more. The largest bodies that can be
answered take two."""
WALL_S = 60.0
"""The time after which a process that has not answered is killed, in seconds, whatever CPU time it used: the
machine may be too busy."""
ADDRESS_BYTES = 1 << 30
"""The address space of a process, in bytes: a million tokens are 270 MiB of encoding, and JSON of 8 MiB may
be 150 MiB."""
OUT_OF_MEMORY = 3
"""The exit status of a process that has no memory left to say so otherwise."""
TOO_MUCH_MEMORY = "The request takes too much memory to be read; send less, or less deeply nested."
RENEW_BYTES = 128 << 20
"""The memory of a process, in bytes, above which it ends after a body, and another takes its place."""
NICENESS = 10
"""The niceness of a process: the event loop, and workers on the same machine, go first where there are fewer
cores than work."""
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

QUEUED_BODIES = 256
QUEUED_BYTES = 64 << 20
"""The most bytes of all bodies that wait."""
MAX_WAIT_S = 10.0
"""The longest wait for a process, in seconds; a wait that takes three times as long is given up."""
BYTES_PER_S = 4 << 20
"""The bytes that a process usually reads per second: a second of its time counts as many for its tenant."""

IDS_AT_ONCE = 64 * 1024
"""The number of token ids that are unpacked in one turn of the event loop."""
