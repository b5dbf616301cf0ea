"""The runner of an engine whose steps are computed, for tests that look at its pool or its model."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.engine import Engine
from baton.engine.kv.arriving import Arriving, ArrivingGroup
from baton.engine.runner import ModelRunner


def runner_of(engine: Engine) -> ModelRunner:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


def arrived(engine: Engine, blocks: Sequence[int]) -> Arriving:
    """Blocks, of an engine whose pages are blocks, in which the KV of a sequence has come."""
    [group] = engine.layout.groups
    return Arriving((ArrivingGroup(group, 0, tuple(blocks), (range(len(blocks)),)),))
