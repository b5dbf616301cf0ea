"""Steady streams with bursts of long prompts among them: how long the streams wait for their next token.

The load is given by times, not by the server's speed: the streams run from the start to the end, and bursts
come when they are due. So it is the same for every server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.bench.config import ServeConfig, parse_url
from baton.bench.exchange import RequestSender
from baton.bench.http import HttpClient
from baton.bench.load_generator import closed_loop, open_loop
from baton.bench.record import RequestRecord
from baton.bench.serve import find_request, load_tokenizer, prepare
from baton.bench.spread import Spread
from baton.bench.target import find_model
from baton.bench.workload.config import WorkloadConfig
from baton.bench.workload.synthetic import random_lengths
from baton.bench.workload.vocabulary import Vocabulary
from loadtest.turns import Figures, found

PATIENCE_S = 300.0


@dataclass(frozen=True)
class Bursts:
    """The load. Times are in seconds, lengths in tokens."""

    streams: int = 4
    stream_input: int = 100
    stream_output: int = 6000
    """More tokens than a stream can get to the end, when it is given up."""
    settle: float = 3.0
    """The time from the start of the streams to the first burst."""
    count: int = 3
    every: float = 10.0
    prompts: int = 2
    """The prompts of a burst."""
    prompt_len: int = 3000
    answer_len: int = 8

    @property
    def times(self) -> list[float]:
        """The moments at which the prompts of the bursts are sent."""
        return [self.settle + self.every * burst for burst in range(self.count) for _ in range(self.prompts)]

    @property
    def end(self) -> float:
        return self.settle + self.every * self.count

    def __str__(self) -> str:
        return f"{self.streams} streams, {self.prompts} x {self.prompt_len} every {self.every:g} s"


@dataclass(frozen=True)
class Outcome:
    """The records of the streams and of the bursts' prompts."""

    streams: Sequence[RequestRecord]
    prompts: Sequence[RequestRecord]


def ask_bursts(model: Path, load: Bursts, url: str, seed: int) -> Figures:
    """Ask an engine for the load, and return its figures. Raises RuntimeError if a stream ended before the
    time, or if a burst's prompt has no whole answer."""
    return figures_of(asyncio.run(offer(url, model, load, seed)), load)


async def offer(url: str, model: Path, load: Bursts, seed: int) -> Outcome:
    """Offer the load once."""
    config = ServeConfig(workload=WorkloadConfig(), url=url)
    client = HttpClient(parse_url("url", url))
    try:
        served = await find_model(client, None)
        vocabulary = Vocabulary(load_tokenizer(str(model)))
        request = await find_request(client, config, served, vocabulary)
        steady = random_lengths(load.streams, load.stream_input, load.stream_output, 0, 2 * seed)
        long = random_lengths(len(load.times), load.prompt_len, load.answer_len, 0, 2 * seed + 1)
        bodies = [prepare(items, request, vocabulary, seed) for items in (steady, long)]
        exchange = RequestSender(client, PATIENCE_S)
        streams, prompts = await asyncio.gather(
            closed_loop(exchange, bodies[0], load.streams, load.end),
            open_loop(exchange, bodies[1], load.times),
        )
    finally:
        client.close()
    return Outcome(streams, prompts)


def figures_of(outcome: Outcome, load: Bursts) -> Figures:
    """Return the figures of the streams from the first burst on, and of the bursts. Raises RuntimeError as
    `ask_bursts` does."""
    for record in outcome.streams:
        if record.failure is None or record.failure.kind != "unfinished":
            raise RuntimeError(f"a stream did not run to the end: {record.failure or 'its answer is over'}")
    for record in outcome.prompts:
        if record.failure is not None or record.output_tokens != load.answer_len:
            raise RuntimeError(f"a prompt of a burst: {record.failure or record.output_tokens}")
    gaps = [gap for record in outcome.streams for gap in gaps_since(record, load.settle)]
    itl, ttft = found(Spread.of(gaps)), found(Spread.of([record.ttft for record in outcome.prompts]))
    return {
        "streams' ITL p99, ms": itl.p99 * 1e3,
        "streams' ITL median, ms": itl.median * 1e3,
        "streams' longest gap, ms": itl.maximum * 1e3,
        "streams' tokens/s": itl.count / (load.end - load.settle),
        "bursts' TTFT median, ms": ttft.median * 1e3,
        "bursts' TTFT longest, ms": ttft.maximum * 1e3,
    }


def gaps_since(record: RequestRecord, since: float) -> Iterable[float]:
    """Return a stream's inter-token latencies, for the tokens that came at ``since`` (on the run's clock) or
    later. A chunk of k tokens counts as k equal latencies, as in `RequestRecord.itl`."""
    for before, now in zip(record.arrivals, record.arrivals[1:], strict=False):
        if record.sent + now.at >= since:
            yield from [(now.at - before.at) / now.tokens] * now.tokens
