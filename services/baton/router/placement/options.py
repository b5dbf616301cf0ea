"""What an operator decides about placement, and what is taken for granted before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Disaggregation = Literal["conditional", "always", "never"]
NoPrefill = Literal["fail", "queue", "local"]
NoDecode = Literal["fail", "queue"]
NO_PREFILL: tuple[NoPrefill, ...] = ("fail", "queue", "local")
NO_DECODE: tuple[NoDecode, ...] = ("fail", "queue")
DISAGGREGATIONS: tuple[Disaggregation, ...] = ("conditional", "always", "never")


class Speeds(NamedTuple):
    """Taken for a worker that has not measured its own: what others have, and before that these."""

    tokens_per_s: float = 2000.0
    step_base_s: float = 0.02
    step_row_s: float = 0.0002
    link_bytes_per_s: float = 1e9


HANDOFF_S = 0.005
"""What a handoff takes besides the bytes: asking for room, binding pages, the last word."""
LEAST_ROW_SHARE = 0.01
"""Least part of a step's base that another sequence is taken to add. A fit that finds nothing, as on a worker
with few sequences, must not make a crowd look free."""


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """How a router places."""

    disaggregation: Disaggregation = "conditional"
    """always: a prompt is computed on a prefill worker while one is ready; never: where it is answered."""
    itl_target_s: float | None = None
    """Longest step in which a decode worker may compute part of a prompt beside running streams. None: any,
    but the streams' delay counts like the prompt's own."""
    no_prefill: NoPrefill = "local"
    """While no prefill worker is ready: refuse requests, let them wait for one, or have the decode workers
    compute their prompts. Of no concern where workers of role both are, nor with ``never``."""
    no_decode: NoDecode = "queue"
    """While nobody is ready who could answer."""
    expected_outputs: int = 128
    """Tokens that an answer is expected to have: for so many steps it shares them with others."""
