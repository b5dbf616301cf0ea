"""What a client notices, and what the ring does for it."""

from __future__ import annotations

from scripts.dashboards.panels import Dashboard, Panel, Query, Row, Unit
from scripts.dashboards.promql import or_zero, quantile, rate, ratio, routers, select, total, worker_now

TARGETS = "the router has --slo-ttft or --slo-itl"


def latency(title: str, metric: str, text: str, alert: str = "") -> Panel:
    """Quantiles of one of the router's histograms."""
    buckets = rate(routers(f"{metric}_bucket"))
    queries = tuple(Query(quantile(share, buckets), f"p{share * 100:g}") for share in (0.5, 0.9, 0.95, 0.99))
    mean = ratio(total(rate(routers(f"{metric}_sum"))), total(rate(routers(f"{metric}_count"))))
    return Panel(title, "s", (*queries, Query(mean, "mean")), text, alert=alert)


def stat(title: str, unit: Unit, expr: str, text: str = "", needs: str = "") -> Panel:
    return Panel(title, unit, (Query(expr, title),), text, kind="stat", width=4, height=4, needs=needs)


_SLO = rate(routers("baton_slo_requests_total"))
_MET = rate(routers("baton_slo_requests_total", missed="none"))
_ENDED = rate(routers("baton_choices_total"))
_FAILED = rate(routers("baton_choices_total", finish_reason="~error|deadline_exceeded"))

DASHBOARD = Dashboard(
    "baton-overview",
    "Baton / Overview",
    "Latency as clients see it, goodput, and how busy the ring is.",
    (
        Row(
            "Now",
            (
                stat("Answers ended", "reqps", total(_ENDED)),
                stat("Tokens out", "tokens/s", total(rate(routers("baton_generated_tokens_total")))),
                stat("Tokens in", "tokens/s", total(rate(routers("baton_prompt_tokens_total")))),
                stat("Requests in flight", "short", total(routers("baton_requests_in_flight"))),
                stat(
                    "Answers that failed", "percentunit", ratio(f"({or_zero(total(_FAILED))})", total(_ENDED))
                ),
                stat(
                    "Requests that met their targets",
                    "percentunit",
                    ratio(total(_MET), total(_SLO)),
                    needs=TARGETS,
                ),
            ),
        ),
        Row(
            "Latency",
            (
                latency(
                    "Time to first token",
                    "baton_time_to_first_token_seconds",
                    "From a request's arrival at the router.",
                    "BatonFirstTokenSlow",
                ),
                latency(
                    "Inter-token latency",
                    "baton_inter_token_latency_seconds",
                    "Between two deliveries of an answer.",
                    "BatonTokensSlow",
                ),
                latency(
                    "Time per output token",
                    "baton_time_per_output_token_seconds",
                    "Mean of an answer, after its first token.",
                ),
                latency("End to end", "baton_e2e_latency_seconds", "From a request's arrival to its end."),
                Panel(
                    "Inter-token latency, spread",
                    "s",
                    (
                        Query(
                            total(rate(routers("baton_inter_token_latency_seconds_bucket")), ["le"]), "{{le}}"
                        ),
                    ),
                    kind="heatmap",
                ),
                Panel(
                    "Time to first token, spread",
                    "s",
                    (
                        Query(
                            total(rate(routers("baton_time_to_first_token_seconds_bucket")), ["le"]), "{{le}}"
                        ),
                    ),
                    kind="heatmap",
                ),
            ),
        ),
        Row(
            "Goodput",
            (
                Panel(
                    "Requests by what they missed",
                    "reqps",
                    (Query(total(_SLO, ["missed"]), "{{missed}}"),),
                    "none: they met their targets.",
                    stacked=True,
                    needs=TARGETS,
                ),
                Panel(
                    "Why requests missed",
                    "reqps",
                    (
                        Query(
                            or_zero(
                                total(
                                    rate(routers("baton_slo_requests_total", missed="~ttft|itl|error")),
                                    ["missed", "cause"],
                                )
                            ),
                            "{{missed}}: {{cause}}",
                        ),
                    ),
                    "The longest stage, resume (an attempt was lost), handoff, decode, or an error's code.",
                    stacked=True,
                    needs=TARGETS,
                ),
            ),
        ),
        Row(
            "The ring",
            (
                Panel(
                    "Answers by how they ended",
                    "reqps",
                    (Query(total(_ENDED, ["finish_reason"]), "{{finish_reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "Requests by HTTP status",
                    "reqps",
                    (
                        Query(
                            total(
                                rate(select("baton_requests_total", endpoint="~/v1/.*|baton.*")), ["status"]
                            ),
                            "{{status}}",
                        ),
                    ),
                    "Of all models. 499: the client left first.",
                    stacked=True,
                ),
                Panel(
                    "Sequences, by role",
                    "short",
                    (
                        Query(worker_now("baton_sequences_running", ["role"]), "running, {{role}}"),
                        Query(worker_now("baton_sequences_waiting", ["role"]), "waiting, {{role}}"),
                    ),
                ),
                Panel(
                    "KV blocks in use, by role",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                worker_now("baton_kv_blocks", ["role"], state="held"),
                                worker_now("baton_kv_blocks", ["role"]),
                            ),
                            "{{role}}",
                        ),
                    ),
                    alert="BatonKvFull",
                ),
                Panel(
                    "Workers ready",
                    "short",
                    (Query(total(routers("baton_worker_ready"), ["role"]), "{{role}}"),),
                    "Whose stream is up, those that drain too; added up over routers.",
                ),
                Panel(
                    "Length of prompts and answers, median",
                    "tokens",
                    (
                        Query(quantile(0.5, rate(routers("baton_request_prompt_tokens_bucket"))), "prompt"),
                        Query(
                            quantile(0.5, rate(routers("baton_request_generated_tokens_bucket"))), "answer"
                        ),
                    ),
                ),
            ),
        ),
    ),
)
