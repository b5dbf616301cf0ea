"""Metrics of the planner: its measurements, its decisions and their results."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

RESULTS = ("acted", "unchanged", "dry_run", "held")
HELD_BY = ("measurements", "prometheus", "kubernetes")


class PlannerMetrics:
    """Metrics of one planner. Each instance belongs to the registry it is given. ``role`` is prefill or
    decode."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.workers = self._gauge(
            "baton_planner_workers",
            "Workers: ready, switching (on their way to the role), to_come (once pods and switches are "
            "there), needed (now), needed_ahead (when a new pod would serve) and wanted.",
            "role",
            "state",
        )
        self.replicas = self._gauge("baton_planner_replicas", "Pods that the Deployment asks for.", "role")
        self.late = self._gauge(
            "baton_planner_expected_late_ratio",
            "Share of requests that are expected to miss the role's target with the workers needed ahead.",
            "role",
        )
        self.load = self._gauge(
            "baton_planner_load_tokens_per_second",
            "Prompt tokens to compute (prefill) and tokens to write (decode): now, and ahead, headroom "
            "included.",
            "role",
            "when",
        )
        self.headroom = self._gauge(
            "baton_planner_headroom_ratio", "By which loads exceeded their forecasts lately."
        )
        self.burstiness = self._gauge(
            "baton_planner_burstiness_ratio",
            "Variance of arrivals to that of independent ones.",
        )
        self.target = self._gauge("baton_planner_target_seconds", "The targets: ttft and itl.", "target")
        self.gpu_budget = self._gauge("baton_planner_gpu_budget", "GPUs that all workers may have together.")
        self.gpus = self._gauge("baton_planner_gpus", "GPUs of the workers wanted.")
        self.attainable = self._gauge(
            "baton_planner_attainable", "1 while something within the bounds is expected to meet the targets."
        )
        self.age = self._gauge(
            "baton_planner_measurement_age_seconds", "Of the oldest figure of the last look that succeeded."
        )
        self.decisions = Counter(
            "baton_planner_decisions",
            "Decisions: acted, unchanged, dry_run (would have acted) or held (could not decide).",
            ("result",),
            registry=registry,
        )
        self.held = Counter(
            "baton_planner_held",
            "Decisions that could not be taken, by what was missing: measurements (too old, or not there), "
            "prometheus or kubernetes (out of reach).",
            ("by",),
            registry=registry,
        )
        self.scalings = Counter(
            "baton_planner_scalings",
            "Changes of a Deployment's scale: ok, conflict (somebody else changed it) or failed.",
            ("role", "direction", "result"),
            registry=registry,
        )
        self.switches = Counter(
            "baton_planner_switches",
            "Switches of role asked for: switched or failed.",
            ("to", "result"),
            registry=registry,
        )
        for result in RESULTS:
            self.decisions.labels(result)
        for by in HELD_BY:
            self.held.labels(by)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)
