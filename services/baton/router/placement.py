"""Which workers answer a request. Pure: reports in, a choice out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode", "both"]


def may_prefill(role: Role) -> bool:
    """Whether such a worker may compute prompts for decode workers."""
    return role != "decode"


def takes_over(role: Role) -> bool:
    """Whether requests are handed on to such a worker."""
    return role == "decode"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the router knows of a worker that takes requests: its last report, and what was sent since."""

    address: str
    role: Role
    prefill_tokens: int
    """Prompt tokens that wait there to be computed."""
    sequences: int
    """Running and waiting."""
    last_given_s: float = 0.0
    """When this router last gave it a request, by the router's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request runs. Without ``prefill`` the decode worker computes the prompt as well."""

    decode: str
    prefill: str | None = None


def least_loaded(workers: Sequence[WorkerReport]) -> Choice | None:
    """The prefill worker with the fewest waiting prompt tokens and the decode worker with the fewest
    sequences; or a ``both`` worker that has fewer sequences than that decode worker. Among equals, whoever
    was given nothing for longest.

    With no prefill worker ready, decode computes the prompt itself. None: nobody can decode.
    """
    decoders = [w for w in workers if w.role in ("decode", "both")]
    if not decoders:
        return None
    decode = min(decoders, key=lambda w: (w.sequences, w.prefill_tokens, w.last_given_s, w.address))
    prefills = [w for w in workers if w.role == "prefill"]
    if decode.role == "both" or not prefills:
        return Choice(decode.address)
    prefill = min(prefills, key=lambda w: (w.prefill_tokens, w.sequences, w.last_given_s, w.address))
    return Choice(decode.address, prefill.address)
