"""The pairs of workers of which decode has refused a link, for as long as both processes live."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.router.fleet.worker_client import WorkerClient

MAX_PAIRS = 16_384
"""Most pairs that are remembered. A pair that is forgotten costs one more refused attempt."""


class LinkRefusal(NamedTuple):
    """The field in which two processes differ, and decode's reason."""

    field: str
    reason: str


class UnlinkedPairs:
    """Remembers pairs by the incarnations of both workers: another process may have other options. Pure."""

    def __init__(self, limit: int = MAX_PAIRS) -> None:
        self._limit = limit
        self._refusals: OrderedDict[tuple[str, str], LinkRefusal] = OrderedDict()

    def add(self, prefill: str, decode: str, refusal: LinkRefusal) -> bool:
        """Note that these incarnations cannot be linked. Returns whether that is news."""
        news = (prefill, decode) not in self._refusals
        self._refusals[prefill, decode] = refusal
        if len(self._refusals) > self._limit:
            self._refusals.popitem(last=False)
        return news

    def among(
        self, workers: Iterable[WorkerClient]
    ) -> Iterator[tuple[WorkerClient, WorkerClient, LinkRefusal]]:
        """Yield the pairs of which both workers are ready: prefill, decode, and why."""
        if not self._refusals:
            return
        ready = {worker.hello.incarnation: worker for worker in workers if worker.hello is not None}
        for (prefill, decode), refusal in self._refusals.items():
            if prefill in ready and decode in ready:
                yield ready[prefill], ready[decode], refusal
