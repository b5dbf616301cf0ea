"""Metrics of the attempts that a router's requests take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Cause = Literal["worker_lost", "handoff", "refused", "drain"]
"""Why an attempt ended before its request did: the worker died or was silent, the handoff broke, the worker
refused to begin (no room, or no link), or the worker drains."""
Placement = Literal["handoff", "local"]
Reason = Literal["poison_request", "worker_lost", "worker_error", "retry_budget", "no_worker", "queue_full"]
"""Why a request was given up on. Except for ``retry_budget`` and ``queue_full``, the client is told the same
word."""

PAUSE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds for the pause between two attempts, in seconds."""


class ResumeMetrics:
    """Counts of attempts. Each instance belongs to the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.attempts = Counter(
            "baton_attempts",
            "Attempts submitted to workers; a request, with all its answers, takes one if nothing breaks.",
            registry=registry,
        )
        self._placements = Counter(
            "baton_placements",
            "Attempts by where their prompt is computed: handoff (on a prefill worker) or local (where the "
            "answer is written).",
            ("placement",),
            registry=registry,
        )
        self._resumes = Counter(
            "baton_resumes",
            "Attempts that ended before their request did, by cause; another one followed, from its tokens.",
            ("cause",),
            registry=registry,
        )
        self._given_up = Counter(
            "baton_requests_given_up",
            "Requests that ended in an error since no further attempt was made, by reason.",
            ("reason",),
            registry=registry,
        )
        self.pause = Histogram(
            "baton_resume_pause_seconds",
            "From the end of an attempt, as the router learnt of it, to the request's next token.",
            registry=registry,
            buckets=PAUSE_BUCKETS,
        )
        self._placed: dict[str, Counter] = {
            value: self._placements.labels(value) for value in get_args(Placement)
        }
        for family, values in (
            (self._resumes, Cause),
            (self._given_up, Reason),
        ):
            for value in get_args(values):  # exported as 0 from the start, or the first one goes unseen
                family.labels(value)
        self._counts: list[Callable[[], int]] = []
        self._waiting = Gauge(
            "baton_requests_waiting", "Requests that wait for a worker to take them.", registry=registry
        )

    def placed(self, placement: Placement) -> None:
        """Count an attempt that begins, with its prompt computed at ``placement``."""
        self._placed[placement].inc()

    def resumed(self, cause: Cause) -> None:
        self._resumes.labels(cause).inc()

    def gave_up(self, reason: Reason) -> None:
        self._given_up.labels(reason).inc()

    def watch_waiting(self, count: Callable[[], int]) -> None:
        """Export the number of requests that wait, which ``count`` returns at each scrape; several are added
        up."""
        self._counts.append(count)
        self._waiting.set_function(lambda: sum(each() for each in self._counts))
