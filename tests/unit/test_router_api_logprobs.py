"""Log-probabilities, echo and the other sampling fields, as OpenAI's client and vLLM's users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton.core.sampling_params import ResolvedSampling
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from tests.support.api_server import serving
from tests.support.fake_ring import EOS, FakeRing, made_up
from tests.support.tiny_tokenizers import byte_level_tokenizer

ANSWER = "naïve 🙂 fox, jumps! Привет "
PROMPT = "Hello 🙃 fox"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(ANSWER)


@pytest.fixture(params=[1, 3], ids=["one by one", "three at once"])
def ring(request: pytest.FixtureRequest, ids: list[int]) -> FakeRing:
    return FakeRing(lambda call: ids, ends=True, per_chunk=request.param)


async def post(ring: FakeRing, tokenizer: Tokenizer, path: str, **body: object) -> dict[str, Any]:
    """The answer, given whole; that its stream adds up to the same is checked on the way."""
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        whole: dict[str, Any] = response.json()
        streamed = (await client.post(path, json={**body, "stream": True})).text
    assert added_up(streamed) == [shown(choice, whole) for choice in whole["choices"]]
    return whole


def shown(choice: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """What a whole answer tells of a choice, as :func:`added_up` collects it."""
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    prompt = choice.get("prompt_logprobs", whole.get("prompt_logprobs"))
    return {
        "text": text,
        "logprobs": choice["logprobs"],
        "finish_reason": choice["finish_reason"],
        "prompt_logprobs": prompt,
    }


def added_up(stream: str) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for event in stream.split("\n\n")[:-2]:
        document = json.loads(event.removeprefix("data: "))
        for part in document["choices"]:
            choice = choices.setdefault(
                part["index"], {"text": "", "logprobs": None, "prompt_logprobs": None}
            )
            choice["text"] += part["text"] if "text" in part else part["delta"]["content"]
            choice["finish_reason"] = part["finish_reason"]
            prompt = part.get("prompt_logprobs", document.get("prompt_logprobs"))
            choice["prompt_logprobs"] = prompt or choice["prompt_logprobs"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def spelled(token: str) -> bytes:
    """The bytes that a completion's token stands for."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


class TestCompletions:
    async def test_logprobs_through_openais_client(
        self, ring: FakeRing, tokenizer: Tokenizer, ids: list[int]
    ) -> None:
        async with serving(ring, tokenizer) as url, client_of(url) as client:
            answer = await client.completions.create(model="tiny", prompt="a", max_tokens=100, logprobs=3)
        [choice] = answer.choices
        told = choice.logprobs
        assert told is not None and told.tokens and told.token_logprobs and told.top_logprobs
        output = [*ids, EOS]
        assert told.token_logprobs == made_up(output, 3).chosen
        assert b"".join(map(spelled, told.tokens)) == ANSWER.encode() + b"<|end|>"
        assert any(token.startswith("bytes:\\x") for token in told.tokens), "a part of a character"
        for token, at, top, logprob in zip(
            output, range(100), told.top_logprobs, told.token_logprobs, strict=False
        ):
            assert len(top) == (3 if token % 2 == 0 else 4), "the token itself is always there"
            assert top[told.tokens[at]] == logprob

    async def test_offsets_are_where_tokens_begin(
        self, ring: FakeRing, tokenizer: Tokenizer, ids: list[int]
    ) -> None:
        answer = await post(ring, tokenizer, COMPLETIONS, prompt="a", max_tokens=100, logprobs=0)
        told = answer["choices"][0]["logprobs"]
        said = b""
        for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
            assert offset == len(said.decode(errors="ignore"))
            said += spelled(token)
        assert told["text_offset"][-1] == len(ANSWER)
        assert [list(top.values()) for top in told["top_logprobs"]] == [[x] for x in told["token_logprobs"]]

    async def test_tokens_can_be_named_by_id(
        self, ring: FakeRing, tokenizer: Tokenizer, ids: list[int]
    ) -> None:
        fields = {"max_tokens": 2, "return_tokens_as_token_ids": True}
        answer = await post(ring, tokenizer, COMPLETIONS, prompt="a", logprobs=1, **fields)
        told = answer["choices"][0]["logprobs"]
        assert told["tokens"] == [f"token_id:{id_}" for id_ in ids[:2]]
        assert all(name.startswith("token_id:") for top in told["top_logprobs"] for name in top)
        chat = await post(ring, tokenizer, CHAT, messages=[USER], logprobs=True, **fields)
        content = chat["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{id_}" for id_ in ids[:2]]

    async def test_a_stop_string_ends_the_logprobs_with_the_token_that_completed_it(
        self, ring: FakeRing, tokenizer: Tokenizer, ids: list[int]
    ) -> None:
        answer = await post(
            ring,
            tokenizer,
            COMPLETIONS,
            prompt="a",
            max_tokens=100,
            logprobs=1,
            stop=" fox",
            return_token_ids=True,
        )
        [choice] = answer["choices"]
        assert choice["text"] == "naïve 🙂"
        assert choice["token_ids"] == ids[: len(choice["token_ids"])]
        assert {len(values) for values in choice["logprobs"].values()} == {len(choice["token_ids"])}

    @pytest.mark.parametrize("ask", [{"n": 2}, {"prompt": ["a", "fox"]}])
    async def test_each_choice_has_its_own(
        self, ring: FakeRing, tokenizer: Tokenizer, ids: list[int], ask: dict[str, object]
    ) -> None:
        fields = {"prompt": "a", "max_tokens": 100, "logprobs": 1, "prompt_logprobs": 0, **ask}
        answer = await post(ring, tokenizer, COMPLETIONS, **fields)
        assert len(answer["choices"]) == 2
        for choice in answer["choices"]:
            assert choice["logprobs"]["token_logprobs"] == made_up([*ids, EOS], 0).chosen


class TestChat:
    @pytest.mark.parametrize("top", [None, 0, 5])
    async def test_logprobs_through_openais_client(
        self, ring: FakeRing, tokenizer: Tokenizer, ids: list[int], top: int | None
    ) -> None:
        fields: dict[str, Any] = {} if top is None else {"top_logprobs": top}
        async with serving(ring, tokenizer) as url, client_of(url) as client:
            answer = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                logprobs=True,
                **fields,
            )
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                logprobs=True,
                stream=True,
                **fields,
            )
            streamed = [chunk.choices[0].logprobs async for chunk in stream]
        told = answer.choices[0].logprobs
        assert told is not None and told.content is not None
        assert [entry for part in streamed if part for entry in part.content or ()] == told.content
        assert [entry.logprob for entry in told.content] == made_up([*ids, EOS], 0).chosen
        assert [len(entry.top_logprobs) for entry in told.content] == [top or 0] * (len(ids) + 1)
        said = b"".join(bytes(entry.bytes or []) for entry in told.content)
        assert said == ANSWER.encode() + b"<|end|>"
        parts = [entry.token for entry in told.content if entry.token.startswith("\\x")]
        assert parts, "a part of a character is spelled"
        for entry in told.content:
            if not entry.token.startswith("\\x"):
                assert entry.bytes == list(entry.token.encode())

    async def test_an_echo_goes_on_with_the_assistants_turn(
        self, ring: FakeRing, tokenizer: Tokenizer
    ) -> None:
        begun = [USER, {"role": "assistant", "content": "Once "}]
        answer = await post(ring, tokenizer, CHAT, messages=begun, echo=True)
        assert answer["choices"][0]["message"]["content"] == "Once " + ANSWER
        answer = await post(ring, tokenizer, CHAT, messages=[USER], echo=True)
        assert answer["choices"][0]["message"]["content"] == ANSWER


class TestPromptLogprobs:
    @pytest.mark.parametrize("num", [0, 2])
    async def test_have_vllms_shape(self, ring: FakeRing, tokenizer: Tokenizer, num: int) -> None:
        prompt = tokenizer.encode(PROMPT)
        answer = await post(ring, tokenizer, COMPLETIONS, prompt=PROMPT, prompt_logprobs=num)
        self.check(answer["choices"][0]["prompt_logprobs"], prompt, tokenizer, num)
        assert answer["choices"][0]["logprobs"] is None
        chat = await post(ring, tokenizer, CHAT, messages=[USER], prompt_logprobs=num)
        self.check(chat["prompt_logprobs"], ring.calls[-1].prompt_ids, tokenizer, num)

    def check(
        self, told: list[dict[str, Any] | None], prompt: list[int], tokenizer: Tokenizer, num: int
    ) -> None:
        assert told[0] is None
        assert len(told) == len(prompt)
        expected = made_up(prompt[1:], num)
        for at, (token, entry) in enumerate(zip(prompt[1:], told[1:], strict=True)):
            assert entry is not None
            own = entry[str(token)]
            assert (own["logprob"], own["rank"]) == (expected.chosen[at], expected.ranks[at])
            assert own["decoded_token"] == tokenizer.token_bytes(token).decode(errors="replace")
            top = {str(id_): (value, rank) for rank, (id_, value) in enumerate(expected.top_of(at, num), 1)}
            assert {id_: (entry[id_]["logprob"], entry[id_]["rank"]) for id_ in top} == top
            assert len(entry) == len({str(token), *top})


class TestEcho:
    @pytest.mark.parametrize("given", ["text", "ids"])
    async def test_begins_with_the_prompt(
        self, ring: FakeRing, tokenizer: Tokenizer, ids: list[int], given: str
    ) -> None:
        prompt = tokenizer.encode(PROMPT)
        asked = PROMPT if given == "text" else prompt
        answer = await post(
            ring,
            tokenizer,
            COMPLETIONS,
            prompt=asked,
            echo=True,
            max_tokens=100,
            logprobs=2,
            return_token_ids=True,
        )
        [choice] = answer["choices"]
        assert choice["text"] == PROMPT + ANSWER
        assert choice["token_ids"] == [*ids, EOS], "token ids are those of the answer"
        told = choice["logprobs"]
        assert b"".join(map(spelled, told["tokens"])) == (PROMPT + ANSWER).encode() + b"<|end|>"
        assert told["token_logprobs"] == [None, *made_up([*prompt[1:], *ids, EOS], 2).chosen]
        assert told["top_logprobs"][0] is None and None not in told["top_logprobs"][1:]
        said = b""
        for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
            assert offset == len(said.decode(errors="ignore"))
            said += spelled(token)
        assert answer["usage"]["completion_tokens"] == len(ids) + 1

    @pytest.mark.parametrize("logprobs", [None, 1])
    async def test_can_be_all(self, ring: FakeRing, tokenizer: Tokenizer, logprobs: int | None) -> None:
        answer = await post(
            ring, tokenizer, COMPLETIONS, prompt=PROMPT, echo=True, max_tokens=0, logprobs=logprobs
        )
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert answer["usage"]["completion_tokens"] == 0
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            prompt = tokenizer.encode(PROMPT)
            assert choice["logprobs"]["token_logprobs"] == [None, *made_up(prompt[1:], 1).chosen]

    async def test_without_logprobs_asks_the_workers_for_none(
        self, ring: FakeRing, tokenizer: Tokenizer
    ) -> None:
        answer = await post(ring, tokenizer, COMPLETIONS, prompt=PROMPT, echo=True)
        assert answer["choices"][0]["text"].startswith(PROMPT)
        assert (ring.calls[0].params.logprobs, ring.calls[0].params.prompt_logprobs) == (None, None)

    async def test_may_tell_less_than_the_prompts_logprobs(
        self, ring: FakeRing, tokenizer: Tokenizer
    ) -> None:
        answer = await post(
            ring,
            tokenizer,
            COMPLETIONS,
            prompt=[4, 6, 8],
            echo=True,
            logprobs=1,
            prompt_logprobs=3,
            max_tokens=1,
        )
        [choice] = answer["choices"]
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [1, 1]
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3, 3]


async def test_the_first_min_tokens_complete_no_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a fox a fox a fox")
    per_fox = tokenizer.encode(" fox")
    assert len(per_fox) == 1
    for per_chunk in (1, 4):
        ring = FakeRing(lambda call: ids, per_chunk=per_chunk)
        for least, text in (
            (0, "a"),
            (ids.index(per_fox[0]) + 1, "a fox a"),
            (len(ids) - 1, "a fox a fox a"),
        ):
            answer = await post(
                ring, tokenizer, COMPLETIONS, prompt="a", max_tokens=30, stop=" fox", min_tokens=least
            )
            assert answer["choices"][0]["text"] == text


async def test_sampling_fields_reach_the_ring(tokenizer: Tokenizer) -> None:
    ring = FakeRing(lambda call: [10])
    fields: dict[str, object] = {
        "repetition_penalty": 1.25,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "3": 2.5, "03": 2.5},
        "min_tokens": 2,
        "max_tokens": 4,
        "allowed_token_ids": [9, 3, 9],
        "prompt_logprobs": 2,
    }
    await post(ring, tokenizer, COMPLETIONS, prompt="a", logprobs=0, **fields)
    await post(ring, tokenizer, CHAT, messages=[USER], logprobs=True, **fields)
    for call in ring.calls:
        params = call.params
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
            1.25,
            -1.5,
            0.5,
        )
        assert params.logit_bias == ((3, 2.5), (7, -100.0))
        assert (params.min_tokens, params.allowed_token_ids) == (2, (9, 3))
        assert (params.logprobs, params.prompt_logprobs) == (0, 2)


async def test_bad_words_are_tokens_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    ring = FakeRing(lambda call: [10])
    await post(ring, tokenizer, COMPLETIONS, prompt="a", bad_words=["fox", " lazy", "fox", "\n"])
    spellings = ["fox", " fox", "lazy", " lazy", "\n", " \n"]
    assert ring.calls[0].params.bad_word_ids == tuple(tuple(tokenizer.encode(text)) for text in spellings)


def test_parameters_survive_the_wire() -> None:
    params = ResolvedSampling(
        max_tokens=5,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((3, 2.5), (7, -100.0)),
        min_tokens=2,
        bad_word_ids=((1,), (2, 3)),
        allowed_token_ids=(9, 3),
        logprobs=0,
        prompt_logprobs=4,
    )
    for each in (params, ResolvedSampling(max_tokens=1)):
        data = each.to_proto().SerializeToString()
        assert ResolvedSampling.from_proto(pb.SamplingParams.FromString(data)) == each


def test_offsets_of_a_prompt_with_added_tokens(tmp_path: Path) -> None:
    backend_dir = tmp_path / "plain"
    plain = byte_level_tokenizer(backend_dir)
    with_bos = Tokenizer(
        plain._backend,
        plain.special,
        add_bos=True,
    )
    assert with_bos.encode("a fox")[0] == with_bos.special.bos_id
    assert with_bos.offsets("a fox") == [0, *plain.offsets("a fox")]
    assert with_bos.offsets("a fox", add_special_tokens=False) == plain.offsets("a fox")
