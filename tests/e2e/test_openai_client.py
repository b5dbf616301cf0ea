"""The ``openai`` client, unmodified, against a ring of real processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import grpc
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.chat import ChatCompletionMessageParam

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.clients import RingClient
from tests.support.ring import Ring

pytestmark = pytest.mark.beside

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is Baton?"}]


@pytest.fixture
async def openai(demo_ring: Ring) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{demo_ring.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    demo_ring.wait_idle()


async def test_completion(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model="demo", prompt="Paged attention is", max_tokens=12)
    assert answer.choices[0].text
    assert answer.usage is not None and answer.usage.completion_tokens <= 12
    assert answer.choices[0].finish_reason in ("length", "stop")


async def test_chat_streamed_is_chat_whole(openai: AsyncOpenAI) -> None:
    whole = await openai.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    stream = await openai.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usage = "", [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert "Baton" in text
    assert reasons[-1] == whole.choices[0].finish_reason == "stop"
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_n_3_gives_three_reproducible_answers(openai: AsyncOpenAI) -> None:
    async def three() -> list[str]:
        answer = await openai.completions.create(
            model="demo", prompt="The router", n=3, temperature=1.5, seed=5, max_tokens=24
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    texts = await three()
    assert len(set(texts)) == 3
    assert await three() == texts


async def test_a_stop_string_ends_the_text_before_it(openai: AsyncOpenAI) -> None:
    whole = await openai.completions.create(
        model="demo", prompt="Paged attention is", temperature=0, max_tokens=40
    )
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    for stream in (False, True):
        cut = await openai.completions.create(
            model="demo",
            prompt="Paged attention is",
            temperature=0,
            max_tokens=40,
            stop=[stop, "never in there"],
            stream=stream,
        )
        if stream:
            chunks = [chunk.choices[0] async for chunk in cut]
            found, reason = "".join(c.text for c in chunks), chunks[-1].finish_reason
        else:
            found, reason = cut.choices[0].text, cut.choices[0].finish_reason
        assert found == text[: text.index(stop)]
        assert reason == "stop"


async def test_logprobs_streamed_are_logprobs_whole(openai: AsyncOpenAI) -> None:
    fields = {"model": "demo", "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    chat = await openai.chat.completions.create(**fields)  # type: ignore[call-overload]
    streamed = await openai.chat.completions.create(**fields, stream=True)  # type: ignore[call-overload]
    told = chat.choices[0].logprobs.content
    parts = [chunk.choices[0].logprobs async for chunk in streamed]
    assert [entry.token for part in parts if part for entry in part.content] == [e.token for e in told]
    assert len(told) == chat.usage.completion_tokens
    text = b"".join(bytes(entry.bytes) for entry in told[:-1])
    assert text.decode() == chat.choices[0].message.content, "but for the token that ends the answer"
    for entry in told:
        assert entry.top_logprobs[0].token == entry.token, "greedy: the likeliest is chosen"
        assert abs(entry.top_logprobs[0].logprob - entry.logprob) < 1e-6

    answer = await openai.completions.create(
        model="demo", prompt="The router", temperature=0, max_tokens=12, logprobs=2, echo=True
    )
    completion = answer.choices[0]
    assert completion.text.startswith("The router")
    assert completion.logprobs is not None
    assert completion.logprobs.tokens is not None and completion.logprobs.token_logprobs is not None
    assert "".join(completion.logprobs.tokens) == completion.text
    assert [value is None for value in completion.logprobs.token_logprobs].count(True) == 1


async def test_models_and_errors(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == ["demo"]
    with pytest.raises(NotFoundError, match="does not exist"):
        await openai.completions.create(model="other", prompt="x")
    with pytest.raises(BadRequestError, match="temperature") as refused:
        await openai.completions.create(model="demo", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"


async def test_grpc_gives_the_same_tokens(demo_ring: Ring, demo: RingClient) -> None:
    over_http = await demo.complete("The router", max_tokens=16, temperature=0)
    params = pb.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(model="demo", text="The router", params=params)
    async with grpc.aio.insecure_channel(demo_ring.grpc) as channel:
        responses = [response async for response in InferenceStub(channel).Generate(request)]
    assert [i for response in responses for i in response.token_ids] == over_http.token_ids
    assert "".join(response.text for response in responses) == over_http.text
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


async def test_tokenize_and_back(demo_ring: Ring, demo: RingClient) -> None:
    text = "Grüße, 世界 🌍!"
    tokens = json.loads((await demo.http.post("/tokenize", json={"model": "demo", "prompt": text})).content)
    body = {"model": "demo", "tokens": tokens["tokens"]}
    assert json.loads((await demo.http.post("/detokenize", json=body)).content)["prompt"] == text
