"""How much of the ring one router may use at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.router.workers import WorkerClient

BEYOND = 1.25
"""What may be open, of what the workers run at once: the rest waits there, so that no seat is empty for the
time it takes to hear that one is."""
BEFORE_PREFILL = 4
"""Requests for each prefill worker, beside those that are being answered."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be open at once."""

    seats: int
    """Answers."""
    tokens: int | None = None
    """Of prompts and answers together; None: no bound."""
    spare: int = 0
    """Tokens that there is room for now, by what workers reported last. Prompts that share blocks need less
    than ``tokens`` says, and this shows it."""


def capacity_of(workers: Iterable[WorkerClient], routers: int) -> Capacity | None:
    """What this router may use, one of ``routers`` that are alike; None while no worker could answer."""
    seats = tokens = spare = before = 0
    for worker in workers:
        hello, load = worker.hello, worker.load
        if hello is None or not worker.usable:
            continue
        if worker.role == "prefill":
            before += BEFORE_PREFILL
            continue
        seats += hello.max_running
        tokens += hello.num_blocks * hello.block_size
        spare += max(0, load.blocks_free + load.blocks_cached - load.blocks_reserved) * hello.block_size
    if not seats:
        return None
    own = math.ceil(seats * BEYOND / routers) + before
    return Capacity(own, math.ceil(tokens * BEYOND / routers), spare // routers)
