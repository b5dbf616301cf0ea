"""The choice of the workers that answer a request. Pure: reports in, a choice out; no clock and no I/O."""

from baton.router.placement.estimate import Estimate
from baton.router.placement.options import (
    DISAGGREGATIONS,
    Disaggregation,
    NoDecode,
    NoPrefill,
    PlacementOptions,
)
from baton.router.placement.policy import Choice, Decision, Prompt, choose
from baton.router.placement.report import WorkerReport

__all__ = [
    "DISAGGREGATIONS",
    "Choice",
    "Decision",
    "Disaggregation",
    "Estimate",
    "NoDecode",
    "NoPrefill",
    "PlacementOptions",
    "Prompt",
    "WorkerReport",
    "choose",
]
