"""How fast an engine goes, against steps whose times follow a known rule."""

from __future__ import annotations

import random

import pytest

from baton.engine.pace import StepSpeeds


def test_nothing_is_known_at_first() -> None:
    pace = StepSpeeds()
    assert (pace.base_s, pace.row_s, pace.prefill_tokens_per_s) == (0.0, 0.0, 0.0)


def test_base_and_slope_are_found_through_noise() -> None:
    pace, draw = StepSpeeds(), random.Random(1)
    for _ in range(300):
        rows = draw.randint(1, 32)
        pace.step(rows, 0, (0.02 + 0.001 * rows) * draw.uniform(0.95, 1.05))
    assert pace.base_s == pytest.approx(0.02, rel=0.1)
    assert pace.row_s == pytest.approx(0.001, rel=0.1)


def test_noise_over_one_number_of_rows_is_no_slope() -> None:
    pace, draw = StepSpeeds(), random.Random(1)
    for _ in range(300):
        pace.step(8, 0, draw.uniform(0.01, 0.03))
    assert pace.row_s == 0.0
    assert pace.base_s == pytest.approx(0.02, rel=0.1)


def test_a_slope_never_leaves_the_base_below_nothing() -> None:
    pace = StepSpeeds()
    for rows in (1, 10) * 50:
        pace.step(rows, 0, 0.001 * rows * rows)
    assert pace.base_s >= 0.0
    assert pace.row_s > 0.0


def test_what_decoding_takes_is_not_the_prompts() -> None:
    pace = StepSpeeds()
    for rows in (1, 2, 4, 8) * 50:
        pace.step(rows, 0, 0.02 + 0.001 * rows)
    for _ in range(50):
        pace.step(8, 64, 0.028 + 0.064)
        pace.step(0, 256, 0.256)
    assert pace.prefill_tokens_per_s == pytest.approx(1000, rel=0.05)


def test_the_figures_follow_a_change() -> None:
    pace = StepSpeeds()
    for _ in range(200):
        pace.step(0, 100, 0.1)
        pace.step(4, 0, 0.01)
    for _ in range(400):
        pace.step(0, 100, 0.2)
        pace.step(4, 0, 0.03)
    assert pace.prefill_tokens_per_s == pytest.approx(500, rel=0.05)
    assert pace.base_s + 4 * pace.row_s == pytest.approx(0.03, rel=0.05)


def test_a_slow_beginning_is_soon_forgotten() -> None:
    pace = StepSpeeds()
    pace.step(0, 100, 5.0)
    pace.step(4, 0, 3.0)
    for _ in range(12):
        pace.step(0, 100, 0.1)
        pace.step(4, 0, 0.02)
    assert pace.prefill_tokens_per_s == pytest.approx(1000, rel=0.02)
    assert pace.base_s + 4 * pace.row_s == pytest.approx(0.02, rel=0.05)


def test_a_step_that_was_held_up_counts_for_little() -> None:
    pace = StepSpeeds()
    for _ in range(200):
        pace.step(0, 100, 0.05)
        pace.step(4, 0, 0.01)
    pace.step(0, 100, 30.0)
    pace.step(4, 0, 30.0)
    assert pace.prefill_tokens_per_s == pytest.approx(2000, rel=0.2)
    assert pace.base_s + 4 * pace.row_s == pytest.approx(0.01, rel=0.2)


def test_a_worker_that_has_become_slower_is_told_so() -> None:
    pace = StepSpeeds()
    for _ in range(20):
        pace.step(0, 100, 0.05)
    for _ in range(400):
        pace.step(0, 100, 0.5)
    assert pace.prefill_tokens_per_s == pytest.approx(200, rel=0.1)
