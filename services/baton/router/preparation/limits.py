"""The bounds of reading a body in a process."""

from __future__ import annotations

CPU_S = 20.0
"""Most CPU time for one body; the process dies of more. The largest that can be answered take two."""
WALL_S = 60.0
"""Until a process that has not answered is ended, whatever it has used: the machine may be too busy."""
ADDRESS_BYTES = 1 << 30
"""Address space of a process: a million tokens are 270 MiB of encoding, and JSON of 8 MiB may be 150 MiB."""
OUT_OF_MEMORY = 3
"""Exit status of a process that has no room to say so otherwise."""
TOO_MUCH_MEMORY = "The request takes too much memory to be read; send less, or less deeply nested."
RENEW_BYTES = 128 << 20
"""A process that holds more memory after a body ends, and another takes its place."""
NICENESS = 10
"""The event loop, and workers on the same machine, go first where there are fewer cores than work."""
MAX_ANSWER_BYTES = 256 << 20

LEAST_PROCESSES, MOST_PROCESSES = 2, 8
"""With two at least, there is one for small bodies while another reads a large one."""
LARGE_BYTES = 128 << 10
PROCESSES_PER_LARGE = 4
"""Of so many processes one is for bodies of more than ``LARGE_BYTES``, and one in any case: only those take
much memory and long, up to 200 MiB and a second or two."""
IDLE_S = 60.0
"""After which a process that has nothing to do ends; one stays."""

QUEUED_BODIES = 256
QUEUED_BYTES = 64 << 20
"""Of all bodies that wait."""
LONGEST_WAIT_S = 10.0
"""For a process; a wait that takes three times as long is given up."""
BYTES_PER_S = 4 << 20
"""That a process usually reads: a second of its time counts as much for its tenant."""

IDS_AT_ONCE = 64 * 1024
"""Token ids that are taken in, in one turn of the event loop."""
