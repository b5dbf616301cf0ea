"""The HTTP API as OpenAI's own client sees it, against a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest

from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving, until
from tests.support.fake_ring import MODEL, FakeRing, busy
from tests.support.tiny_tokenizers import byte_level_tokenizer

ANSWER = "naïve 🙂 fox, jumps! Привет "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring(tokenizer: Tokenizer) -> FakeRing:
    ids = tokenizer.encode(ANSWER)
    return FakeRing(lambda call: ids, ends=True, cached_tokens=2)


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_completion(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        answer = await client.completions.create(model="tiny", prompt="the quick", max_tokens=100, seed=-1)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.system_fingerprint == "baton-0123456789ab"
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (ANSWER, "stop", 0)
    prompt = tokenizer.encode("the quick")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode(ANSWER)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    [call] = ring.calls
    assert call.prompt_ids == prompt
    assert call.params.seed == 2**64 - 1
    assert call.request_id == f"{answer.id}-0"


async def test_the_blocking_client_works_too(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with serving(ring, tokenizer) as url:

        def ask() -> str:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                stream = client.completions.create(model="tiny", prompt="a", max_tokens=100, stream=True)
                return "".join(chunk.choices[0].text for chunk in stream)

        assert await asyncio.to_thread(ask) == ANSWER


async def test_defaults(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.ends = False
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        answer = await client.completions.create(model="tiny", prompt="fox")
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "fox"}]
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.total_tokens == MODEL.max_model_len
    first, second = (call.params for call in ring.calls)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (1.0, 1.0, 0, 0.0)
    assert first.seed != second.seed


async def test_completion_stream_with_usage(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt="a",
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
    assert all("�" not in chunk.choices[0].text for chunk in chunks[:-1])
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(tokenizer.encode(ANSWER)) + 1
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 2
    assert {chunk.id for chunk in chunks} == {last.id}


async def test_chat(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
        )
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == ANSWER
    expected = "<|start|>system\nbe brief<|end|>\n<|start|>user\na\nb<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(ring.calls[0].prompt_ids, skip_special_tokens=False) == expected


async def test_chat_stream(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_chat_stream_helper_of_the_client(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with (
        serving(ring, tokenizer) as url,
        client_of(url) as client,
        client.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [ANSWER, ANSWER]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_and_prompts(ring: FakeRing, tokenizer: Tokenizer, stream: bool) -> None:
    ring.delay = 0.002
    body = {"model": "tiny", "prompt": ["fox", "lazy dog"], "n": 3, "max_tokens": 40, "stream": stream}
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        texts = [""] * 6
        response = await client.post("/v1/completions", json={**body, "seed": 7})
        for document in sse(response.text) if stream else [response.json()]:
            for choice in document["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [ANSWER] * 6
        calls = sorted(ring.calls, key=lambda call: call.request_id)
        assert [call.prompt_ids for call in calls] == [
            tokenizer.encode(prompt) for prompt in ("fox", "lazy dog") for _ in range(3)
        ]
        seeds = [call.params.seed for call in calls]
        assert seeds[0] == 7
        assert len(set(seeds[:3])) == 3
        assert seeds[:3] == seeds[3:], "a given seed means the same for each prompt"

        ring.calls.clear()
        await client.post("/v1/completions", json=body)
        assert len({call.params.seed for call in ring.calls}) == 6, "a drawn seed makes no two alike"


@pytest.mark.parametrize("per_chunk", [1, 3, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(tokenizer: Tokenizer, per_chunk: int, stream: bool) -> None:
    ids = tokenizer.encode("one two three STOP four")
    ring = FakeRing(lambda call: ids, per_chunk=per_chunk)
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post(
            "/v1/completions",
            json={
                "prompt": "a",
                "max_tokens": 60,
                "stop": ["STOP", "zzz"],
                "stream": stream,
                "return_token_ids": True,
            },
        )
    documents = sse(response.text) if stream else [response.json()]
    choices = [document["choices"][0] for document in documents]
    assert "".join(choice["text"] for choice in choices) == "one two three "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "STOP")
    token_ids = [id_ for choice in choices for id_ in choice["token_ids"]]
    assert token_ids == ids[: len(token_ids)]
    text = tokenizer.decode(token_ids)
    assert text.startswith("one two three STOP")
    assert "STOP" not in tokenizer.decode(token_ids[:-1]), "ends with the token that completed it"
    [call] = ring.calls
    assert call.closed or per_chunk == 50, "the ring does not go on after a stop string"


async def test_stop_token_is_counted_but_not_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox a")
    ring = FakeRing(lambda call: ids, ends=True)
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post(
            "/v1/completions",
            json={
                "prompt": "a",
                "stop_token_ids": [0],
                "return_token_ids": True,
                "skip_special_tokens": False,
            },
        )
    [choice] = response.json()["choices"]
    assert choice["text"] == "fox a"
    assert choice["token_ids"] == [*ids, 0]
    assert choice["stop_reason"] == 0


async def test_return_token_ids(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(ANSWER), 0]
    messages = [{"role": "user", "content": "hi"}]
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True):
            extra = {"max_tokens": 60, "return_token_ids": True, "stream": stream}
            response = await client.post("/v1/completions", json={"prompt": [5, 6, 7], **extra})
            documents = sse(response.text) if stream else [response.json()]
            choices = [document["choices"][0] for document in documents]
            assert [id_ for choice in choices for id_ in choice["token_ids"]] == ids
            assert choices[0]["prompt_token_ids"] == [5, 6, 7]

            response = await client.post("/v1/chat/completions", json={"messages": messages, **extra})
            documents = sse(response.text) if stream else [response.json()]
            assert documents[0]["prompt_token_ids"] == ring.calls[-1].prompt_ids
            choices = [document["choices"][0] for document in documents]
            assert [id_ for choice in choices for id_ in choice.get("token_ids", [])] == ids


async def test_continuous_usage(ring: FakeRing, tokenizer: Tokenizer) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        documents = sse((await client.post("/v1/completions", json=body)).text)
    assert [document["usage"]["completion_tokens"] for document in documents] == [1, 2, 3, 3]


async def test_models_health_version_and_metrics(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with (
        serving(ring, tokenizer) as url,
        client_of(url) as client,
        httpx.AsyncClient(base_url=url) as http,
    ):
        [model] = [model async for model in client.models.list()]
        assert model.id == "tiny"
        assert model.model_dump()["max_model_len"] == MODEL.max_model_len
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError, match="org/other"):
            await client.models.retrieve("org/other")
        assert (await http.get("/health")).status_code == 200
        ring.ready = False
        answer = await http.get("/health")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        ring.model = None
        assert "which model" in (await http.get("/health")).json()["error"]["message"]
        assert (await http.get("/v1/models")).json()["data"] == []
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        ring.model = MODEL
        assert "version" in (await http.get("/version")).json()
        await http.post("/v1/completions", json={"prompt": "a"})
        metrics = (await http.get("/metrics")).text
    for line in (
        'baton_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'baton_requests_total{endpoint="/v1/models/{model_id:path}",status="404"} 1.0',
        'baton_choices_total{endpoint="/v1/completions",finish_reason="length",model="tiny"} 1.0',
        'baton_generated_tokens_total{model="tiny"} 16.0',
        'baton_cached_prompt_tokens_total{model="tiny"} 2.0',
        'baton_requests_in_flight{endpoint="/v1/completions",model="tiny"} 0.0',
        'baton_time_to_first_token_seconds_count{model="tiny"} 1.0',
        'baton_inter_token_latency_seconds_count{model="tiny"} 15.0',
        'baton_time_per_output_token_seconds_count{model="tiny"} 1.0',
        'baton_e2e_latency_seconds_count{model="tiny"} 1.0',
    ):
        assert line in metrics


async def test_tokenize_and_detokenize(ring: FakeRing, tokenizer: Tokenizer) -> None:
    text = "naïve 🙂" * 500
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        body = (await client.post("/tokenize", json={"prompt": text})).json()
        assert body["tokens"] == tokenizer.encode(text)
        assert body["count"] == len(body["tokens"]) > MODEL.max_model_len
        assert body["max_model_len"] == MODEL.max_model_len
        back = await client.post("/detokenize", json={"tokens": body["tokens"]})
        assert back.json() == {"prompt": text}
        messages = [{"role": "user", "content": "hi"}]
        chat = await client.post("/tokenize", json={"messages": messages, "return_token_strs": True})
        assert (
            chat.json()["token_strs"][:2] == ["<|start|>", "user"]
            or chat.json()["token_strs"][0] == "<|start|>"
        )


async def test_request_ids(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/version", headers={"x-request-id": "mine-1.2"})
        assert answer.headers["x-request-id"] == "mine-1.2"
        for insane in ("a b", "x" * 200, ""):
            answer = await client.get("/version", headers={"x-request-id": insane})
            assert answer.headers["x-request-id"] != insane
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


async def test_the_openapi_document_describes_bodies(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        document = (await client.get("/openapi.json")).json()
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"]
    assert "$defs" not in json.dumps(document)
    operation = document["paths"]["/v1/completions"]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/CompletionRequest"


async def test_a_chat_without_a_template_is_refused(ring: FakeRing, tmp_path: Path) -> None:
    plain = byte_level_tokenizer(tmp_path, chat=False)
    async with serving(ring, plain) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])


async def test_a_busy_ring_is_told_with_its_own_status(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.error = busy()
    settings = ApiSettings(retry_after_seconds=3)
    async with serving(ring, tokenizer, settings) as url, httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "3"
            assert answer.json()["error"]["code"] == "no_capacity"
            assert answer.json()["error"]["type"] == "server_error"


async def test_a_failure_in_mid_stream_is_an_event(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.error, ring.fail_after = busy(), 3
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert answer.status_code == 200
        events = answer.text.strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "no_capacity"
        assert events[-1] == "data: [DONE]"
        async with client_of(url) as typed:
            stream = await typed.completions.create(model="tiny", prompt="a", stream=True)
            with pytest.raises(openai.APIError, match="room"):
                async for _ in stream:
                    pass


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_choice_cancels_the_others(
    ring: FakeRing, tokenizer: Tokenizer, stream: bool
) -> None:
    ring.error, ring.fail_after, ring.failing, ring.delay = busy(), 2, [1], 0.01
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "n": 3, "stream": stream})
    assert answer.status_code == (200 if stream else 503)
    assert "no_capacity" in answer.text
    assert len(ring.calls) == len(ring.cancelled) == 3
    assert max(call.delivered for call in ring.calls) < 8


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_tells_nothing_of_the_inside(
    ring: FakeRing, tokenizer: Tokenizer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ring.error, ring.fail_after = ZeroDivisionError("secret detail"), 2 if stream else 0
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == (200 if stream else 500)
    assert "secret" not in answer.text
    assert "internal_error" in answer.text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(
    ring: FakeRing, tokenizer: Tokenizer, stream: bool, n: int
) -> None:
    ring.ends, ring.delay = False, 0.02
    body = {"prompt": "a", "max_tokens": 200, "n": n, "stream": stream}
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:

        async def ask() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    pass

        task = asyncio.create_task(ask())
        await until(lambda: len(ring.calls) == n and all(call.delivered > 2 for call in ring.calls))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(ring.cancelled) == n, seconds=0.2)
        metrics = (await client.get("/metrics")).text
    cancelled = (
        f'baton_choices_total{{endpoint="/v1/completions",finish_reason="cancelled",model="tiny"}} {n}.0'
    )
    assert cancelled in metrics
    assert 'baton_requests_in_flight{endpoint="/v1/completions",model="tiny"} 0.0' in metrics


async def test_a_client_that_leaves_before_the_first_token(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.delay = 30
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={"prompt": "a", "stream": stream}, timeout=0.1)
        await until(lambda: len(ring.cancelled) == 2, seconds=0.2)


def sse(text: str) -> list[dict[str, object]] | list:  # type: ignore[type-arg]
    """The documents of an event stream, which must end as OpenAI's do."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
