"""A day of requests: code by day, chat in the evening, bursts at any time."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
MINUTE_S = 60.0
SLOT_S = 10.0
"""The time for which the rate stays the same, in seconds."""
MAX_OVER = 4.0
"""Most times that a rate may exceed its kind's rate at that hour."""


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    prompt: int
    """Tokens that no cache holds."""
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of requests: lengths are lognormal with these means and sigmas; rates a bell over the day."""

    per_s: float
    """The rate at the kind's hour."""
    base_per_s: float
    hour: float
    width_h: float
    prompt: float
    prompt_sigma: float
    answer: float
    answer_sigma: float

    def rate(self, at_s: float) -> float:
        away = abs(at_s / HOUR_S % 24 - self.hour)
        away = min(away, 24 - away)
        return self.base_per_s + self.per_s * math.exp(-((away / self.width_h) ** 2) / 2)


KINDS = (
    # The means of both lengths are those of Azure's traces of 2023, code and conversation.
    Kind(
        per_s=5.0,
        base_per_s=0.3,
        hour=12.5,
        width_h=2.8,
        prompt=2048,
        prompt_sigma=0.7,
        answer=28,
        answer_sigma=0.8,
    ),
    Kind(
        per_s=6.0,
        base_per_s=0.7,
        hour=20.0,
        width_h=2.5,
        prompt=1155,
        prompt_sigma=0.8,
        answer=211,
        answer_sigma=0.6,
    ),
)
BURSTS = 24
"""The bursts of a day, half of each kind: requests suddenly become 1.5 to 2.5 times as many for 2 to 15
minutes."""
WAVER = 0.12
"""Standard deviation of the rate's logarithm from minute to minute, of which half stays for the next."""


def day(seed: int, *, hours: float = 24.0, bursts: int = BURSTS) -> list[Request]:
    """Return the requests of the first ``hours`` of a day in their order, all drawn from ``seed``."""
    draw = random.Random(seed)
    each = bursts // len(KINDS)
    found = [request for kind in KINDS for request in _requests(draw, kind, each, hours * HOUR_S)]
    return sorted(found, key=lambda request: request.at_s)


def _requests(draw: random.Random, kind: Kind, number: int, seconds: float) -> Iterator[Request]:
    bursts = _Bursts(draw, number)
    factors = _wavering(draw, math.ceil(seconds / MINUTE_S))
    for slot in range(math.ceil(seconds / SLOT_S)):
        begins = slot * SLOT_S
        over = min(MAX_OVER, factors[int(begins / MINUTE_S)] * bursts.factor(begins))
        per_s = kind.rate(begins) * over
        now = begins + draw.expovariate(per_s)
        while now < min(begins + SLOT_S, seconds):
            prompt = length(draw, kind.prompt, kind.prompt_sigma, 16, 8192)
            yield Request(now, prompt, length(draw, kind.answer, kind.answer_sigma, 2, 1500))
            now += draw.expovariate(per_s)


class _Bursts:
    def __init__(self, draw: random.Random, number: int) -> None:
        begins = sorted(draw.uniform(0, DAY_S) for _ in range(number))
        self._begins = begins
        self._bursts = [(draw.uniform(120, 900), draw.uniform(1.5, 2.5)) for _ in begins]

    def factor(self, at_s: float) -> float:
        index = bisect_right(self._begins, at_s) - 1
        if index < 0:
            return 1.0
        seconds, factor = self._bursts[index]
        return factor if at_s < self._begins[index] + seconds else 1.0


def _wavering(draw: random.Random, minutes: int) -> list[float]:
    factors, state = [], 0.0
    for _ in range(minutes):
        state = 0.5 * state + draw.gauss(0, WAVER * math.sqrt(0.75))
        factors.append(math.exp(state))
    return factors


def length(draw: random.Random, mean: float, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, round(mean * draw.lognormvariate(-(sigma**2) / 2, sigma))))
