"""The operator's options for placement, and the figures assumed before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Disaggregation = Literal["conditional", "always", "never"]
NoPrefill = Literal["fail", "queue", "local"]
NoDecode = Literal["fail", "queue"]
DISAGGREGATIONS: tuple[Disaggregation, ...] = ("conditional", "always", "never")


class Speeds(NamedTuple):
    """The speeds assumed for a worker that has not measured its own: those of others, or else these
    defaults."""

    tokens_per_s: float = 2000.0
    step_base_s: float = 0.02
    step_row_s: float = 0.0002
    link_bytes_per_s: float = 1e9


HANDOFF_S = 0.005
"""The time of a handoff without the transfer, in seconds: asking for room, binding pages, the final
message."""
MIN_ROW_SHARE = 0.01
"""The least time that another sequence is assumed to add, as a share of a step's base. A fit that finds none,
as on a worker with few sequences, must not make many sequences look free."""


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """A router's placement options."""

    disaggregation: Disaggregation = "conditional"
    """The place where prompts are computed. always: on a prefill worker while one is ready; never: on the
    worker that decodes; conditional: wherever it costs least."""
    itl_target_s: float | None = None
    """The longest step in which a decode worker may compute part of a prompt beside running streams, in
    seconds. None: any, but the streams' delay counts like the prompt's own."""
    no_prefill: NoPrefill = "local"
    """The handling of requests while no prefill worker is ready: refuse them, let them wait for one, or have
    decode workers compute their prompts. Irrelevant where workers of role both are, and with ``never``."""
    no_decode: NoDecode = "queue"
    """The handling of requests while no worker that can decode is ready."""
    expected_outputs: int = 128
    """Tokens that an answer is expected to have, and so the steps that it shares with other answers."""
