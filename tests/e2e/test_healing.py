"""Links are warm before the first request and come back without one; dead peers leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import pytest

from baton.process import ready
from tests.support.clients import RingClient
from tests.support.ring import Ring, Service, running_ring
from tests.support.tiny_models import TINY_MODELS

CYCLES = int(os.environ.get("BATON_RESTART_CYCLES", "8"))
MODEL = "qwen3"


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """Two workers of each role, of which the first may be killed."""
    model = TINY_MODELS[MODEL](tmp_path_factory.mktemp("model") / MODEL)
    tmp = tmp_path_factory.mktemp("ring")
    with running_ring(tmp, model=str(model), prefill=2, decode=2, options=("--num-blocks", "256")) as running:
        yield running


def address(worker: Service) -> str:
    assert isinstance(worker.ready, ready.WorkerReady)
    return worker.ready.address


def links_made(prefill: Service, decode: Service) -> int:
    """How often this prefill process has linked to a process at decode's address."""
    return prefill.log.read_text().count(f"linked to decode at {address(decode)},")


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    for _ in iter(condition, True):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)


async def restart(*victims: Service) -> None:
    """Kill the processes and start them again at the same addresses, all at once."""
    for victim in victims:
        victim.kill()
    await asyncio.gather(*(asyncio.to_thread(victim.restart) for victim in victims))


async def ask(ring: Ring, count: int) -> None:
    """Different requests at once, each a handoff."""
    async with RingClient(ring.url, MODEL) as client:
        prompts = [[random.randrange(256) for _ in range(100)] for _ in range(count)]
        asked = (client.complete(prompt, max_tokens=4, temperature=0) for prompt in prompts)
        assert all(len(answer.token_ids) == 4 for answer in await asyncio.gather(*asked))


async def test_links_are_warm_before_the_first_request_and_come_back_without_one(ring: Ring) -> None:
    prefills, decodes = ring.of_role("prefill"), ring.of_role("decode")
    await until(lambda: all(links_made(p, d) == 1 for p in prefills for d in decodes))
    await restart(decodes[0])
    await until(lambda: all(links_made(p, decodes[0]) == 2 for p in prefills))
    await restart(prefills[0])
    await until(lambda: all(links_made(prefills[0], d) >= 2 for d in decodes))
    await ask(ring, 4)


class Footprint(NamedTuple):
    """What a process uses."""

    fds: int
    threads: int
    rss: int

    @classmethod
    def of(cls, service: Service) -> Footprint:
        process = psutil.Process(service.process.pid)
        return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)


@pytest.mark.deep
async def test_survivors_of_many_restarts_keep_nothing_of_the_dead(ring: Ring) -> None:
    """``BATON_RESTART_CYCLES=50 make test ARGS="-k survivors --timeout 1800"`` for the long run."""
    victims = [ring.of_role(role)[0] for role in ("prefill", "decode")]
    survivors = [service for service in (*ring.workers, ring.router) if service not in victims]
    prefill, decode = (ring.of_role(role)[1] for role in ("prefill", "decode"))
    before = dict[str, Footprint]()
    for cycle in range(CYCLES):
        linked = links_made(prefill, victims[1]), links_made(victims[0], decode)
        await restart(*victims)
        ring.wait_workers()
        await until(lambda: links_made(prefill, victims[1]) > linked[0])  # noqa: B023
        await until(lambda: links_made(victims[0], decode) > linked[1])  # noqa: B023
        await ask(ring, 8)
        if cycle == 1:  # caches and pools of threads are filled by now
            before = {service.name: Footprint.of(service) for service in survivors}
    ring.wait_idle()
    after = {service.name: Footprint.of(service) for service in survivors}
    for name, then in before.items():
        now = after[name]
        assert now.fds <= then.fds + 4, f"{name}: {then} → {now}"
        assert now.threads <= then.threads + 2, f"{name}: {then} → {now}"
        assert now.rss <= then.rss + 8 * 2**20, f"{name}: {then} → {now}"
