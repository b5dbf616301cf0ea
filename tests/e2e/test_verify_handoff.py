"""``--verify-handoff`` on real processes: what arrives changed is never run, and is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ring import Ring, running_ring
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

pytestmark = pytest.mark.beside

NEW_TOKENS = 8
PROMPTS = [[(17 * i + 3 * n) % 256 for i in range(n)] for n in (20, 33, 48, 70, 90, 100)]
OVER_TCP = ("--connector", "tcp", "--num-blocks", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["llama"](tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [oracle_greedy(model, prompt, NEW_TOKENS)[0] for prompt in PROMPTS]


@pytest.fixture(params=all_deep_but(1, ["prefill", "decode"]))
def careless(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Ring]:
    """A ring whose decode worker receives a wrong bit now and then; one side asks for checksums."""
    with running_ring(
        tmp_path,
        model=str(model),
        options=OVER_TCP,
        decode_program="tests.support.careless_worker",
        **{f"{request.param}_options": ("--verify-handoff",)},  # type: ignore[arg-type]
    ) as ring:
        yield ring


def aborted(ring: Ring, reason: str) -> float:
    return sum(
        value
        for worker in ring.of_role("decode")
        for name, value in worker.metrics().items()
        if name.startswith("baton_handoffs_aborted_total") and f'reason="{reason}"' in name
    )


async def test_what_arrives_changed_is_computed_again(careless: Ring, expected: list[list[int]]) -> None:
    async with RingClient(careless.url, "llama") as client:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = await client.complete(prompt, max_tokens=NEW_TOKENS, temperature=0)
            assert answer.token_ids == tokens
    assert aborted(careless, "checksum") > 0, "nothing was changed on the way: this shows nothing"
    careless.wait_idle()


async def test_without_checksums_it_would_have_been_run(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is one that matters: it is the checksums that keep it from the client. In each message, as
    which ones are every third depends on who comes first, and one number alone may turn no token."""
    monkeypatch.setenv("BATON_CARELESS_EVERY", "1")
    with running_ring(
        tmp_path, model=str(model), options=OVER_TCP, decode_program="tests.support.careless_worker"
    ) as ring:
        async with RingClient(ring.url, "llama") as client:
            asked = [client.complete(p, max_tokens=NEW_TOKENS, temperature=0) for p in PROMPTS]
            answers = [answer.token_ids for answer in await asyncio.gather(*asked)]
        assert answers != expected


async def test_a_request_whose_handoffs_always_break_fails_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CARELESS_EVERY", "1")
    with running_ring(
        tmp_path,
        model=str(model),
        options=(*OVER_TCP, "--verify-handoff"),
        decode_program="tests.support.careless_worker",
        router_options=("--max-attempts", "3"),
    ) as ring:
        async with RingClient(ring.url, "llama") as client:
            with pytest.raises(httpx.HTTPStatusError) as failure:
                await client.complete(PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0)
        assert failure.value.response.status_code == 503
        assert "checksum" in failure.value.response.text
        assert aborted(ring, "checksum") == 3
        ring.wait_idle()
