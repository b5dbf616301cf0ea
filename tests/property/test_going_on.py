"""The prefix that a router expects a worker to go on with, against the hits of the worker's engine."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sequence import Sequence
from baton.router.placement.prefixes import Prefixes
from baton.v1 import worker_pb2 as pb
from baton.worker.block_feed import BlockFeed
from baton.worker.kv_groups import groups_of
from tests.support.deep import all_deep_but
from tests.support.fake_engine import fake_engine, run
from tests.support.grouped_model import KEPT, layout_of

BLOCK_SIZE = 4
LONGEST = 256
"""Most tokens of a chat."""
TURNS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(20, 80), st.integers(1, 9)), min_size=8, max_size=16
)
"""Requests, each by the chat that it goes on with, the tokens of its message and those of its answer."""


@pytest.mark.parametrize("kept", all_deep_but(3, KEPT))
@settings(max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "60")) // 6, deadline=None)
@given(turns=TURNS, room=st.integers(10, 25))
def test_a_hit_is_as_long_as_the_router_expects(
    kept: str, turns: list[tuple[int, int, int]], room: int
) -> None:
    """Chats in a pool of 1 to 2.5 times the longest one, so that parts of their prefixes are evicted."""
    layout = layout_of(kept, BLOCK_SIZE)
    pages = (LONGEST // BLOCK_SIZE + 1) * layout.num_tables + 4 * layout.state_pages
    engine = fake_engine(pages * room // 10, BLOCK_SIZE, kept=kept)
    feed, router = BlockFeed(engine, most=50), Prefixes()
    hello = pb.WorkerHello(tells_blocks=True, block_size=BLOCK_SIZE, kv_groups=groups_of(layout))
    router.joined("w", hello)
    chats: dict[int, list[int]] = {}
    counters = engine.scheduler.counters
    for number, (chat, asked, answered) in enumerate(turns):
        before = chats.get(chat, [chat] * 5)
        prompt = [*before[: LONGEST - asked - answered], *((7 * number + i) % 90 for i in range(asked))]
        while (events := feed.take()) is not None:
            assert router.told("w", events)
        expected = router.cached(prompt).get("w", 0)
        hit = counters.prefix_hit_tokens
        [output] = run(engine, Sequence(f"r{number}", 0, prompt, ResolvedSampling(max_tokens=answered)))
        assert counters.prefix_hit_tokens - hit == expected
        chats[chat] = [*prompt, *output]
