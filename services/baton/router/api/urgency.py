"""From what a client says of the urgency of its request to `Urgency`, the same for every protocol."""

from __future__ import annotations

import math
import time

from baton.router.api.errors import invalid, shown
from baton.router.security.client import Client
from baton.router.types import ModelInfo
from baton.urgency import MOST_PRIORITY, Urgency

LONGEST_TIMEOUT_S = 86400.0


def check_priority(priority: int | None) -> int | None:
    """``priority``. Raises RequestError for one that no request may have."""
    if priority is not None and not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise invalid(
            "priority",
            f"priority must be between {-MOST_PRIORITY} and {MOST_PRIORITY}, not {shown(priority)}.",
        )
    return priority


def resolve_urgency(
    priority: int | None,
    timeout_s: float | None,
    model: ModelInfo,
    *,
    started: float,
    timeout_param: str = "timeout",
    client: Client | None = None,
) -> Urgency:
    """Check what is given and set the clock: ``started`` is when the request arrived, by
    ``time.perf_counter``.

    Raises ApiError for values out of range, and, as vLLM does, for a priority where the workers do not
    schedule by priority.
    """
    # Where nobody goes before anybody, all that a key may be kept from is kept from everybody.
    least = client.most_urgent if client is not None and model.takes_priorities else -MOST_PRIORITY
    priority = check_priority(priority)
    if priority is None:
        priority = max(0, least)
    if priority < least:
        raise invalid(
            "priority", f"priority is {priority}, but this key's requests may have {least} at least."
        )
    if priority and not model.takes_priorities:
        raise invalid(
            "priority",
            f"priority is {priority}, but only 0 is allowed: this server's workers run with "
            "--scheduling-policy fcfs.",
        )
    if timeout_s is not None and not (math.isfinite(timeout_s) and 0 < timeout_s <= LONGEST_TIMEOUT_S):
        raise invalid(
            timeout_param,
            f"{timeout_param} must be above 0 and at most {LONGEST_TIMEOUT_S:g} seconds, not {timeout_s:g}.",
        )
    since = time.monotonic() - (time.perf_counter() - started)
    return Urgency(priority, since, None if timeout_s is None else since + timeout_s)
