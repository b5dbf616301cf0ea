"""What the comparison of two source trees' routers tells about its own rounds."""

from __future__ import annotations

import random
import statistics

import pytest

from loadtest.routers.against import median_interval


@pytest.mark.parametrize(
    ("rounds", "interval"),
    [
        (1, (0, 0)),
        (3, (0, 2)),
        (5, (0, 4)),
        (6, (0, 5)),
        (8, (0, 7)),
        (9, (1, 7)),
        (12, (2, 9)),
        (20, (5, 14)),
    ],
)
def test_the_interval_lies_between_the_ranks_of_the_sign_test(rounds: int, interval: tuple[int, int]) -> None:
    assert median_interval([float(x) for x in reversed(range(rounds))]) == interval


def test_nineteen_of_twenty_intervals_hold_the_median() -> None:
    rng = random.Random(1)
    true = statistics.NormalDist(1.0, 0.05)
    drawn = (median_interval([true.inv_cdf(rng.random()) for _ in range(9)]) for _ in range(2000))
    held = sum(low <= true.median <= high for low, high in drawn)
    assert held / 2000 == pytest.approx(0.961, abs=0.02)  # 1 - 2 * (1 + 9) / 2**9
