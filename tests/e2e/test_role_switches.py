"""Workers of real processes take other roles under streams, and no client notices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.core.role import Role
from baton.greeting.cluster_key import ClusterKeys
from baton.planner.switch_role import switch_role
from baton.process import ready
from tests.support.clients import Answer, RingClient
from tests.support.ring import CLUSTER_KEY, Service, running_ring

pytestmark = pytest.mark.beside

PROMPTS = [[100 + number, *range(200, 320)] for number in range(6)]
TOKENS = 60


async def switched(worker: Service, role: Role) -> None:
    assert isinstance(worker.ready, ready.WorkerReady)
    done = await switch_role(worker.ready.address, role, ClusterKeys(CLUSTER_KEY.encode()))
    assert done.now == role and done.was != role


async def test_workers_change_roles_and_back_under_streams(tmp_path: Path) -> None:
    options = ("--no-prefix-caching", "--num-blocks", "256")
    with running_ring(tmp_path, prefill=2, decode=1, options=options) as ring:
        stop = asyncio.Event()
        async with RingClient(ring.url, "demo") as client:

            async def stream(prompt: list[int]) -> Answer:
                return await client.stream(prompt, max_tokens=TOKENS, temperature=0)

            async def ask(prompt: list[int]) -> list[list[int]]:
                answers = []
                while not stop.is_set():
                    answers.append((await stream(prompt)).token_ids)
                return answers

            true = [(await stream(prompt)).token_ids for prompt in PROMPTS]
            clients = [asyncio.create_task(ask(prompt)) for prompt in PROMPTS]
            prefill, decode = ring.of_role("prefill")[0], ring.of_role("decode")[0]
            switches: list[tuple[Service, Role]] = [
                (prefill, "decode"),
                (decode, "prefill"),
                (decode, "decode"),
                (prefill, "prefill"),
            ]
            for worker, role in switches:
                await asyncio.sleep(0.3)
                await switched(worker, role)
                ring.wait_workers()
            await asyncio.sleep(0.3)
            stop.set()
            for prompt_answers, expected in zip(await asyncio.gather(*clients), true, strict=True):
                assert prompt_answers and all(answer == expected for answer in prompt_answers)
        told = prefill.metrics().items()
        counts = {name: value for name, value in told if value and "role_switches_total" in name}
        assert counts == {
            'baton_role_switches_total{from="decode",result="switched",to="prefill"}': 1,
            'baton_role_switches_total{from="prefill",result="switched",to="decode"}': 1,
        }
        assert prefill.metrics()['baton_engine_generated_tokens_total{role="decode"}'] > 0
        ring.wait_idle()
