"""Which workers answer a request. Pure: reports in, a choice out; no clock and no I/O."""

from baton.router.placement.options import (
    DISAGGREGATIONS,
    NO_DECODE,
    NO_PREFILL,
    Disaggregation,
    NoDecode,
    NoPrefill,
    PlacementOptions,
)
from baton.router.placement.policy import Choice, Decision, Prompt, choose
from baton.router.placement.report import Role, WorkerReport, may_prefill, takes_over
from baton.router.placement.standing import Standing

__all__ = [
    "DISAGGREGATIONS",
    "NO_DECODE",
    "NO_PREFILL",
    "Choice",
    "Decision",
    "Disaggregation",
    "NoDecode",
    "NoPrefill",
    "PlacementOptions",
    "Prompt",
    "Role",
    "Standing",
    "WorkerReport",
    "choose",
    "may_prefill",
    "takes_over",
]
