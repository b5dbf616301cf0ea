"""Requests with every feature drawn at random, against a ring whose pools are too small for them.

    python -m loadtest.random_requests [--requests 10000] [--at-once 24] [--seed 1] [--drafts ngram]

Fails (exit status 1) on a malformed answer, on an error in a log of the ring, and on blocks that are held
when all requests are over. A deadline that a client gave may pass, and clients may leave: both are drawn,
too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.support.random_requests import ask_all, draw
from tests.support.ring import running_ring
from tests.support.rings_at_their_limit import DRAFTS, OPTIONS, ROUTER_OPTIONS, errors_logged, totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drafts", default="ngram", help="a --speculative-method")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    asks = [draw(rng) for _ in range(args.requests)]
    console = Console()
    drafts = (*DRAFTS, "--speculative-method", args.drafts)
    with (
        tempfile.TemporaryDirectory() as tmp,
        running_ring(
            Path(tmp), options=OPTIONS, decode_options=drafts, router_options=ROUTER_OPTIONS
        ) as ring,
    ):
        began = time.monotonic()
        tally = asyncio.run(ask_all(ring.url, asks, args.at_once))
        seconds = time.monotonic() - began
        ring.wait_idle()
        faults = tally.faults + errors_logged(ring)
        console.print(f"{len(asks)} requests, {tally.tokens} tokens, {seconds:.0f} s")
        console.print("ended:", dict(tally.ended.most_common()))
        console.print("with:", dict(tally.features.most_common()))
        console.print("the ring:", totals(ring))
    for fault in faults[:20]:
        console.print("FAULT:", fault, markup=False)
    console.print(f"{len(faults)} faults; accounts at zero")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
