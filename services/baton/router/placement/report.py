"""The report of a worker that requests are placed by."""

from __future__ import annotations

from typing import NamedTuple

from baton.core.role import Role


class WorkerReport(NamedTuple):
    """The router's view of a worker: its greeting, its last load report, and the requests sent since.
    Measured figures are 0.0 before their first measurement."""

    address: str
    role: Role
    prefill_tokens: int
    """Prompt tokens that wait to be computed, without those that were cached on arrival."""
    sequences: int
    """Sequences that run, wait, or are on their way to the worker."""
    last_given_s: float = 0.0
    """The time at which this router last gave the worker a request, on the router's monotonic clock."""
    accepts: bool = True
    """Whether the worker is ready, does not drain, and may have new requests."""
    group: str = ""
    """The compatibility group; only workers of one group can be paired, unless one ``takes_from`` others."""
    max_running: int = 64
    block_size: int = 16
    blocks_held: int = 0
    blocks_spare: int | None = None
    """KV blocks that are free or reclaimable, and not promised. None: not known, and taken for enough."""
    prefill_tokens_per_s: float = 0.0
    step_base_s: float = 0.0
    step_row_s: float = 0.0
    """The slope of the step time, in seconds: decoding n sequences takes ``step_base_s + n * step_row_s``."""
    chunk_tokens: int = 256
    """Most tokens of a prompt in a step that decodes nothing."""
    mixed_prefill_tokens: int = 256
    """Most tokens of prompts in a step that decodes."""
    kv_bytes_per_token: int = 0
    link_bytes_per_s: float = 0.0
    takes_from: tuple[str, ...] = ()
    """The other groups from whose prefill workers it takes KV over, as it converts that."""
    verifies: bool = False
    """Whether its transfers are compared, so that a worker of another group cannot convert them."""
    unlinked: frozenset[str] = frozenset()
    """The addresses of prefill workers that can never be linked to it."""
