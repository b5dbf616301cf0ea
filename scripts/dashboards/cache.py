"""KV blocks: found again, kept, evicted."""

from __future__ import annotations

from scripts.dashboards.panels import Dashboard, Panel, Query, Row
from scripts.dashboards.promql import rate, ratio, routers, total, worker_now, worker_rate

HOST = "workers have --host-kv-memory"

DASHBOARD = Dashboard(
    "baton-cache",
    "Baton / Cache",
    "How much of the prompts is found in prefix caches, and what memory holds.",
    (
        Row(
            "Hits",
            (
                Panel(
                    "Prompt tokens that were cached",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                total(rate(routers("baton_cached_prompt_tokens_total"))),
                                total(rate(routers("baton_prompt_tokens_total"))),
                            ),
                            "share",
                        ),
                    ),
                    "As the router learnt of it: what clients are told in cached_tokens.",
                ),
                Panel(
                    "Tokens found, by worker",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                worker_rate("baton_prefix_hit_tokens_total", ["role", "instance"]),
                                worker_rate("baton_prefix_queried_tokens_total", ["role", "instance"]),
                            ),
                            "{{role}} {{instance}}",
                        ),
                    ),
                    "Workers that were not asked have none.",
                ),
                Panel(
                    "Tokens found",
                    "tokens/s",
                    (Query(worker_rate("baton_prefix_hit_tokens_total", ["role"]), "{{role}}"),),
                ),
                Panel(
                    "Tokens looked up",
                    "tokens/s",
                    (Query(worker_rate("baton_prefix_queried_tokens_total", ["role"]), "{{role}}"),),
                ),
            ),
        ),
        Row(
            "KV blocks",
            (
                Panel(
                    "Prefill",
                    "blocks",
                    (Query(worker_now("baton_kv_blocks", ["state"], role="~prefill|both"), "{{state}}"),),
                    stacked=True,
                ),
                Panel(
                    "Decode",
                    "blocks",
                    (Query(worker_now("baton_kv_blocks", ["state"], role="~decode|both"), "{{state}}"),),
                    stacked=True,
                ),
                Panel(
                    "Copied for one of several answers",
                    "ops",
                    (Query(worker_rate("baton_kv_blocks_copied_total", ["role"]), "{{role}}"),),
                ),
            ),
        ),
        Row(
            "Host tier",
            (
                Panel(
                    "Blocks in host memory",
                    "blocks",
                    (
                        Query(worker_now("baton_host_kv_blocks_used", ["role"]), "used, {{role}}"),
                        Query(worker_now("baton_host_kv_blocks_capacity", ["role"]), "room, {{role}}"),
                    ),
                    f"All zero unless {HOST}.",
                ),
                Panel(
                    "Blocks that came back, and that were lost",
                    "ops",
                    (
                        Query(worker_rate("baton_host_kv_hit_blocks_total", ["role"]), "came back, {{role}}"),
                        Query(worker_rate("baton_host_kv_saved_blocks_total", ["role"]), "saved, {{role}}"),
                        Query(
                            worker_rate("baton_host_kv_evicted_blocks_total", ["role"]), "evicted, {{role}}"
                        ),
                        Query(
                            worker_rate("baton_host_kv_dropped_blocks_total", ["role"]), "dropped, {{role}}"
                        ),
                    ),
                ),
                Panel(
                    "Copies",
                    "Bps",
                    (
                        Query(worker_rate("baton_host_kv_saved_bytes_total", ["role"]), "to host, {{role}}"),
                        Query(
                            worker_rate("baton_host_kv_restored_bytes_total", ["role"]), "from host, {{role}}"
                        ),
                    ),
                ),
                Panel(
                    "Preempted sequences that came back by copy",
                    "ops",
                    (Query(worker_rate("baton_sequences_swapped_in_total", ["role"]), "{{role}}"),),
                ),
            ),
        ),
    ),
)
