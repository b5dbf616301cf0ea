"""``baton planner``."""

from __future__ import annotations

from baton.cli.derived import Given, OptionsOf, takes
from baton.planner.config import PlannerConfig
from baton.process.options import StartError


@takes(OptionsOf(PlannerConfig))
def planner(given: Given) -> int:
    """Size prefill and decode as one decision, from what the ring measures.

    Asks Prometheus, scales two Deployments, and has workers change roles where that is sooner than a new pod.
    One planner for a ring; no autoscaler beside it.
    """
    try:
        from baton.planner.main import run
    except ImportError:
        raise StartError(
            "baton planner needs the Kubernetes client: pip install 'baton[kubernetes]'"
        ) from None
    return run(PlannerConfig(**given.fields(PlannerConfig)))
