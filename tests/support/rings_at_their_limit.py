"""Rings whose pools are too small for what is asked of them, and what they tell of it."""

from __future__ import annotations

import re
from collections import Counter

from tests.support.ring import Ring

OPTIONS = (
    *("--block-size", "16", "--num-blocks", "44", "--prefill-chunk", "64", "--host-kv-memory", "32MiB"),
    *("--scheduling-policy", "priority", "--priority-aging", "2"),
)
DRAFTS = ("--speculative-method", "ngram", "--num-speculative-tokens", "4")
ROUTER_OPTIONS = ("--tool-call-parser", "hermes")
TOTALS = (
    "baton_preemptions_total",
    "baton_sequences_swapped_in_total",
    "baton_kv_blocks_copied_total",
    "baton_host_kv_hit_blocks_total",
    "baton_guided_masks_total",
    "baton_speculation_accepted_tokens_total",
)


def totals(ring: Ring) -> dict[str, int]:
    """What shows that a ring was at its limit, over all workers."""
    found = Counter[str]()
    for worker in ring.workers:
        for name, value in worker.metrics().items():
            total = name.partition("{")[0]
            if total in TOTALS:
                found[total] += int(value)
    return {name: found[name] for name in TOTALS}


def errors_logged(ring: Ring) -> list[str]:
    """Lines of the logs that tell of a fault of Baton's own."""
    logs = [(service.name, service.log.read_text()) for service in (ring.router, *ring.workers)]
    fault = re.compile(r"^.*(?: ERROR | CRITICAL |Traceback ).*$", re.MULTILINE)
    return [f"{name}: {line}" for name, log in logs for line in fault.findall(log)]
