"""Measures one running ring: finds its highest goodput in the time given."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from baton.bench.arrivals import send_times
from baton.bench.config import ServeConfig, parse_url
from baton.bench.exchange import Prepared, RequestSender
from baton.bench.http import HttpClient
from baton.bench.load_generator import closed_loop, open_loop
from baton.bench.serve import find_request, prepare
from baton.bench.summary import summarise
from baton.bench.sweep.score import Probe
from baton.bench.sweep.search import RateSearch
from baton.bench.target import RequestFormat, ServedModel, find_model
from baton.bench.workload.choice import make_items
from baton.bench.workload.items import fit
from baton.bench.workload.vocabulary import Vocabulary
from baton.text.tokenizer import Tokenizer

PROBES = 5
"""Probes in one trial; the first one finds the ring's capacity."""
_SENDING = 0.7
"""The share of a probe's time in which requests are sent; in the rest, open requests can end."""
_FIRST_RATE = 0.6
"""The first rate to try, as a share of the ring's capacity."""
_SHORTEST = 0.25
"""The shortest probe, as a share of the time that a probe should have."""
_FEWEST, _MOST = 5, 5000
"""Fewest and most requests in a probe."""


@dataclass(slots=True)
class TrialRunner:
    """Tries rings with one workload. No two probes have a prompt in common, so that no prefix cache helps
    more than the workload says."""

    config: ServeConfig
    tokenizer: Tokenizer
    attainment: float
    """The share of requests that must meet the goals."""
    _seeds: Iterator[int] = dataclasses.field(init=False)
    _vocabulary: Vocabulary = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        first = self.config.workload.seed * 1_000_003
        self._seeds = itertools.count(first)
        self._vocabulary = Vocabulary(self.tokenizer)

    async def run(self, url: str, until: float, concurrency: int, known: float | None) -> list[Probe]:
        """Probe the ring at ``url`` until ``until`` on the monotonic clock. ``known`` is a rate to begin
        with; without one, a closed loop of ``concurrency`` finds it. Raises UserError if the trial cannot
        begin."""
        client = HttpClient(parse_url("url", url), self.config.api_key)
        try:
            served = await find_model(client, self.config.model)
            request = await find_request(client, self.config, served, self._vocabulary)
            ring = _Ring(self, client, served, request)
            seconds = (until - time.monotonic()) / PROBES
            # The first probe runs even where a rate is known: it warms the ring up.
            capacity = await ring.capacity(concurrency, seconds)
            search = RateSearch(known or _FIRST_RATE * capacity)
            probes: list[Probe] = []
            while len(probes) < PROBES - 1:
                left = (until - time.monotonic()) / (PROBES - 1 - len(probes))
                if left < _SHORTEST * seconds:  # the machine is busy: earlier probes took longer
                    break
                probes.append(await ring.probe(search.rate, left))
                search.tell(probes[-1].rate, probes[-1].met)
            return probes
        finally:
            client.close()

    def prepared(self, count: int, served: ServedModel, request: RequestFormat) -> list[Prepared]:
        """Return at most ``count`` requests that were not sent before."""
        seed = next(self._seeds)
        workload = dataclasses.replace(self.config.workload, num_prompts=count, seed=seed)
        items = fit(make_items(workload, self.tokenizer), served.context).items
        return prepare(items, request, self._vocabulary, seed)


@dataclass(frozen=True, slots=True)
class _Ring:
    """One running ring."""

    runner: TrialRunner
    client: HttpClient
    served: ServedModel
    request: RequestFormat

    async def capacity(self, concurrency: int, seconds: float) -> float:
        """Return the requests/s with ``concurrency`` requests always open; at least one per probe."""
        requests = await asyncio.to_thread(
            self.runner.prepared, max(_FEWEST, 8 * concurrency), self.served, self.request
        )
        exchange = RequestSender(self.client, seconds)
        records = await closed_loop(exchange, requests, concurrency, until=seconds)
        summary = summarise(records, self.runner.config.goals)
        return max(summary.requests_per_s, 1 / seconds)

    async def probe(self, rate: float, seconds: float) -> Probe:
        """Offer ``rate`` requests/s for most of ``seconds``, and judge the requests that have ended by
        then."""
        window = _SENDING * seconds
        count = min(_MOST, max(_FEWEST, round(rate * window)))
        requests = self.runner.prepared(count, self.served, self.request)
        times = send_times(len(requests), rate, self.runner.config.burstiness, next(self.runner._seeds))
        # The mean of few gaps is far from the rate's; stretched, the gaps fill the window.
        stretch = window / (times[-1] * len(times) / (len(times) - 1)) if times[-1] else 1.0
        exchange = RequestSender(self.client, seconds)
        records = await open_loop(exchange, requests, [at * stretch for at in times], until=seconds)
        goals = self.runner.config.goals
        summary = summarise(records, goals)
        attainment = summary.goodput.attainment if summary.goodput else 0.0
        return Probe(
            rate=len(requests) / window,
            requests=len(requests),
            attainment=attainment,
            met=attainment >= self.runner.attainment or math.isclose(attainment, self.runner.attainment),
            ttft=summary.ttft.p90 if summary.ttft else None,
            itl=summary.itl.p90 if summary.itl else None,
            output_tokens_per_s=summary.output_tokens_per_s,
        )
