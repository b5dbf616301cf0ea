"""Fuzz a real ring: no 5xx but a documented 503, no process that ends, and right answers afterwards.

    python -m loadtest.fuzz --examples 200 --frames 200

HTTP: schemathesis makes ``--examples`` requests for each operation of /openapi.json, half of them against
the schema. gRPC: ``--frames`` calls with random and spoiled messages for each method of the router and each
stream of every worker, begun as it should be and not. Prints a table; exit status 1 for any violation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from baton.process.ready import WorkerReady
from loadtest.fuzz.account import Account
from loadtest.fuzz.frames import fuzz_router, fuzz_worker
from loadtest.fuzz.http import fuzz_http
from tests.support.ring import Ring, running_ring

GONE = "ExecuteBatchError raised in core"
"""grpcio's own message about a client that was gone when its call's status was sent."""
CONTEXT = 256
"""The context in tokens: it keeps every answer short."""


def plain(ring: Ring) -> str:
    """Return the answer to a plain request."""
    body = {"prompt": "Paged attention is", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{ring.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def after(ring: Ring, account: Account, expected: str) -> Account:
    """Return ``account`` with the ring's violations added."""
    for service in (ring.router, *ring.workers):
        if service.process.poll() is not None:
            account.blame(f"{service.name} ended with {service.process.returncode}")
            return account
    try:
        answer = plain(ring)
        if answer != expected:
            account.blame(f"a plain request is answered {answer!r}, not {expected!r}")
        ring.wait_idle()
    except (httpx.HTTPError, AssertionError) as error:
        account.blame(f"a plain request: {error}")
    return account


def targets(ring: Ring, examples: int, frames: int) -> Iterator[Account]:
    if examples:
        yield from fuzz_http(ring.url, examples)
    if frames:
        yield from fuzz_router(ring.grpc, frames)
        for worker in ring.workers:
            assert isinstance(worker.ready, WorkerReady)
            yield from fuzz_worker(worker.name, worker.ready.address, frames)


def table_of(accounts: list[Account]) -> Table:
    table = Table(title="fuzzing")
    for column in ("target", "sent", "outcomes", "violations"):
        table.add_column(column, overflow="fold")
    for account in accounts:
        outcomes = ", ".join(f"{name}: {count}" for name, count in account.outcomes.most_common())
        table.add_row(account.target, str(account.sent), outcomes, str(len(account.violations)))
    return table


def tracebacks(ring: Ring) -> Account:
    """Return the unexpected errors in the processes' logs."""
    account = Account("logs")
    for service in (ring.router, *ring.workers):
        lines = service.log.read_text().splitlines()
        found = [
            index
            for index, line in enumerate(lines)
            if line.startswith("Traceback") and GONE not in lines[index - 1]
        ]
        account.outcomes[f"{service.name}: tracebacks"] = len(found)
        for index in found[:3]:
            account.blame(f"{service.name}:\n" + "\n".join(lines[max(0, index - 1) : index + 25]))
    return account


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=200, help="HTTP requests for each operation")
    parser.add_argument("--frames", type=int, default=200, help="gRPC calls for each method and stream")

    asked = parser.parse_args()
    console = Console(width=160)
    accounts: list[Account] = []
    with tempfile.TemporaryDirectory() as tmp:
        options = ("--max-model-len", str(CONTEXT))
        with running_ring(Path(tmp), options=options) as ring:
            expected = plain(ring)
            for account in targets(ring, asked.examples, asked.frames):
                accounts.append(after(ring, account, expected))
                console.print(f"{account.target}: {account.sent} sent, {len(account.violations)} violations")
            accounts.append(tracebacks(ring))
    console.print(table_of(accounts))
    for account in accounts:
        for violation in account.violations[:5]:
            console.print(f"{account.target}: {violation}", markup=False, soft_wrap=True)
    return int(any(account.violations for account in accounts))


if __name__ == "__main__":
    sys.exit(main())
