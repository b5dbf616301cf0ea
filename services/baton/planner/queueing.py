"""Estimates, from queueing theory, of how many requests would miss their targets with so many workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

QUANTILES = tuple(NormalDist().inv_cdf((step + 0.5) / 24) for step in range(24))
"""Quantiles of the standard normal distribution, for lengths, which are taken to be lognormal."""
FULL = 0.95
"""The share of KV blocks that may be held before new requests must be expected to wait."""
OVERRUN = 1e6
"""The pressure, per token/s of each worker, of a load that workers cannot keep up with: above that of any
number of sequences that ends."""
OF_A_LIFE = 2.0
"""The factor from slow moments to late answers. An answer meets many moments and is late if a small share of
them is slow, so late answers are more frequent than slow moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    """Prompts to compute, and how fast a worker computes them."""

    requests_per_s: float
    tokens_per_s: float
    """Prompt tokens that arrive, per second."""
    spread: float
    """The standard deviation of a prompt's tokens over their mean."""
    worker_tokens_per_s: float

    @property
    def workers_busy(self) -> float:
        """The mean number of busy workers; fewer cannot keep up."""
        return self.tokens_per_s / self.worker_tokens_per_s

    def pressure(self, workers: int) -> float:
        """The work that arrives over what the workers can do."""
        return self.workers_busy / workers

    def late(self, workers: int, ttft_s: float) -> float:
        """The share of requests whose wait and prompt together take longer than ``ttft_s``, but for requests
        whose prompt alone does: more workers would not help them.

        The model is one queue before ``workers`` servers: the router gives a prompt to the worker that will
        begin it first. The queue is empty as often as Erlang C says; the wait of a request that waits is
        exponential, with the mean that the variances of arrivals and prompts give it (Allen and Cunneen).
        """
        busy = self.workers_busy
        if busy == 0 or self.requests_per_s == 0:
            return 0.0
        if busy >= workers:
            return 1.0
        prompt_s = self.tokens_per_s / self.requests_per_s / self.worker_tokens_per_s
        wait_s = prompt_s * (1 + self.spread**2) / 2 / (workers - busy)
        if wait_s == 0:  # a load so small that the division above underflows
            return 0.0
        waits = wait_probability(workers, busy)
        sigma = math.sqrt(math.log1p(self.spread**2))
        lengths = (prompt_s * math.exp(sigma * z - sigma**2 / 2) for z in QUANTILES)
        spare = (ttft_s - length for length in lengths)
        late = sum(waits * math.exp(-left / wait_s) for left in spare if left >= 0)
        return late / len(QUANTILES)


def wait_probability(servers: int, busy: float) -> float:
    """Return Erlang C's probability to wait, for ``busy < servers`` servers' worth of work."""
    blocked = 1.0
    for each in range(1, servers + 1):
        blocked = busy * blocked / (each + busy * blocked)
    return blocked / (1 - busy / servers * (1 - blocked))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """Answers to generate, and how long a worker's steps take."""

    tokens_per_s: float
    base_s: float
    row_s: float
    rows_by_room: float
    """Sequences whose KV fits in one worker."""
    burstiness: float
    """The variance of the arrivals in a window over their mean; 1: arrivals are independent. It is for decode
    only: to prompts, which are gone in seconds, a burst of a window's length is a higher load, not noise."""
    stretch: float = 1.0
    """The factor by which steps take longer than their fit says, mostly because of prompts computed between
    them."""
    crowding: float = 1.0
    """The number of sequences measured over the number that the load explains."""

    def rows(self, workers: int) -> float:
        """The mean number of running sequences on all workers; infinite if they cannot keep up. A step
        generates one token of each sequence, and takes the longer the more there are."""
        each = self.tokens_per_s / workers * self.stretch
        if each * self.row_s >= 1:
            return math.inf
        return self.crowding * workers * each * self.base_s / (1 - each * self.row_s)

    def too_slow(self, itl_s: float) -> bool:
        """Whether a step with a single sequence takes longer than ``itl_s``: no number of workers makes it
        faster."""
        return (self.base_s + self.row_s) * self.stretch > itl_s

    def max_rows(self, itl_s: float) -> float:
        """Most sequences of one worker with steps within ``itl_s`` and KV blocks for all. Where steps are too
        slow anyway, the KV blocks alone count."""
        room = FULL * self.rows_by_room
        if self.row_s == 0 or self.too_slow(itl_s):
            return room
        return min(room, (itl_s / self.stretch - self.base_s) / self.row_s)

    def pressure(self, workers: int, itl_s: float) -> float:
        """The mean number of sequences over the number that the workers can take."""
        mean = self.rows(workers)
        if math.isinf(mean):
            return OVERRUN * self.tokens_per_s / workers
        return mean / (workers * self.max_rows(itl_s))

    def late(self, workers: int, itl_s: float) -> float:
        """The share of requests that meet more sequences than ``max_rows``: their steps are too slow, or no
        KV blocks are free. The number of sequences is taken to be normal, as that of many independent ones
        is, and wider where arrivals come in bursts."""
        mean = self.rows(workers)
        if mean == 0:
            return 0.0
        most = workers * self.max_rows(itl_s)
        if math.isinf(mean) or mean >= most:
            return 1.0
        deviation = math.sqrt(mean * max(1.0, self.burstiness))
        beyond = math.erfc((most - mean) / deviation / math.sqrt(2)) / 2
        return min(1.0, OF_A_LIFE * beyond)
