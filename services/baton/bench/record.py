"""The record of one request, and the latencies that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.bench.goals import Goals
from baton.bench.spread import percentile


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The reason why a request has no whole answer. ``kind`` is one of a few values, to count by."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """A chunk with tokens. ``at`` is in seconds since the request was sent."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of one request. ``due`` and ``sent`` are in seconds since the run began."""

    index: int
    due: float
    sent: float
    ended: float
    """The time at which the answer was whole, or failed, in seconds since the request was sent."""
    arrivals: tuple[TokenArrival, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    tokens_per_chunk_known: bool = True
    """Whether the server reports how many tokens each chunk has; otherwise every arrival counts as one."""
    failure: RequestFailure | None = field(default=None)

    @property
    def lateness(self) -> float:
        """How much later than due the request was sent, in seconds."""
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        """The time to the first token, in seconds."""
        return self.arrivals[0].at

    @property
    def e2e(self) -> float:
        """The time from sending to the last token, in seconds."""
        return self.arrivals[-1].at

    @property
    def tpot(self) -> float | None:
        """The time per output token after the first: (E2E - TTFT) / (output tokens - 1); None for fewer than
        two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: a chunk of k tokens, g after the previous chunk, counts as k of g / k.
        Further tokens of the first chunk count as 0. So their sum is E2E - TTFT, and their mean is the
        TPOT."""
        latencies = [0.0] * (self.arrivals[0].tokens - 1)
        for before, now in zip(self.arrivals, self.arrivals[1:], strict=False):
            latencies += [(now.at - before.at) / now.tokens] * now.tokens
        return latencies

    @property
    def longest_gap(self) -> float | None:
        """The longest wait between two chunks, which the ITLs of one chunk's tokens hide; None for fewer than
        two chunks."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((now.at - before.at for before, now in pairs), default=None)

    def meets(self, goals: Goals) -> bool:
        """Whether the answer is whole and within all limits. A latency that an answer of one token does not
        have is within any limit."""
        if self.failure is not None:
            return False
        latencies = sorted(self.itl) if goals.itl is not None else []
        itl = percentile(latencies, 99) if latencies else None
        measured = ((self.ttft, goals.ttft), (self.tpot, goals.tpot), (itl, goals.itl), (self.e2e, goals.e2e))
        return all(value is None or limit is None or value <= limit for value, limit in measured)
