"""Penalties, biases and log-probabilities of one worker and of the ring are those of transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.logprobs import Logprobs
from baton.core.sampling_params import ResolvedSampling
from baton.handoff.identity import sign_handle
from baton.handoff.messages import Name
from baton.request.sampling import for_choice
from baton.v1 import worker_pb2 as pb
from tests.support.bare_router import BareRouter
from tests.support.clients import RingClient
from tests.support.oracle_sampling import assert_logprobs, processors, rank_margin
from tests.support.ring import CLUSTER_KEY, Ring, running_ring
from tests.support.tiny_models import EOS, TINY_MODELS, oracle_greedy

pytestmark = pytest.mark.beside

NAME = "llama"
NEW_TOKENS = 40
MIN_MARGIN = 1e-3
MIN_RANK_MARGIN = 1e-5
MAX_ASKED = 6
"""Whether requests meet in the pool is a matter of when they come."""
GREEDY = ResolvedSampling(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
SHAPED = (
    replace(GREEDY, repetition_penalty=1.4),
    replace(GREEDY, presence_penalty=1.8, frequency_penalty=0.4),
    replace(GREEDY, logit_bias=((17, 5.5), (101, -100.0), (200, 7.0))),
    replace(GREEDY, allowed_token_ids=tuple(range(0, 256, 5)), frequency_penalty=1.0),
    replace(GREEDY, min_tokens=20, logit_bias=((EOS, 60.0),)),
    replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.7, logit_bias=((33, 4.0), (44, -8.0))),
)


@dataclass(frozen=True)
class Drawn:
    """A request, and transformers' answer to it."""

    params: ResolvedSampling
    prompt: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[NAME](tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def drawn(model: Path) -> list[Drawn]:
    """None whose answer hangs on two logits so close that a batch may rightly choose the other token, and
    none whose prompt has a token whose rank does."""
    rng = random.Random(5)
    found: list[Drawn] = []
    for params in SHAPED:
        for length in (1, 40, 150):
            while True:
                prompt = [rng.randrange(256) for _ in range(length)]
                applied = processors(params, length)
                answer, margin = oracle_greedy(model, prompt, NEW_TOKENS, processors=applied)
                if margin > MIN_MARGIN and rank_margin(model, prompt) > MIN_RANK_MARGIN:
                    break
            found.append(Drawn(params, prompt, answer))
    return found


@pytest.fixture(scope="module", params=["ring", "one worker"])
def ring(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ring]:
    """Whoever decodes has room for a part of the requests only."""
    counts = (
        {"prefill": 1, "decode": 1} if request.param == "ring" else {"prefill": 0, "decode": 0, "both": 1}
    )
    options = ("--prefill-chunk", "64", "--num-blocks", "28")
    with running_ring(
        tmp_path_factory.mktemp("ring"),
        model=str(model),
        options=options,
        **counts,  # type: ignore[arg-type]
    ) as running:
        yield running


@pytest.fixture
async def client(ring: Ring) -> AsyncIterator[RingClient]:
    async with RingClient(ring.url, NAME) as client:
        yield client
    ring.wait_idle()


def fields_of(params: ResolvedSampling) -> dict[str, Any]:
    """``params`` as the HTTP API has them."""
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias},
        "min_tokens": params.min_tokens,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
    }


async def test_tokens_are_transformers_and_preemption_changes_none(
    client: RingClient, ring: Ring, drawn: list[Drawn]
) -> None:
    for _ in range(MAX_ASKED):
        asked = [client.complete(each.prompt, **fields_of(each.params)) for each in drawn]
        answers = await asyncio.gather(*asked)
        assert [answer.token_ids for answer in answers] == [each.answer for each in drawn]
        samples = [sample for worker in ring.workers for sample in worker.metrics().items()]
        if sum(n for name, n in samples if name.startswith("baton_preemptions_total")) > 0:
            return
    pytest.fail("nothing was preempted")


async def ask(client: RingClient, prompt: list[int], **fields: object) -> dict[str, Any]:
    response = await client.http.post("/v1/completions", json=client.body(prompt, **fields))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def test_logprobs_are_transformers(
    client: RingClient, ring: Ring, model: Path, drawn: list[Drawn]
) -> None:
    for each in drawn[1::4]:
        before = await ask(client, each.prompt, **fields_of(each.params))
        choice = await ask(
            client,
            each.prompt,
            **fields_of(each.params),
            logprobs=3,
            prompt_logprobs=2,
            return_tokens_as_token_ids=True,
        )
        assert choice["token_ids"] == before["token_ids"] == each.answer
        told = choice["logprobs"]
        tops = [list(top.items()) for top in told["top_logprobs"]]
        assert_logprobs(
            model,
            each.prompt + each.answer,
            len(each.prompt),
            from_entries(each.answer, told["token_logprobs"], tops, 3),
            3,
            ranks=False,
        )
        entries = choice["prompt_logprobs"]
        assert entries[0] is None
        assert_logprobs(model, each.prompt, 1, from_prompt(each.prompt, entries, 2), 2)


def from_entries(
    token_ids: list[int], chosen: list[float], tops: list[list[tuple[str, float]]], num_top: int
) -> Logprobs:
    """What a completion with named ids tells, as the engine has it; it tells no ranks."""
    likeliest = [
        sorted(((int(name.removeprefix("token_id:")), value) for name, value in top), key=lambda e: -e[1])
        for top in tops
    ]
    cut = [entry for top in likeliest for entry in top[:num_top]]
    return Logprobs(num_top, chosen, [0] * len(token_ids), [id_ for id_, _ in cut], [x for _, x in cut])


def from_prompt(prompt: list[int], entries: list[dict[str, Any]], num_top: int) -> Logprobs:
    pairs = list(zip(prompt[1:], entries[1:], strict=True))
    tops = [sorted(entry.items(), key=lambda item: item[1]["rank"])[:num_top] for _, entry in pairs]
    return Logprobs(
        num_top,
        [entry[str(token)]["logprob"] for token, entry in pairs],
        [entry[str(token)]["rank"] for token, entry in pairs],
        [int(id_) for top in tops for id_, _ in top],
        [value["logprob"] for top in tops for _, value in top],
    )


async def test_an_echo_scores_a_prompt(client: RingClient, model: Path, drawn: list[Drawn]) -> None:
    prompt = drawn[1].prompt
    choice = await ask(client, prompt, echo=True, max_tokens=0, logprobs=1, return_tokens_as_token_ids=True)
    told = choice["logprobs"]
    assert told["tokens"] == [f"token_id:{id_}" for id_ in prompt]
    assert told["token_logprobs"][0] is None
    tops = [list(top.items()) for top in told["top_logprobs"][1:]]
    scores = from_entries(prompt[1:], told["token_logprobs"][1:], tops, 1)
    assert_logprobs(model, prompt, 1, scores, 1, ranks=False)
    assert choice["token_ids"] == []


async def test_choices_share_one_prefill_and_one_handoff(
    ring: Ring, client: RingClient, drawn: list[Drawn]
) -> None:
    """Each is the answer to a request alone with its seed; the pool is too small for all of them."""
    fields = {"max_tokens": NEW_TOKENS, "temperature": 1.3, "presence_penalty": 0.5, "logprobs": 1}
    prompts = [drawn[i].prompt for i in (1, 2, 4)]
    done = [worker.metrics() for worker in ring.workers]

    async def ask(prompt: list[int]) -> list[dict[str, Any]]:
        body = client.body(prompt, n=4, seed=9, **fields)
        choices = (await client.http.post("/v1/completions", json=body)).raise_for_status().json()["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    answers = await asyncio.gather(*map(ask, prompts))
    ring.wait_idle()
    for worker, before in zip(ring.workers, done, strict=True):
        [name] = [name for name in before if name.startswith("baton_handoffs_completed_total{")]
        assert worker.metrics()[name] - before[name] == (len(prompts) if len(ring.workers) > 1 else 0)
    decoding = ring.workers[-1].metrics()
    assert sum(v for name, v in decoding.items() if name.startswith("baton_kv_blocks_copied_total")) > 0
    params = ResolvedSampling(max_tokens=NEW_TOKENS, seed=9)
    for prompt, choices in zip(prompts, answers, strict=True):
        for number, choice in enumerate(choices):
            alone = await client.complete(prompt, seed=for_choice(params, number).seed, **fields)
            assert choice["token_ids"] == alone.token_ids
        assert len({tuple(choice["token_ids"]) for choice in choices}) == 4


@pytest.mark.parametrize("ring", ["ring"], indirect=True)
async def test_decode_repeats_all_that_prefill_tells_with_the_first_token(
    ring: Ring, drawn: list[Drawn]
) -> None:
    params = replace(drawn[1].params, seed=1, logprobs=2, prompt_logprobs=1)
    prefill, decode = (BareRouter(ring.of_role(role)[0]) for role in ("prefill", "decode"))
    try:
        await prefill.greet()
        hello = await decode.greet()
        name, prompt = Name("bare", 0), drawn[1].prompt
        target = pb.DecodeTarget(
            handoff_address=hello.handoff_address,
            incarnation=hello.incarnation,
            handle=sign_handle(CLUSTER_KEY.encode(), name, hello.incarnation, len(prompt)),
        )
        await prefill.submit(*name, prompt, params, decode=target)
        told, repeated = await prefill.first_delta(), await decode.first_delta()
    finally:
        await prefill.close()
        await decode.close()
    assert told.token_ids == repeated.token_ids == drawn[1].answer[:1]
    assert (len(told.details.logprobs.chosen), len(told.details.prompt_logprobs.chosen)) == (
        1,
        len(prompt) - 1,
    )
    assert repeated.details == told.details
    ring.wait_idle()


@pytest.mark.parametrize("ring", ["ring"], indirect=True)
@pytest.mark.parametrize("delivered", [(0, 1, 2), (0,), (2,)])
@pytest.mark.parametrize("length", [31, 32, 33])
async def test_choices_go_on_elsewhere_from_first_tokens_that_were_delivered(
    ring: Ring, client: RingClient, length: int, delivered: tuple[int, ...]
) -> None:
    """Whether or not one token more would fill another KV block."""
    prompt = [random.Random(length).randrange(256) for _ in range(length)]
    fields = {"max_tokens": 8, "temperature": 1.3, "ignore_eos": True}
    params = ResolvedSampling(seed=9, **fields)  # type: ignore[arg-type]
    body = client.body(prompt, n=3, seed=9, **fields)
    choices = (await client.http.post("/v1/completions", json=body)).raise_for_status().json()["choices"]
    true = [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    given = [true[i][:1] if i in delivered else [] for i in range(3)]

    prefill, decode = (BareRouter(ring.of_role(role)[0]) for role in ("prefill", "decode"))
    had = "-".join(map(str, delivered))
    names = [f"bare-{length}-{had}-{i}" for i in range(3)]
    try:
        await prefill.greet()
        hello = await decode.greet()
        name = Name(names[0], 1)
        target = pb.DecodeTarget(
            handoff_address=hello.handoff_address,
            incarnation=hello.incarnation,
            handle=sign_handle(CLUSTER_KEY.encode(), name, hello.incarnation, length),
        )
        forks = [
            pb.Fork(request_id=names[i], seed=for_choice(params, i).seed, output_ids=given[i]) for i in (1, 2)
        ]
        await prefill.submit(*name, prompt, params, given[0], decode=target, forks=forks)
        async with asyncio.timeout(120):
            assert await decode.answers(*names) == true
    finally:
        await prefill.close()
        await decode.close()
    ring.wait_idle()
