"""The durations of a request's stages in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Histogram

RequestStage = Literal["prepare", "admission", "placement", "prefill_queue", "prefill"]
"""The stages of a request up to its first token, in order.

At the router their sum is the time to first token, with one observation of each per choice:

- prepare: from arrival until the request can be run (reading, template, tokenizing)
- admission: limits of the tenant, and the queue in front of the ring
- placement: until workers are chosen and told; long if the request waits for a worker that can take it
- prefill_queue: until a worker says that it begins to compute (link, room at decode, the worker's queue)
- prefill: until the first token is at the router

A worker that computes prompts measures two stages on its own clock, without the network and what comes before
its engine: prefill_queue from when its engine took the request, prefill until the first token was sampled.
"""

STAGE_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5),
    *(5.0, 10.0, 30.0, 60.0, 120.0),
)


class StageMetrics:
    """The histogram of a process. Each instance belongs to the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histogram = Histogram(
            "baton_request_stage_seconds",
            "One stage of a request on its way to its first token: prepare, admission, placement, "
            "prefill_queue, prefill. Those of the router sum to the time to first token; workers tell of "
            "those two that are theirs.",
            ("role", "model", "stage"),
            registry=registry,
            buckets=STAGE_BUCKETS,
        )

    def totals(self, role: str) -> dict[str, tuple[float, float]]:
        """Return the observations of a role so far by stage, over all models: their number, and the sum of
        their seconds."""
        found = dict.fromkeys(get_args(RequestStage), (0.0, 0.0))
        for sample in (sample for family in self._histogram.collect() for sample in family.samples):
            if sample.labels["role"] == role:
                number, seconds = found[sample.labels["stage"]]
                if sample.name.endswith("_count"):
                    found[sample.labels["stage"]] = number + sample.value, seconds
                elif sample.name.endswith("_sum"):
                    found[sample.labels["stage"]] = number, seconds + sample.value
        return found

    def of(self, role: str, model: str) -> Stages:
        """Return the stages of one model's requests in a process of this role."""
        return Stages(self._histogram, role, model)


class Stages:
    """Observes the durations of one model's stages in one role."""

    def __init__(self, histogram: Histogram, role: str, model: str) -> None:
        self._histogram = histogram
        self.role = role
        self._model = model
        self._stages: dict[RequestStage, Histogram] = {}
        """Series by stage, looked up once each: a lookup costs more than an observation."""

    def observe(self, stages: Mapping[RequestStage, float]) -> None:
        """Observe the duration of each stage, in seconds."""
        for stage, seconds in stages.items():
            child = self._stages.get(stage)
            if child is None:
                child = self._stages[stage] = self._histogram.labels(self.role, self._model, stage)
            child.observe(seconds)
