"""One ring with the demo model serves every test that does it no harm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, running_ring
from tests.support.warm import warm_processes


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Rings are forked from a process that has imported torch."""
    with warm_processes():
        yield


@pytest.fixture(scope="session")
def demo_ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """One prefill and one decode worker in float32. Tests leave it idle."""
    with running_ring(tmp_path_factory.mktemp("demo-ring")) as ring:
        yield ring


@pytest.fixture
async def demo(demo_ring: Ring) -> AsyncIterator[RingClient]:
    async with RingClient(demo_ring.url, "demo") as client:
        yield client
    demo_ring.wait_idle()
