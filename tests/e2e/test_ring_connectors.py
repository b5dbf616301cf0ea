"""The ring gives one worker's tokens over every connector, and links come back when a worker does."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, running_ring
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

NEW_TOKENS = 16
LEAST_MARGIN = 2e-4
LENGTHS = (1, 17, 64, 130, 333, 600)
CHUNKED = ("--prefill-chunk", "128", "--num-blocks", "512")
WHOLE = ("--no-chunked-prefill", "--max-num-batched-tokens", "1024", "--num-blocks", "512")

without_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name = "qwen3" if "qwen3" in TINY_MODELS else min(TINY_MODELS)
    return name, TINY_MODELS[name](tmp_path_factory.mktemp("model") / name)


@pytest.fixture(scope="module")
def prompts(model: tuple[str, Path]) -> list[list[int]]:
    """None whose answer hangs on two logits so close that a batch may rightly choose the other token."""
    rng, drawn = random.Random(11), list[list[int]]()
    for length in LENGTHS:
        while True:
            prompt = [rng.randrange(256) for _ in range(length)]
            if oracle_greedy(model[1], prompt, NEW_TOKENS)[1] > LEAST_MARGIN:
                break
        drawn.append(prompt)
    return drawn


async def answers(ring: Ring, model: str, prompts: list[list[int]]) -> list[list[int]]:
    async with RingClient(ring.url, model) as client:
        asked = [client.complete(p, max_tokens=NEW_TOKENS, temperature=0) for p in prompts]
        return [answer.token_ids for answer in await asyncio.gather(*asked)]


@contextmanager
def ring_over(
    tmp: Path, path: Path, connector: str, options: tuple[str, ...], prefill: int = 1, decode: int = 1
) -> Iterator[Ring]:
    chosen = (*options, "--connector", connector)
    with running_ring(tmp, model=str(path), prefill=prefill, decode=decode, options=chosen) as ring:
        yield ring


@pytest.fixture(scope="module")
def expected(
    model: tuple[str, Path], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    name, path = model
    tmp = tmp_path_factory.mktemp("one")
    with running_ring(tmp, model=str(path), prefill=0, decode=0, both=1, options=CHUNKED) as ring:
        return asyncio.run(answers(ring, name, prompts))


@pytest.mark.parametrize(
    ("connector", "transports", "options"),
    [
        pytest.param("tcp", None, CHUNKED, id="tcp"),
        pytest.param("ucx", None, CHUNKED, id="ucx", marks=without_ucxx),
        pytest.param("ucx", "posix,self", WHOLE, id="ucx-shm", marks=without_ucxx),
        pytest.param("ucx", "tcp", CHUNKED, id="ucx-tcp", marks=without_ucxx),
        pytest.param("nccl", None, WHOLE, id="gloo"),
    ],
)
async def test_the_tokens_are_one_workers(
    model: tuple[str, Path],
    prompts: list[list[int]],
    expected: list[list[int]],
    connector: str,
    transports: str | None,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, path = model
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    with ring_over(tmp_path, path, connector, options) as ring:
        assert await answers(ring, name, prompts) == expected, "with a cold cache"
        assert await answers(ring, name, prompts) == expected, "with a warm cache"
        ring.wait_idle()
        used = "gloo" if connector == "nccl" else connector
        assert f"connector {used}" in ring.of_role("decode")[0].log.read_text()


async def test_two_by_two_and_a_worker_that_comes_back(
    model: tuple[str, Path], prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    name, path = model
    with ring_over(tmp_path, path, "auto", CHUNKED, prefill=2, decode=2) as ring:
        for _ in range(2):
            assert await answers(ring, name, prompts) == expected
        for role in ("decode", "prefill"):
            victim = ring.of_role(role)[0]
            victim.kill()
            victim.restart()
            ring.wait_workers()
            for _ in range(2):
                assert await answers(ring, name, prompts) == expected
        ring.wait_idle()
        best = "ucx" if importlib.util.find_spec("ucxx") else "tcp"
        for worker in ring.workers:
            assert f"connector {best}" in worker.log.read_text(), f"{worker.name} took no part"
