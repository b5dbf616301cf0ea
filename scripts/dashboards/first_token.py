"""The time to first token, taken apart; then what comes before the second one."""

from __future__ import annotations

from scripts.dashboards.overview import latency
from scripts.dashboards.panels import Dashboard, Panel, Query, Row
from scripts.dashboards.promql import of_models, quantile, rate, ratio, routers, select, total, worker_rate

_STAGES = ("prepare", "admission", "placement", "prefill_queue", "prefill")
_COUNT = total(rate(routers("baton_time_to_first_token_seconds_count")))
_HANDOFF = "baton_handoff_stage_seconds"
_REQUEST = "baton_request_stage_seconds"


def _at_router(suffix: str, stage: str) -> str:
    return rate(routers(f"{_REQUEST}_{suffix}", role="router", stage=stage))


def _handoff_mean(stage: str) -> str:
    return ratio(worker_rate(f"{_HANDOFF}_sum", stage=stage), worker_rate(f"{_HANDOFF}_count", stage=stage))


def _handoff_quantile(share: float, stage: str) -> str:
    return quantile(share, of_models(rate(select(f"{_HANDOFF}_bucket", stage=stage))))


_ASK_SUM = worker_rate(f"{_HANDOFF}_sum", stage="ask")
_WORKER_SUM = total(rate(routers(f"{_REQUEST}_sum", role="~prefill|decode|both")))
_ROUTER_SUM = total(rate(routers(f"{_REQUEST}_sum", role="router", stage="~prefill_queue|prefill")))

DASHBOARD = Dashboard(
    "baton-first-token",
    "Baton / Time to first token",
    "Where the time goes until an answer begins, stage by stage.",
    (
        Row(
            "At the router",
            (
                Panel(
                    "Mean time to first token, by stage",
                    "s",
                    tuple(Query(ratio(total(_at_router("sum", stage)), _COUNT), stage) for stage in _STAGES),
                    "The stages of one request sum to its time to first token: so do these means.",
                    stacked=True,
                ),
                latency(
                    "Time to first token",
                    "baton_time_to_first_token_seconds",
                    "The whole of it.",
                    "BatonFirstTokenSlow",
                ),
                Panel(
                    "Stages, p99",
                    "s",
                    tuple(Query(quantile(0.99, _at_router("bucket", stage)), stage) for stage in _STAGES),
                    "Quantiles do not add up: who waits longest in one stage may not in another.",
                ),
                Panel(
                    "Stages, median",
                    "s",
                    tuple(Query(quantile(0.5, _at_router("bucket", stage)), stage) for stage in _STAGES),
                ),
            ),
        ),
        Row(
            "At the workers",
            (
                Panel(
                    "Before a prompt is computed",
                    "s",
                    (
                        Query(_handoff_mean("ask"), "link and room at decode, mean"),
                        Query(_handoff_quantile(0.99, "ask"), "link and room at decode, p99"),
                        *(
                            Query(
                                quantile(
                                    share,
                                    rate(
                                        routers(
                                            f"{_REQUEST}_bucket",
                                            role="~prefill|decode|both",
                                            stage="prefill_queue",
                                        )
                                    ),
                                    ["role"],
                                ),
                                f"queue, {{{{role}}}}, p{share * 100:g}",
                            )
                            for share in (0.5, 0.99)
                        ),
                    ),
                    "What the router calls prefill_queue, on the workers' own clocks.",
                ),
                Panel(
                    "Computing prompts",
                    "s",
                    tuple(
                        Query(
                            quantile(
                                share,
                                rate(
                                    routers(
                                        f"{_REQUEST}_bucket", role="~prefill|decode|both", stage="prefill"
                                    )
                                ),
                                ["role"],
                            ),
                            f"{{{{role}}}}, p{share * 100:g}",
                        )
                        for share in (0.5, 0.9, 0.99)
                    ),
                    "From the first step to the first token.",
                ),
                Panel(
                    "Between router and workers, mean",
                    "s",
                    (
                        Query(
                            ratio(
                                f"clamp_min({_ROUTER_SUM} - {_WORKER_SUM} - {_ASK_SUM}, 0)",
                                _COUNT,
                            ),
                            "network and publishing",
                        ),
                    ),
                    "What the router waits for and no worker accounts for.",
                    needs="some prompts are computed on prefill workers",
                ),
            ),
        ),
        Row(
            "From the first token to the second: the handoff",
            (
                Panel(
                    "Mean, by stage",
                    "s",
                    tuple(
                        Query(_handoff_mean(stage), label)
                        for stage, label in (
                            ("flush", "flush (prefill: until all is sent)"),
                            ("commit", "commit (decode: from the last block)"),
                            ("start", "decode queue (until its first step)"),
                            ("first_step", "first step"),
                        )
                    ),
                    "Blocks travel while the prompt is computed: what is left to send then is the flush.",
                    stacked=True,
                ),
                Panel(
                    "p99, by stage",
                    "s",
                    tuple(
                        Query(_handoff_quantile(0.99, stage), stage)
                        for stage in ("flush", "commit", "start", "first_step")
                    ),
                ),
            ),
        ),
    ),
)
