"""KV blocks on their way from prefill to decode."""

from __future__ import annotations

from scripts.dashboards.panels import Dashboard, Panel, Query, Row
from scripts.dashboards.promql import (
    largest,
    of_models,
    quantile,
    rate,
    ratio,
    select,
    worker_now,
    worker_rate,
)

_PAIR = ("instance", "peer", "connector")


def _by_stage(share: float) -> str:
    return quantile(share, of_models(rate(select("baton_handoff_stage_seconds_bucket"))), ["stage"])


DASHBOARD = Dashboard(
    "baton-handoff",
    "Baton / Handoff",
    "How fast KV blocks travel, what is held for them, and what breaks.",
    (
        Row(
            "Speed",
            (
                Panel(
                    "Sent, by pair",
                    "Bps",
                    (
                        Query(
                            worker_rate("baton_handoff_sent_bytes_total", _PAIR),
                            "{{instance}} to {{peer}} ({{connector}})",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Speed while sending, by pair",
                    "Bps",
                    (
                        Query(
                            ratio(
                                worker_rate("baton_handoff_sent_bytes_total", _PAIR),
                                worker_rate("baton_handoff_sending_seconds_total", _PAIR),
                            ),
                            "{{instance}} to {{peer}} ({{connector}})",
                        ),
                    ),
                    "Bytes over the time in which anything was being sent: what the link gives.",
                ),
                Panel(
                    "Received, by pair",
                    "Bps",
                    (
                        Query(
                            worker_rate("baton_handoff_received_bytes_total", _PAIR),
                            "{{peer}} to {{instance}} ({{connector}})",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Bytes of one handoff",
                    "bytes",
                    (
                        Query(
                            ratio(
                                worker_rate("baton_handoff_sent_bytes_total"),
                                worker_rate("baton_handoffs_completed_total", role="~prefill|both"),
                            ),
                            "mean",
                        ),
                    ),
                    "Only what decode lacks travels.",
                ),
            ),
        ),
        Row(
            "Stages",
            (
                Panel("Stages, median", "s", (Query(_by_stage(0.5), "{{stage}}"),)),
                Panel("Stages, p99", "s", (Query(_by_stage(0.99), "{{stage}}"),)),
            ),
        ),
        Row(
            "Held",
            (
                Panel(
                    "Handoffs open",
                    "short",
                    (
                        Query(
                            worker_now("baton_handoffs_open", ["instance", "role"]), "{{role}} {{instance}}"
                        ),
                    ),
                ),
                Panel(
                    "Blocks that transfers hold",
                    "blocks",
                    (
                        Query(
                            worker_now("baton_handoff_held_blocks", ["instance", "role"]),
                            "{{role}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Age of the oldest transfer",
                    "s",
                    (
                        Query(
                            largest(
                                of_models(select("baton_handoff_oldest_hold_seconds")), ["instance", "role"]
                            ),
                            "{{role}} {{instance}}",
                        ),
                    ),
                    "A fence ends what does not end by itself, after seconds.",
                    alert="BatonHandoffStuck",
                ),
                Panel(
                    "Handoffs completed",
                    "ops",
                    (Query(worker_rate("baton_handoffs_completed_total", ["role"]), "{{role}}"),),
                ),
            ),
        ),
        Row(
            "Trouble",
            (
                Panel(
                    "Handoffs aborted, by reason",
                    "ops",
                    (
                        Query(
                            worker_rate("baton_handoffs_aborted_total", ["role", "reason"]),
                            "{{role}}: {{reason}}",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Links forced closed",
                    "ops",
                    (Query(worker_rate("baton_handoff_fences_total", ["instance"]), "{{instance}}"),),
                ),
                Panel(
                    "Links made",
                    "ops",
                    (
                        Query(worker_rate("baton_handoff_links_opened_total", ["instance"]), "{{instance}}"),
                        Query(
                            worker_rate("baton_handoff_reconnects_total", ["instance"]), "again, {{instance}}"
                        ),
                    ),
                ),
                Panel(
                    "Messages dropped",
                    "ops",
                    (Query(worker_rate("baton_handoff_stale_messages_total", ["instance"]), "{{instance}}"),),
                    "Of older attempts or links. A few are normal after cancels.",
                ),
            ),
        ),
    ),
)
