"""The share of the ring that one router may use at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.router.fleet.worker_client import WorkerClient

BEYOND = 1.25
"""The ratio of what may be open to what the workers run at once. The excess waits on the workers, so that no
seat stays empty for the time that the news of it takes."""
BEFORE_PREFILL = 4
"""The number of requests per prefill worker that may be open beside the requests that are being answered."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that may be open at once."""

    seats: int
    """The number of answers."""
    tokens: int | None = None
    """Tokens of prompts and answers together; None: no bound."""
    spare: int = 0
    """Tokens that there is room for now, by the workers' last reports. Prompts that share blocks need less
    than ``tokens`` says, and this shows it."""


def capacity_of(workers: Iterable[WorkerClient], routers: int) -> Capacity | None:
    """Return what this router, one of ``routers`` equal ones, may use; None while no worker could answer."""
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
