"""The planner's decision, and its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from baton.planner.measured import Counts, ServingRole
from baton.planner.sizing import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """An order that ``count`` workers of the other role serve as ``to``."""

    to: ServingRole
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One decision. ``replicas`` are what the Deployments are to ask for, changed or not."""

    size: Size | None
    """The workers that the load needs and what is expected of them; None where nothing could be worked
    out."""
    needed_now: Counts | None
    wanted: Counts
    """Workers of each role that the plan leads to."""
    switches: tuple[Switch, ...]
    replicas: Counts
    reasons: tuple[str, ...]
    """The reasons in words, with the numbers. The first one says what is done."""
    attainable: bool = False
    """Whether the workers needed ahead are expected to meet the targets."""
    held: str = ""
    """Why nothing could be decided; empty if a decision was made."""

    def acts(self, replicas: Counts) -> bool:
        """Whether the plan changes anything where the Deployments ask for ``replicas``."""
        return bool(self.switches) or self.replicas != replicas
