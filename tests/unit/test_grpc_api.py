"""The gRPC API: the same core, other statuses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.logprobs import Logprobs
from baton.router.api.grpc.service import RUNS_AT_ONCE, SERVICE_NAME, add_services, server_options
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import RingError
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.api_server import until
from tests.support.fake_ring import FakeRing, busy, made_up
from tests.support.grpc_errors import metadata_of
from tests.support.tiny_tokenizers import byte_level_tokenizer

ANSWER = "naïve 🙂 fox"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring(tokenizer: Tokenizer) -> FakeRing:
    ids = tokenizer.encode(ANSWER)
    return FakeRing(lambda call: ids, ends=True, cached_tokens=1)


@asynccontextmanager
async def channel_to(ring: FakeRing, tokenizer: Tokenizer) -> AsyncIterator[grpc.aio.Channel]:
    settings = ApiSettings()
    server = grpc.aio.server(options=server_options(settings))
    add_services(server, CompletionService(ring, tokenizer, settings, RouterMetrics(CollectorRegistry())))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


def request(**params: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="tiny", text="the fox", params=pb.SamplingParams(**params))  # type: ignore[arg-type]


async def test_generate(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with channel_to(ring, tokenizer) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        responses = [response async for response in stub.Generate(request(max_tokens=50, seed=3))]
    assert "".join(response.text for response in responses) == ANSWER
    ids = [id_ for response in responses for id_ in response.token_ids]
    assert ids == [*tokenizer.encode(ANSWER), 0]
    assert [response.finish_reason for response in responses[:-1]] == [0] * (len(responses) - 1)
    last = responses[-1]
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert last.usage.prompt_tokens == len(tokenizer.encode("the fox"))
    assert last.usage.completion_tokens == len(ids)
    assert last.usage.cached_tokens == 1
    [call] = ring.calls
    assert call.params.seed == 3
    assert call.params.temperature == 1.0


async def test_token_ids_stop_strings_and_defaults(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with channel_to(ring, tokenizer) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6]), params=pb.SamplingParams(stop=["🙂"], temperature=0)
        )
        responses = [response async for response in stub.Generate(asked)]
        models = await stub.ListModels(pb.ListModelsRequest())
    assert "".join(response.text for response in responses) == "naïve "
    [call] = ring.calls
    assert call.prompt_ids == [5, 6]
    assert call.params.max_tokens == 254
    assert call.params.greedy
    assert call.closed
    assert list(models.models) == ["tiny"]


async def test_logprobs_and_echo(ring: FakeRing, tokenizer: Tokenizer) -> None:
    asked = request(max_tokens=50, logprobs=2, prompt_logprobs=0)
    asked.echo = True
    async with channel_to(ring, tokenizer) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        responses = [response async for response in stub.Generate(asked)]
    assert "".join(response.text for response in responses) == "the fox" + ANSWER
    output = [*tokenizer.encode(ANSWER), 0]
    told = [Logprobs.from_proto(response.logprobs) for response in responses]
    assert Logprobs.join(told) == made_up(output, 2)
    first, *others = responses
    assert Logprobs.from_proto(first.prompt_logprobs) == made_up(tokenizer.encode("the fox")[1:], 0)
    assert not any(response.HasField("prompt_logprobs") for response in others)


async def test_a_stop_string_ends_the_logprobs_too(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.per_chunk = 50
    async with channel_to(ring, tokenizer) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        [response] = [r async for r in stub.Generate(request(max_tokens=50, logprobs=1, stop=["🙂"]))]
    assert 0 < len(response.token_ids) < len(tokenizer.encode(ANSWER))
    assert Logprobs.from_proto(response.logprobs) == made_up(list(response.token_ids), 1)


@pytest.mark.parametrize("early_stopping", EarlyStopping)
async def test_a_beam_search_reaches_the_ring(
    ring: FakeRing, tokenizer: Tokenizer, early_stopping: EarlyStopping
) -> None:
    beams = BeamParams(4, 0.6, early_stopping)
    async with channel_to(ring, tokenizer) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert [response async for response in stub.Generate(request(beam_search=beams.to_proto()))]
    assert [call.params.beam_search for call in ring.calls] == [beams]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"beam_search": pb.BeamSearch()}, "best_of"),
        ({"beam_search": pb.BeamSearch(width=17)}, "best_of"),
        ({"beam_search": pb.BeamSearch(width=2, length_penalty=11)}, "length_penalty"),
        ({"beam_search": pb.BeamSearch(width=2, early_stopping=7)}, "early_stopping"),  # type: ignore[arg-type]
        ({"beam_search": pb.BeamSearch(width=2), "min_p": 0.5}, "min_p"),
        (
            {"beam_search": pb.BeamSearch(width=2), "structured_output": pb.StructuredOutput(regex="a")},
            "structured_output",
        ),
    ],
    ids=str,
)
async def test_a_bad_beam_search_is_refused(
    ring: FakeRing, tokenizer: Tokenizer, params: dict[str, object], named: str
) -> None:
    async with channel_to(ring, tokenizer) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            assert [response async for response in stub.Generate(request(**params))]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata_of(refused.value)["baton-error-param"] == named
    assert ring.calls == []


async def test_sampling_parameters_reach_the_ring(ring: FakeRing, tokenizer: Tokenizer) -> None:
    asked = request(
        max_tokens=5,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: 2.5},
        min_tokens=2,
        bad_words=["fox"],
        bad_word_ids=[pb.TokenIds(ids=[8, 9])],
        allowed_token_ids=[10, 11],
    )
    async with channel_to(ring, tokenizer) as channel:
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(asked):
            pass
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request(max_tokens=5)):
            pass
    params = ring.calls[0].params
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.5, -0.5)
    assert (params.logit_bias, params.min_tokens, params.allowed_token_ids) == (((7, 2.5),), 2, (10, 11))
    fox = [tuple(tokenizer.encode(text)) for text in ("fox", " fox")]
    assert params.bad_word_ids == ((8, 9), *fox)
    assert not ring.calls[1].params.shapes_logits


async def test_bad_words_are_read_in_many_turns_of_the_event_loop(
    ring: FakeRing, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, turn, encoded = Tokenizer.encode, 0, list[int]()

    def noted(*given: Any, **options: Any) -> list[int]:
        encoded.append(turn)
        return encode(*given, **options)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    counting = asyncio.create_task(count_turns())
    asked = request(max_tokens=1, bad_words=[f"word {number}" for number in range(500)])
    async with channel_to(ring, tokenizer) as channel:
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(asked):
            pass
    counting.cancel()
    assert len(ring.calls[0].params.bad_word_ids) == len(encoded[-1000:]) == 1000
    assert max(Counter(encoded[-1000:]).values()) <= 2 * RUNS_AT_ONCE


async def answered(channel: grpc.aio.Channel, asked: pb.GenerateRequest) -> tuple[str, list[int]]:
    responses = [response async for response in inference_pb2_grpc.InferenceStub(channel).Generate(asked)]
    return "".join(each.text for each in responses), [id_ for each in responses for id_ in each.token_ids]


async def test_texts_as_over_http(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with channel_to(ring, tokenizer) as channel:
        whole, ids = await answered(channel, request(max_tokens=5))
        stop = whole[3:5]
        cut, _ = await answered(channel, request(max_tokens=5, stop=[stop], include_stop_str_in_output=True))
        assert cut == whole[: whole.index(stop) + len(stop)]
        assert await answered(channel, request(max_tokens=5, detokenize=False)) == ("", ids)


async def test_prompts_are_cut_as_over_http(ring: FakeRing, tokenizer: Tokenizer) -> None:
    text = "the quick brown fox"
    ids = tokenizer.encode(text)
    cut = pb.SamplingParams(max_tokens=5, truncate_prompt_tokens=3)
    right = pb.SamplingParams(max_tokens=5, truncate_prompt_tokens=3, truncation_side="right")
    async with channel_to(ring, tokenizer) as channel:
        for given in (
            pb.GenerateRequest(text=text, params=cut, echo=True),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), params=cut, echo=True),
        ):
            told, _ = await answered(channel, given)
            assert ring.calls[-1].prompt_ids == ids[-3:]
            assert told.startswith(tokenizer.decode(ids[-3:]))
        await answered(channel, pb.GenerateRequest(text=text, params=right))
        assert ring.calls[-1].prompt_ids == ids[:3]


async def test_what_is_ignored_is_told(ring: FakeRing, tokenizer: Tokenizer) -> None:
    asked = pb.GenerateRequest(text="a", params=pb.SamplingParams(max_tokens=5), priority=3)
    async with channel_to(ring, tokenizer) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(asked)
        assert [response async for response in call]
        told = dict(await call.initial_metadata() or ())
    assert told["x-baton-ignored-fields"] == "priority"


@pytest.mark.parametrize(
    ("asked", "status", "message", "param"),
    [
        (
            request(truncate_prompt_tokens=256),
            grpc.StatusCode.INVALID_ARGUMENT,
            "between 1 and 255",
            "truncate_prompt_tokens",
        ),
        (pb.GenerateRequest(model="other", text="a"), grpc.StatusCode.NOT_FOUND, '"other"', "model"),
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "either text or token_ids", "prompt"),
        (pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "text is empty", "text"),
        (request(temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "not nan", "temperature"),
        (request(temperature=3), grpc.StatusCode.INVALID_ARGUMENT, "between 0 and 2", "temperature"),
        (request(top_p=0), grpc.StatusCode.INVALID_ARGUMENT, "above 0", "top_p"),
        (request(top_p=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "above 0", "top_p"),
        (request(min_p=2), grpc.StatusCode.INVALID_ARGUMENT, "between 0 and 1", "min_p"),
        (request(max_tokens=1000), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens is 1000", "max_tokens"),
        (request(stop=["x"] * 17), grpc.StatusCode.INVALID_ARGUMENT, "17 strings", "stop"),
        (request(stop_token_ids=[401]), grpc.StatusCode.INVALID_ARGUMENT, "401", "stop_token_ids"),
        (request(logprobs=21), grpc.StatusCode.INVALID_ARGUMENT, "between 0 and 20", "logprobs"),
        (request(prompt_logprobs=21), grpc.StatusCode.INVALID_ARGUMENT, "not 21", "prompt_logprobs"),
        (request(repetition_penalty=-1), grpc.StatusCode.INVALID_ARGUMENT, "0.01", "repetition_penalty"),
        (request(logit_bias={401: 1}), grpc.StatusCode.INVALID_ARGUMENT, "401", "logit_bias"),
        (request(logit_bias={4: float("nan")}), grpc.StatusCode.INVALID_ARGUMENT, "nan", "logit_bias"),
        (request(allowed_token_ids=[401]), grpc.StatusCode.INVALID_ARGUMENT, "401", "allowed_token_ids"),
        (
            request(bad_word_ids=[pb.TokenIds()]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad_word_ids[0] is empty",
            "bad_word_ids",
        ),
        (
            request(bad_word_ids=[pb.TokenIds(ids=[4, 401])]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad_word_ids[0][1] is 401",
            "bad_word_ids[0]",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[401])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids[0] is 401",
            "token_ids",
        ),
    ],
    ids=str,
)
async def test_bad_requests(
    ring: FakeRing,
    tokenizer: Tokenizer,
    asked: pb.GenerateRequest,
    status: grpc.StatusCode,
    message: str,
    param: str,
) -> None:
    async with channel_to(ring, tokenizer) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(asked):
                pass
    assert caught.value.code() == status
    assert message in (caught.value.details() or "")
    assert metadata_of(caught.value)["baton-error-param"] == param
    assert ring.calls == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (busy(), grpc.StatusCode.UNAVAILABLE),
        (RingError(429, "too_many", "Too many requests."), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RingError(504, "timeout", "Too slow."), grpc.StatusCode.DEADLINE_EXCEEDED),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_ring_errors(
    ring: FakeRing, tokenizer: Tokenizer, error: Exception, status: grpc.StatusCode
) -> None:
    ring.error, ring.fail_after = error, 2
    texts = []
    async with channel_to(ring, tokenizer) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request()):
                texts.append(response.text)
    assert len(texts) == 2, "what came before the failure is delivered"
    assert caught.value.code() == status
    assert "secret" not in (caught.value.details() or "")


async def test_cancellation_and_deadline_reach_the_ring(ring: FakeRing, tokenizer: Tokenizer) -> None:
    ring.ends, ring.delay = False, 0.02
    async with channel_to(ring, tokenizer) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request())
        await call.read()
        call.cancel()
        await until(lambda: len(ring.cancelled) == 1, seconds=1)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request(), timeout=0.2):
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(ring.cancelled) == 2, seconds=1)


async def test_health_follows_the_ring(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with channel_to(ring, tokenizer) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        ring.ready = False
        async with asyncio.timeout(60):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_reflection_lists_the_services(ring: FakeRing, tokenizer: Tokenizer) -> None:
    async with channel_to(ring, tokenizer) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
