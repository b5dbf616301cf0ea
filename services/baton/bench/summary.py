"""The figures of a run, computed from the records of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.bench.goals import Goals
from baton.bench.record import RequestRecord
from baton.bench.spread import Spread


@dataclass(frozen=True, slots=True)
class GoodputSummary:
    """The requests that met all goals."""

    requests_per_s: float
    attainment: float
    """The share of requests that met all goals, of all requests, failed ones included."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Times are in seconds; tokens and latencies are those of whole answers."""

    requests: int
    completed: int
    errors: Mapping[str, int]
    duration: float
    """The time from the first sending to the end of the last request."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    longest_gap: Spread | None
    """The longest waits between two chunks, of all requests with at least two chunks."""
    lateness: Spread | None
    """How much later than due requests were sent, which is the client's own fault."""
    tokens_per_chunk_known: bool
    goodput: GoodputSummary | None

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return self.prompt_tokens_per_s + self.output_tokens_per_s


def summarise(records: Sequence[RequestRecord], goals: Goals) -> Summary:
    """Return the figures of at least one record. Goodput is left out without goals."""
    whole = [record for record in records if record.failure is None]
    began = min(record.sent for record in records)
    duration = max(record.sent + record.ended for record in records) - began
    prompt = sum(record.prompt_tokens for record in whole)
    output = sum(record.output_tokens for record in whole)
    return Summary(
        requests=len(records),
        completed=len(whole),
        errors=dict(Counter(record.failure.kind for record in records if record.failure)),
        duration=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(record.cached_tokens for record in whole),
        requests_per_s=_rate(len(whole), duration),
        prompt_tokens_per_s=_rate(prompt, duration),
        output_tokens_per_s=_rate(output, duration),
        ttft=Spread.of([record.ttft for record in whole]),
        tpot=Spread.of([tpot for record in whole if (tpot := record.tpot) is not None]),
        itl=Spread.of([latency for record in whole for latency in record.itl]),
        e2e=Spread.of([record.e2e for record in whole]),
        longest_gap=Spread.of([gap for record in whole if (gap := record.longest_gap) is not None]),
        lateness=Spread.of([record.lateness for record in records]),
        tokens_per_chunk_known=all(record.tokens_per_chunk_known for record in whole),
        goodput=_goodput(records, goals, duration) if goals else None,
    )


def _goodput(records: Sequence[RequestRecord], goals: Goals, duration: float) -> GoodputSummary:
    good = sum(record.meets(goals) for record in records)
    return GoodputSummary(_rate(good, duration), good / len(records))


def _rate(count: int, duration: float) -> float:
    return count / duration if duration > 0 else 0.0
