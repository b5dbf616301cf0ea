"""What an operator decides about placement, and what is taken for granted before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Disaggregation = Literal["conditional", "always", "never"]
DISAGGREGATIONS: tuple[Disaggregation, ...] = ("conditional", "always", "never")

FIRST_TOKENS_PER_S = 2000.0
"""Of a worker that has computed no prompt, while no other of its group has either."""
FIRST_STEP_S = 0.02
"""Of a decode worker that has decoded nothing yet."""
FIRST_LINK_BYTES_PER_S = 1e9
"""Of a prefill worker that has sent nothing yet."""
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
    expected_outputs: int = 128
    """Tokens that an answer is expected to have: for so many steps it shares them with others."""
