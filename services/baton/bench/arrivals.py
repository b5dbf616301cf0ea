"""The times at which an open loop sends its requests."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def send_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return ``count`` times in seconds, ascending from 0, at a mean ``rate`` in requests/s; infinite: all at
    0.

    The gaps are independent and gamma-distributed with shape ``burstiness`` and mean 1 / rate: 1 makes a
    Poisson process, less is burstier, more is steadier (variance of a gap: 1 / (rate² · burstiness)).
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"arrivals-{seed}")
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))[:count]
