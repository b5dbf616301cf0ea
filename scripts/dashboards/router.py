"""The front door: queue, tenants, attempts, workers and discovery as routers see them."""

from __future__ import annotations

from scripts.dashboards.panels import Dashboard, Panel, Query, Row
from scripts.dashboards.promql import (
    largest,
    of_routers,
    or_zero,
    quantile,
    rate,
    ratio,
    routers,
    select,
    total,
)

REDIS = "the router has --redis-url"


def _by(metric: str, *labels: str) -> str:
    return or_zero(total(rate(select(metric)), labels))


DASHBOARD = Dashboard(
    "baton-router",
    "Baton / Router and tenants",
    "Who waits, who is refused, what is tried again, and who the workers are.",
    (
        Row(
            "The queue in front of the ring",
            (
                Panel(
                    "Requests that wait for their turn",
                    "short",
                    (Query(total(select("baton_admission_waiting_requests"), ["instance"]), "{{instance}}"),),
                ),
                Panel(
                    "Wait of those let in",
                    "s",
                    tuple(
                        Query(
                            quantile(share, rate(select("baton_admission_wait_seconds_bucket"))),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.9, 0.99)
                    ),
                ),
                Panel(
                    "Answers under way, of what may be",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                total(select("baton_admission_open_answers"), ["instance"]),
                                total(select("baton_admission_seats"), ["instance"]),
                            ),
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Refused, by tenant",
                    "reqps",
                    (
                        Query(
                            _by("baton_admission_refused_total", "tenant", "reason"), "{{tenant}}: {{reason}}"
                        ),
                    ),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Tenants",
            (
                Panel(
                    "Tokens let in, by tenant",
                    "tokens/s",
                    (Query(total(rate(select("baton_admission_tokens_total")), ["tenant"]), "{{tenant}}"),),
                    stacked=True,
                ),
                Panel(
                    "Decisions of limits",
                    "reqps",
                    (
                        Query(
                            _by("baton_limit_decisions_total", "tenant", "decision"),
                            "{{tenant}}: {{decision}}",
                        ),
                    ),
                    "admitted, or the limit that refused. Zero where no tenant has limits.",
                    stacked=True,
                ),
                Panel(
                    "Limits shared with other routers",
                    "short",
                    (
                        Query(total(select("baton_shared_state_up"), ["instance"]), "shared, {{instance}}"),
                        Query(
                            total(select("baton_shared_state_replicas"), ["instance"]),
                            "routers known, {{instance}}",
                        ),
                    ),
                    f"Shared is 0 unless {REDIS}.",
                ),
                Panel(
                    "What asking Redis takes",
                    "s",
                    tuple(
                        Query(
                            quantile(share, rate(select("baton_shared_state_delay_seconds_bucket"))),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.99)
                    ),
                    needs=REDIS,
                ),
                Panel(
                    "Calls of Redis",
                    "ops",
                    (Query(_by("baton_shared_state_calls_total", "call", "result"), "{{call}}: {{result}}"),),
                ),
            ),
        ),
        Row(
            "Attempts",
            (
                Panel(
                    "Attempts that were lost, by cause",
                    "ops",
                    (Query(total(rate(select("baton_resumes_total")), ["cause"]), "{{cause}}"),),
                    "Each went on from its tokens.",
                    stacked=True,
                ),
                Panel(
                    "Requests given up",
                    "ops",
                    (Query(total(rate(select("baton_requests_given_up_total")), ["reason"]), "{{reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "Pause of a resumed answer",
                    "s",
                    tuple(
                        Query(
                            quantile(share, rate(select("baton_resume_pause_seconds_bucket"))),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.99)
                    ),
                    needs="attempts are lost",
                ),
                Panel(
                    "Requests that wait for a worker",
                    "short",
                    (Query(total(select("baton_requests_waiting"), ["instance"]), "{{instance}}"),),
                ),
                Panel(
                    "Slow clients cut off",
                    "ops",
                    (Query(_by("baton_slow_clients_total", "endpoint"), "{{endpoint}}"),),
                ),
            ),
        ),
        Row(
            "Workers and discovery",
            (
                Panel(
                    "Workers",
                    "short",
                    (
                        Query(total(routers("baton_worker_ready"), ["role"]), "ready, {{role}}"),
                        Query(total(routers("baton_worker_draining"), ["role"]), "draining, {{role}}"),
                        Query(total(routers("baton_worker_ejected"), ["role"]), "ejected, {{role}}"),
                        Query(total(routers("baton_worker_refused")), "refused"),
                    ),
                    "Added up over routers. Ready: its stream is up, be it ejected or about to end. "
                    "Refused: it serves another model, or has another tokenizer.",
                ),
                Panel(
                    "Endpoints known",
                    "short",
                    (
                        Query(
                            total(routers("baton_discovery_endpoints"), ["role", "state"]),
                            "{{role}}: {{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Age of what discovery knows",
                    "s",
                    (
                        Query(
                            largest(routers("baton_discovery_staleness_seconds"), ["instance"]),
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Ejections",
                    "ops",
                    (Query(total(rate(select("baton_worker_ejections_total")), ["reason"]), "{{reason}}"),),
                ),
                Panel(
                    "Lists and watches",
                    "ops",
                    (
                        Query(_by("baton_discovery_lists_total", "result"), "list: {{result}}"),
                        Query(_by("baton_discovery_watches_total", "reason"), "watch: {{reason}}"),
                    ),
                    "Zero unless workers are found in Kubernetes.",
                ),
            ),
        ),
        Row(
            "The processes",
            (
                Panel(
                    "CPU",
                    "percentunit",
                    (
                        Query(
                            of_routers(rate(select("process_cpu_seconds_total"))),
                            "{{instance}} {{process}}",
                        ),
                    ),
                    "Of one core: each process of a router has one busy thread.",
                    alert="BatonRouterBusy",
                ),
                Panel(
                    "Memory",
                    "bytes",
                    (
                        Query(
                            of_routers(select("process_resident_memory_bytes")),
                            "{{instance}} {{process}}",
                        ),
                    ),
                ),
                Panel(
                    "Longest turn of the event loop",
                    "s",
                    (
                        Query(
                            largest(select("baton_router_event_loop_longest_turn_seconds"), ["instance"]),
                            "{{instance}}",
                        ),
                        Query(
                            quantile(0.99, rate(select("baton_router_event_loop_lag_seconds_bucket"))),
                            "p99 of all timers",
                        ),
                    ),
                    "In the last minute. All answers of the process pause that long.",
                    alert="BatonRouterTurnsLong",
                ),
                Panel(
                    "Tasks",
                    "short",
                    (Query(total(select("baton_router_tasks"), ["instance"]), "{{instance}}"),),
                    "Follows the requests under way; what only grows is a leak.",
                ),
                Panel(
                    "Open files",
                    "short",
                    (
                        Query(
                            of_routers(select("process_open_fds")),
                            "{{instance}} {{process}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
