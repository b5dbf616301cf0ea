"""What the planner sees, decides and does."""

from __future__ import annotations

from scripts.dashboards.panels import Dashboard, Panel, Query, Row, Unit
from scripts.dashboards.promql import or_zero, rate, select, total

NEEDS = "a planner runs"


def _now(metric: str, **labels: str) -> str:
    return f"max({select(metric, **labels)})"


def _workers(role: str) -> Panel:
    return Panel(
        f"{role.capitalize()} workers",
        "short",
        tuple(
            Query(_now("baton_planner_workers", role=role, state=state), legend)
            for state, legend in (
                ("ready", "ready"),
                ("to_come", "to come"),
                ("needed", "needed now"),
                ("needed_ahead", "needed when a new pod would serve"),
                ("wanted", "wanted"),
            )
        ),
        "Ready below needed now: clients wait. To come above wanted: what is not needed goes.",
        needs=NEEDS,
    )


def _one(title: str, unit: Unit, queries: tuple[Query, ...], text: str = "") -> Panel:
    return Panel(title, unit, queries, text, needs=NEEDS)


DASHBOARD = Dashboard(
    "baton-planner",
    "Baton / Planner",
    "How many workers of each role the planner wants, why, and what it does about it.",
    (
        Row("Workers", (_workers("prefill"), _workers("decode"))),
        Row(
            "Why",
            (
                *(
                    _one(
                        title,
                        "tokens/s",
                        tuple(
                            Query(
                                _now("baton_planner_load_tokens_per_second", role=role, when=when),
                                when,
                            )
                            for when in ("now", "ahead")
                        ),
                        "Ahead: the most until a new pod would serve, headroom included.",
                    )
                    for title, role in (
                        ("Prompt tokens to compute", "prefill"),
                        ("Tokens to write", "decode"),
                    )
                ),
                _one(
                    "Expected to be late",
                    "percentunit",
                    tuple(
                        Query(_now("baton_planner_expected_late_ratio", role=role), role)
                        for role in ("prefill", "decode")
                    ),
                    "With the workers needed ahead, by the estimate. Compare with Goodput of the overview.",
                ),
                _one(
                    "Headroom and bursts",
                    "short",
                    (
                        Query(_now("baton_planner_headroom_ratio"), "loads over their forecasts"),
                        Query(_now("baton_planner_burstiness_ratio"), "variance of arrivals"),
                    ),
                ),
                _one(
                    "GPUs",
                    "short",
                    (
                        Query(_now("baton_planner_gpus"), "wanted"),
                        Query(_now("baton_planner_gpu_budget"), "budget"),
                    ),
                ),
                _one(
                    "Age of the figures",
                    "s",
                    (Query(_now("baton_planner_measurement_age_seconds"), "oldest"),),
                    "Older than a minute: nothing is done.",
                ),
            ),
        ),
        Row(
            "What it does",
            (
                _one(
                    "Decisions",
                    "ops",
                    (
                        Query(
                            total(rate(select("baton_planner_decisions_total")), ["result"]),
                            "{{result}}",
                        ),
                    ),
                ),
                _one(
                    "Held, by what was missing",
                    "ops",
                    (Query(total(rate(select("baton_planner_held_total")), ["by"]), "{{by}}"),),
                ),
                _one(
                    "Scalings",
                    "ops",
                    (
                        Query(
                            or_zero(
                                total(
                                    rate(select("baton_planner_scalings_total")),
                                    ["role", "direction", "result"],
                                )
                            ),
                            "{{role}} {{direction}}, {{result}}",
                        ),
                    ),
                ),
                _one(
                    "Switches of role",
                    "ops",
                    (
                        Query(
                            or_zero(total(rate(select("baton_planner_switches_total")), ["to", "result"])),
                            "to {{to}}, {{result}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
