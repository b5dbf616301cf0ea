"""Workers that write answers."""

from __future__ import annotations

from scripts.dashboards.panels import Dashboard, Panel, Query, Row
from scripts.dashboards.promql import of_models, quantile, rate, ratio, select, worker_now, worker_rate

ROLES = "~decode|both"


def _each(metric: str) -> str:
    return worker_now(metric, ["instance"], role=ROLES)


def _rate_each(metric: str) -> str:
    return worker_rate(metric, ["instance"], role=ROLES)


def _handoff(share: float, stage: str) -> str:
    return quantile(share, of_models(rate(select("baton_handoff_stage_seconds_bucket", stage=stage))))


DASHBOARD = Dashboard(
    "baton-decode",
    "Baton / Decode",
    "Batches, steps and memory of the workers that write answers.",
    (
        Row(
            "Batch",
            (
                Panel(
                    "Sequences running",
                    "short",
                    (Query(_each("baton_sequences_running"), "{{instance}}"),),
                    stacked=True,
                ),
                Panel(
                    "Sequences waiting", "short", (Query(_each("baton_sequences_waiting"), "{{instance}}"),)
                ),
                Panel(
                    "Mean batch",
                    "short",
                    (
                        Query(
                            ratio(
                                _rate_each("baton_engine_step_sequences_total"),
                                _rate_each("baton_engine_steps_total"),
                            ),
                            "{{instance}}",
                        ),
                    ),
                    "Sequences in a step.",
                ),
                Panel(
                    "Mean step",
                    "s",
                    (
                        Query(
                            ratio(
                                _rate_each("baton_engine_busy_seconds_total"),
                                _rate_each("baton_engine_steps_total"),
                            ),
                            "{{instance}}",
                        ),
                    ),
                    "What an answer waits for its next token at least.",
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Tokens generated",
                    "tokens/s",
                    (Query(_rate_each("baton_engine_generated_tokens_total"), "{{instance}}"),),
                    stacked=True,
                ),
                Panel(
                    "Share of time computing",
                    "percentunit",
                    (Query(_rate_each("baton_engine_busy_seconds_total"), "{{instance}}"),),
                ),
                Panel("Steps", "steps/s", (Query(_rate_each("baton_engine_steps_total"), "{{instance}}"),)),
                Panel(
                    "Prompt tokens computed here",
                    "tokens/s",
                    (Query(_rate_each("baton_engine_prompt_tokens_total"), "{{instance}}"),),
                    "Running answers wait for these.",
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "KV blocks in use",
                    "percentunit",
                    (Query(_each("baton_kv_usage_ratio"), "{{instance}}"),),
                    alert="BatonKvFull",
                ),
                Panel(
                    "Blocks promised to handoffs",
                    "blocks",
                    (Query(_each("baton_kv_reserved_blocks"), "{{instance}}"),),
                ),
                Panel(
                    "Preemptions",
                    "ops",
                    (Query(_rate_each("baton_preemptions_total"), "{{instance}}"),),
                    "Each costs its answer a pause: there are more answers than the memory holds.",
                    alert="BatonPreemptions",
                ),
                Panel(
                    "Deadlines exceeded",
                    "ops",
                    (Query(_rate_each("baton_deadlines_exceeded_total"), "{{instance}}"),),
                ),
            ),
        ),
        Row(
            "Taking over",
            (
                Panel(
                    "Wait for room",
                    "s",
                    (Query(_handoff(0.5, "room"), "p50"), Query(_handoff(0.99, "room"), "p99")),
                    "From a prefill worker's question to the promise.",
                ),
                Panel(
                    "Wait for the first step",
                    "s",
                    (Query(_handoff(0.5, "start"), "p50"), Query(_handoff(0.99, "start"), "p99")),
                ),
                Panel(
                    "Drafts accepted",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                worker_rate("baton_speculation_accepted_tokens_total", role=ROLES),
                                worker_rate("baton_speculation_drafted_tokens_total", role=ROLES),
                            ),
                            "share",
                        ),
                    ),
                    needs="workers have --speculative-method",
                ),
            ),
        ),
    ),
)
