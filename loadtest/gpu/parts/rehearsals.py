"""Parts that fail on purpose: what must survive a part is tried with them."""

from __future__ import annotations

import time

from loadtest.gpu.bench import Bench


def measure(bench: Bench, kind: str) -> None:
    """Write one row, then raise or sleep past the limit."""
    bench.results.row("Rehearsal", kind=kind)
    if kind == "raises":
        raise RuntimeError("this part raises on purpose")
    time.sleep(bench.limit + 60)
