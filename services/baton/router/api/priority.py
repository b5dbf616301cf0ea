"""The check of a request's priority and timeout, the same for every protocol."""

from __future__ import annotations

import math
import time

from baton.core.priority import MAX_PRIORITY, Priority
from baton.router.api.errors import invalid, shown
from baton.router.dispatch.types import ModelInfo
from baton.router.security.client import Client

MAX_TIMEOUT_S = 86400.0


def check_priority(priority: int | None) -> int | None:
    """Return ``priority``. Raises RequestError if no request may have it."""
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise invalid(
            "priority",
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {shown(priority)}.",
        )
    return priority


def resolve_priority(
    priority: int | None,
    timeout_s: float | None,
    model: ModelInfo,
    *,
    started: float,
    timeout_param: str = "timeout",
    client: Client | None = None,
) -> Priority:
    """Check the priority and the timeout, and compute the deadline: ``started`` is when the request arrived,
    by ``time.perf_counter``.

    Raises RequestError for values out of range. Where the workers do not schedule by priority, there is none:
    a priority cannot change an answer.
    """
    # Without scheduling by priority, a key's bound on priorities needs no check: no request goes first.
    least = client.most_urgent if client is not None and model.takes_priorities else -MAX_PRIORITY
    priority = check_priority(priority)
    if priority is None:
        priority = max(0, least)
    if priority < least:
        raise invalid(
            "priority", f"priority is {priority}, but this key's requests may have {least} at least."
        )
    if not model.takes_priorities:
        priority = 0
    if timeout_s is not None and not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise invalid(
            timeout_param,
            f"{timeout_param} must be above 0 and at most {MAX_TIMEOUT_S:g} seconds, not {timeout_s:g}.",
        )
    since = time.monotonic() - (time.perf_counter() - started)
    return Priority(priority, since, None if timeout_s is None else since + timeout_s)
