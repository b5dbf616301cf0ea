"""What the planner decided, and why."""

from __future__ import annotations

from dataclasses import dataclass

from baton.planner.measured import Counts, ServingRole
from baton.planner.sizing import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """So many workers of the other role are to serve as ``to``."""

    to: ServingRole
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One decision. ``replicas`` are what the Deployments are to ask for, whether or not that is a change."""

    size: Size | None
    """What the load needs, and what is expected then; None where nothing could be worked out."""
    needed_now: Counts | None
    wanted: Counts
    """Workers of each role to end up with."""
    switches: tuple[Switch, ...]
    replicas: Counts
    reasons: tuple[str, ...]
    """In words, with the numbers. The first says what is done."""
    attainable: bool = False
    """Whether what is needed ahead is expected to meet the targets."""
    held: str = ""
    """Why nothing could be decided; empty if something was."""

    def acts(self, replicas: Counts) -> bool:
        """Whether anything is to be done, where the Deployments ask for ``replicas``."""
        return bool(self.switches) or self.replicas != replicas
