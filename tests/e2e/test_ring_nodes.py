"""A decode worker of two ranks on two nodes: separate trees of processes, with addresses of their own."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from baton.net import sockets
from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ipv6 import needs_ipv6
from tests.support.ring import Service, running, running_routers, worker
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

pytestmark = pytest.mark.beside

NEW_TOKENS = 8
MIN_MARGIN = 1e-3
"""Between the best logit and the next: ranks add up in another order."""
MAX_TO_END_S = 8.0
CRASHED = 70


def clear_questions(model: Path) -> dict[tuple[int, ...], list[int]]:
    """Prompt → what one process answers."""
    rng = random.Random(3)
    drawn: dict[tuple[int, ...], list[int]] = {}
    while len(drawn) < 2:
        prompt = [rng.randrange(250) for _ in range(100)]
        answer, margin = oracle_greedy(model, prompt, NEW_TOKENS)
        if margin > MIN_MARGIN:
            drawn[tuple(prompt)] = answer
    return drawn


@pytest.mark.parametrize(
    ("leads", "follows"),
    all_deep_but(1, [("127.0.0.1", "127.0.0.2"), pytest.param("::1", "::1", marks=needs_ipv6)]),
    ids=["IPv4", "IPv6"],
)
async def test_a_worker_on_two_nodes(tmp_path: Path, leads: str, follows: str) -> None:
    """KV blocks come from one process to each rank at its own node's address; the tokens are one process's;
    and the node that is killed ends the other one."""
    model = TINY_MODELS["llama"](tmp_path / "llama")
    with sockets.listen(leads, 0) as free:
        port = str(free.getsockname()[1])
    on_two = ("--tensor-parallel-size", "2", "--nodes", "2", "--node-port", port)
    small = ("--num-blocks", "64", "--connector", "tcp", "--verify-handoff", "--host", leads)
    prefill = worker(tmp_path, "prefill", "prefill", str(model), *small)
    decode = worker(tmp_path, "decode", "decode", str(model), *small, *on_two)
    joining = ("--leader-address", leads, "--nodes", "2", "--node-index", "1", "--node-port", port)
    node = Service("node", ("node", *joining, "--host", follows), tmp_path / "node.log")
    node.start()
    try:
        with (
            running([prefill, decode]),
            running_routers(tmp_path, str(model), {"ring": [prefill, decode]}) as rings,
        ):
            [rank] = psutil.Process(node.process.pid).children()
            assert not psutil.Process(decode.process.pid).children()
            async with RingClient(rings["ring"].url, "llama") as client:
                for prompt, answer in clear_questions(model).items():
                    told = await client.complete(list(prompt), max_tokens=NEW_TOKENS, temperature=0)
                    assert told.token_ids == answer
            counted = decode.metrics()
            assert sum(v for name, v in counted.items() if name.startswith("baton_handoffs_completed")) == 2
            assert sum(v for name, v in counted.items() if name.startswith("baton_handoffs_aborted")) == 0
            listening = {c.laddr.ip for c in rank.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            assert listening == {follows}
            node.kill()
            killed = time.monotonic()
            assert decode.process.wait(60) == CRASHED
            rank.wait(60)
            assert time.monotonic() - killed < MAX_TO_END_S
            assert f"node 1 ({follows}) is gone" in decode.log.read_text()
    finally:
        node.stop()
