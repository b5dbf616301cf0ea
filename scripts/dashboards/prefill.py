"""Workers that compute prompts."""

from __future__ import annotations

from scripts.dashboards.panels import Dashboard, Panel, Query, Row
from scripts.dashboards.promql import (
    of_models,
    quantile,
    rate,
    ratio,
    routers,
    select,
    total,
    worker_now,
    worker_rate,
)

ROLES = "~prefill|both"


def _each(metric: str) -> str:
    return worker_now(metric, ["instance"], role=ROLES)


def _rate_each(metric: str) -> str:
    return worker_rate(metric, ["instance"], role=ROLES)


DASHBOARD = Dashboard(
    "baton-prefill",
    "Baton / Prefill",
    "How much waits to be computed, how fast it is, and how busy the workers are.",
    (
        Row(
            "Backlog",
            (
                Panel(
                    "Backlog",
                    "s",
                    (Query(_each("baton_prefill_backlog_seconds"), "{{instance}}"),),
                    "What computing all that waits will take. Scale out where it nears the target for TTFT.",
                    alert="BatonPrefillBacklog",
                ),
                Panel(
                    "Prompt tokens that wait",
                    "tokens",
                    (Query(_each("baton_waiting_prefill_tokens"), "{{instance}}"),),
                ),
                Panel(
                    "Wait in the engine's queue",
                    "s",
                    tuple(
                        Query(
                            quantile(
                                share,
                                rate(
                                    routers(
                                        "baton_request_stage_seconds_bucket",
                                        role=ROLES,
                                        stage="prefill_queue",
                                    )
                                ),
                            ),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.9, 0.99)
                    ),
                ),
                Panel(
                    "Sequences",
                    "short",
                    (
                        Query(_each("baton_sequences_running"), "running, {{instance}}"),
                        Query(_each("baton_sequences_waiting"), "waiting, {{instance}}"),
                    ),
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Prompt tokens computed",
                    "tokens/s",
                    (Query(_rate_each("baton_engine_prompt_tokens_total"), "{{instance}}"),),
                    stacked=True,
                ),
                Panel(
                    "Pace while computing",
                    "tokens/s",
                    (Query(_each("baton_prefill_tokens_per_second"), "{{instance}}"),),
                    "What the worker says of itself: routers place requests by it.",
                ),
                Panel(
                    "Share of time computing",
                    "percentunit",
                    (Query(_rate_each("baton_engine_busy_seconds_total"), "{{instance}}"),),
                ),
                Panel(
                    "Time to compute a prompt",
                    "s",
                    tuple(
                        Query(
                            quantile(
                                share,
                                rate(
                                    routers("baton_request_stage_seconds_bucket", role=ROLES, stage="prefill")
                                ),
                            ),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.9, 0.99)
                    ),
                ),
            ),
        ),
        Row(
            "Memory and the way out",
            (
                Panel(
                    "KV blocks in use",
                    "percentunit",
                    (Query(worker_now("baton_kv_usage_ratio", ["instance"], role=ROLES), "{{instance}}"),),
                ),
                Panel(
                    "Prompt tokens found in the prefix cache",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                worker_rate("baton_prefix_hit_tokens_total", role=ROLES),
                                worker_rate("baton_prefix_queried_tokens_total", role=ROLES),
                            ),
                            "share",
                        ),
                    ),
                ),
                Panel(
                    "Preemptions",
                    "ops",
                    (Query(_rate_each("baton_preemptions_total"), "{{instance}}"),),
                    alert="BatonPreemptions",
                ),
                Panel(
                    "Flush: from the last chunk to the last send",
                    "s",
                    tuple(
                        Query(
                            quantile(
                                share,
                                of_models(rate(select("baton_handoff_stage_seconds_bucket", stage="flush"))),
                            ),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.99)
                    ),
                ),
                Panel(
                    "Where prompts are computed",
                    "reqps",
                    (Query(total(rate(select("baton_placements_total")), ["placement"]), "{{placement}}"),),
                    "handoff: on a prefill worker; local: where the answer is written. Of all models.",
                    stacked=True,
                ),
            ),
        ),
    ),
)
