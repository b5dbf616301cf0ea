"""Requests with every feature drawn at random; ``python -m loadtest.random_requests`` asks for many more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.random_requests import ask_all, draw
from tests.support.ring import running_ring
from tests.support.rings_at_their_limit import DRAFTS, OPTIONS, ROUTER_OPTIONS, errors_logged

pytestmark = [pytest.mark.beside, pytest.mark.deep]

NUM_REQUESTS = 200


async def test_all_are_answered_and_nothing_is_kept(tmp_path: Path) -> None:
    rng = random.Random(2)
    asks = [draw(rng) for _ in range(NUM_REQUESTS)]
    with running_ring(
        tmp_path, options=OPTIONS, decode_options=DRAFTS, router_options=ROUTER_OPTIONS
    ) as ring:
        tally = await ask_all(ring.url, asks, at_once=16)
        ring.wait_idle()
        assert tally.faults + errors_logged(ring) == []
        assert tally.ended["stop"] > 0 and tally.ended["length"] > 0
