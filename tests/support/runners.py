"""The runner of an engine whose steps are computed, for tests that look at its pool or its model."""

from __future__ import annotations

from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner


def runner_of(engine: Engine) -> ModelRunner:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    return runner
