"""Bad input gets a 4xx in OpenAI's shape that names the field, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ring import Ring, Service
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.beside

JSON = {"Content-Type": "application/json"}
PROMPT = "hello"

BAD_FIELDS: dict[str, tuple[dict[str, object], str]] = {
    "wrong type": ({"max_tokens": "many"}, "max_tokens"),
    "bool for int": ({"max_tokens": True}, "max_tokens"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty token ids": ({"prompt": []}, "prompt"),
    "prompt over the context": ({"prompt": [1] * 5000}, "prompt"),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "huge max_tokens": ({"max_tokens": 10**12}, "max_tokens"),
    "temperature -1": ({"temperature": -1}, "temperature"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "1,000 stop strings": ({"stop": [str(i) for i in range(1000)]}, "stop"),
    "n = 10,000": ({"n": 10_000}, "n"),
    "token ids out of the vocabulary": ({"prompt": [1, 2, 999_999]}, "prompt"),
    "negative token ids": ({"prompt": [1, -2]}, "prompt"),
    "logprobs of 1,000 tokens": ({"logprobs": 1000}, "logprobs"),
    "prompt_logprobs of 1,000 tokens": ({"prompt_logprobs": 1000}, "prompt_logprobs"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty"),
    "presence_penalty 3": ({"presence_penalty": 3}, "presence_penalty"),
    "logit_bias out of the vocabulary": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "10,000 bad words": ({"bad_words": ["x"] * 10_000}, "bad_words"),
    "nothing allowed": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "only the demo model's ends allowed, and not yet": (
        {"allowed_token_ids": [1, 3], "min_tokens": 1},
        "allowed_token_ids",
    ),
}


def error_of(content: bytes) -> dict[str, object]:
    body = json.loads(content)
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    assert isinstance(body["error"], dict)
    return body["error"]


@pytest.fixture
async def bystander(demo: RingClient) -> AsyncIterator[None]:
    """A stream that is under way during the test and must come out as ever."""
    fields = {"max_tokens": 150, "temperature": 0}
    expected = await demo.complete([9, 8, 7], **fields)
    stream = asyncio.create_task(demo.stream([9, 8, 7], **fields))
    await asyncio.sleep(0.1)
    yield
    assert (await stream).token_ids == expected.token_ids


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("case", all_deep_but(8, BAD_FIELDS))
async def test_bad_fields(demo: RingClient, case: str) -> None:
    fields, param = BAD_FIELDS[case]
    body = {"model": "demo", "prompt": PROMPT, **fields}
    response = await demo.http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    error = error_of(response.content)
    assert str(error["param"]).startswith(param)
    assert error["message"]


@pytest.mark.usefixtures("bystander")
async def test_unknown_model(demo: RingClient) -> None:
    response = await demo.http.post("/v1/completions", json={"model": "gpt-5", "prompt": PROMPT})
    assert response.status_code == 404
    assert error_of(response.content)["param"] == "model"


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    "content", [b'{"model": "demo", "prompt": "\xff\xfe"}', b'{"model": "demo",', b"", b"[1]", b"[" * 100_000]
)
async def test_bodies_that_are_no_request(demo: RingClient, content: bytes) -> None:
    response = await demo.http.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400
    error_of(response.content)


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_body_of_100_mb(demo: RingClient, declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "demo", "prompt": "'
        for _ in range(100):
            yield b"a" * 1_000_000

    content = b"a" * 100_000_000 if declared else pieces()
    try:
        response = await demo.http.post("/v1/completions", content=content, headers=JSON)
    except OSError:  # the server closed while we were sending, which it may
        pytest.fail("the server gave no answer")
    assert response.status_code == 413
    error_of(response.content)


def break_missing_shard(path: Path) -> str:
    shards = sorted(path.glob("model-*.safetensors"))
    shards[0].unlink()
    return shards[0].name


def break_shape(path: Path) -> str:
    name = "model.norm.weight"
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = torch.zeros(7)
            save_file(tensors, file)
    return name


def break_pickle(path: Path) -> str:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")
    return "safetensors"


def break_architecture(path: Path) -> str:
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    return "MambaForCausalLM"


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["llama-sharded"](tmp_path_factory.mktemp("model") / "m")


@pytest.mark.parametrize("breakage", [break_missing_shard, break_shape, break_pickle, break_architecture])
def test_a_broken_model_directory_stops_the_start_with_one_line(
    good_model: Path, tmp_path: Path, breakage: Callable[[Path], str]
) -> None:
    path = tmp_path / "broken"
    shutil.copytree(good_model, path)
    named = breakage(path)
    argv = ("decode", "--model", str(path), "--log-level", "warning")
    decode = Service("decode", argv, tmp_path / "decode.log")
    decode.start()
    assert decode.process.wait(120) == 1
    said = decode.log.read_text()
    assert named in said
    assert len(said.strip().splitlines()) == 1, said
    assert "Traceback" not in said


async def test_the_ring_is_unharmed(demo: RingClient, demo_ring: Ring) -> None:
    answer = await demo.complete(PROMPT, max_tokens=4)
    assert len(answer.token_ids) == 4
    demo_ring.wait_idle()
