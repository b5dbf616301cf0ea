"""Every feature at once, in a ring whose pools are too small: each answer is what it is alone."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.nixl import needs_nixl
from tests.support.random_requests import FORMS
from tests.support.ring import Ring, running_ring
from tests.support.rings_at_their_limit import DRAFTS, OPTIONS, errors_logged, totals
from tests.support.same import is_same

pytestmark = pytest.mark.beside

UCXX = importlib.util.find_spec("ucxx") is not None
PATHS = (
    "tcp",
    pytest.param("ucx", marks=pytest.mark.skipif(not UCXX, reason="ucxx is not installed")),
    pytest.param("nixl", marks=needs_nixl),
)
MAX_ASKED = 12
"""Whether requests meet in the pool is a matter of when they come."""
PROMPT = "A KV block holds the keys and values of some tokens of a sequence. "
KINDS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": FORMS[1], "temperature": 0.8},
    {"structured_outputs": FORMS[4], "temperature": 1.0, "n": 2},
    {"n": 4, "temperature": 1.2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0},
    {"presence_penalty": 1.0, "logprobs": 3, "temperature": 0.7, "top_p": 0.9},
    {"logprobs": 2, "prompt_logprobs": 1, "temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"use_beam_search": True, "best_of": 4, "n": 2},
)


@pytest.fixture(scope="module", params=all_deep_but(1, PATHS))
def ring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with running_ring(
        tmp_path_factory.mktemp("ring"),
        options=OPTIONS,
        prefill_options=("--connector", request.param),
        decode_options=("--connector", request.param, *DRAFTS),
    ) as running:
        yield running


@pytest.fixture
async def client(ring: Ring) -> AsyncIterator[RingClient]:
    async with RingClient(ring.url, "demo") as client:
        yield client
    ring.wait_idle()


def requests() -> list[dict[str, Any]]:
    """40, five of each kind. No two begin alike, so that their blocks are their own."""
    rng = random.Random(4)
    return [
        {
            "prompt": f"{number}: {PROMPT * rng.randint(1, 6)}",
            "max_tokens": rng.randint(20, 60),
            **({} if "use_beam_search" in kind else {"seed": number}),
            "priority": rng.randint(-3, 3),
            **kind,
        }
        for number, kind in enumerate(KINDS * 5)
    ]


async def ask(client: RingClient, fields: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": "demo", "return_token_ids": True, **fields}
    response = await client.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


async def test_each_answer_is_what_it_is_alone(client: RingClient, ring: Ring) -> None:
    asked = requests()
    assert len(asked) == 40
    alone = [await ask(client, fields) for fields in asked]
    happened = dict.fromkeys(totals(ring), 0)
    for _ in range(MAX_ASKED):
        before = totals(ring)
        together = await asyncio.gather(*(ask(client, fields) for fields in asked))
        differ = [fields for fields, a, b in zip(asked, together, alone, strict=True) if not is_same(a, b)]
        assert differ == []
        happened = {name: happened[name] + count - before[name] for name, count in totals(ring).items()}
        if all(happened.values()):
            break
    assert all(happened.values()), happened
    assert errors_logged(ring) == []
