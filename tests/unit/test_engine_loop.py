"""The thread that steps the engine: where it computes, and what the thread that loaded the model leaves."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from baton.worker.engine_loop import EngineLoop
from baton_kernels.cpu import library
from baton_kernels.cpu.linear import PackedWeight
from tests.support.fake_engine import fake_engine
from tests.support.threads import in_threads, threads


async def test_it_computes_with_threads_of_its_own() -> None:
    """Those of this one end: with both there would be more than cores. Its own are bound, each to a core."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core, so there is one thread")
    with in_threads(len(cores)):
        library.release_threads()
        before = threads()
        weight = PackedWeight.of(torch.randn(640, 16))
        assert weight is not None
        weight.multiply(torch.ones(8, 16))
        assert len(threads() - before) == len(cores) - 1
        loop = EngineLoop(fake_engine(), lambda outputs: None, on_crash=lambda: pytest.fail("crashed"))
        loop.start()
        await loop.settled()
        [engine] = [thread for thread in threading.enumerate() if thread.name == "engine"]
        assert engine.native_id is not None
        own = threads() - before
        assert engine.native_id in own
        assert sorted(map(min, map(os.sched_getaffinity, own))) == sorted(cores)
        assert all(len(os.sched_getaffinity(thread)) == 1 for thread in own)
        assert os.sched_getaffinity(0) == cores
        loop.stop()
