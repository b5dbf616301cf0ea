"""What is known of a worker when a request is placed."""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["prefill", "decode", "both"]


def may_prefill(role: Role) -> bool:
    """Whether such a worker may compute prompts for decode workers."""
    return role != "decode"


def takes_over(role: Role) -> bool:
    """Whether requests are handed on to such a worker."""
    return role == "decode"


class WorkerReport(NamedTuple):
    """What the router knows of a worker: its greeting, its last load report, and what the router has sent
    since. A figure that is measured is 0.0 before it is."""

    address: str
    role: Role
    prefill_tokens: int
    """Prompt tokens that wait there to be computed, less what was cached when they came."""
    sequences: int
    """Running, waiting, and on their way there."""
    last_given_s: float = 0.0
    """When this router last gave it a request, by the router's monotonic clock."""
    accepts: bool = True
    """It is ready, does not drain, and may have new requests."""
    group: str = ""
    """Only workers of one group can be paired."""
    max_running: int = 64
    block_size: int = 16
    blocks_held: int = 0
    blocks_spare: int | None = None
    """Free or reclaimable, and not promised. None: not known, and taken for enough."""
    prefill_tokens_per_s: float = 0.0
    step_base_s: float = 0.0
    step_row_s: float = 0.0
    """A step that decodes n sequences takes ``step_base_s + n * step_row_s``."""
    chunk_tokens: int = 256
    """Most tokens of a prompt in a step that decodes nothing."""
    mixed_prefill_tokens: int = 256
    """Most tokens of prompts in a step that decodes."""
    kv_bytes_per_token: int = 0
    link_bytes_per_s: float = 0.0
