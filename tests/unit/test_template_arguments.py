"""What a client may tell the chat template beside its fields."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.request.template_arguments import MAX_BYTES
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.telemetry.metrics import RouterMetrics
from tests.support.api_server import serving_app
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/tokenize": {"messages": MESSAGES},
}


@pytest.fixture
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = byte_level_tokenizer(tmp_path_factory.mktemp("model"))
    ring = FakeRing(lambda call: [10, 11, 12])
    service = CompletionService(ring, tokenizer, ApiSettings(), RouterMetrics(CollectorRegistry()))
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


BAD: list[tuple[dict[str, object], str, str]] = [
    ({"tools": []}, "chat_template_kwargs.tools", "a field of the request itself"),
    ({"messages": MESSAGES}, "chat_template_kwargs.messages", "a field of the request itself"),
    ({"add_generation_prompt": True}, "chat_template_kwargs.add_generation_prompt", "a field of the request"),
    ({"bos_token": ""}, "chat_template_kwargs.bos_token", "the model's tokenizer tells it"),
    ({"documents": ["x" * MAX_BYTES]}, "chat_template_kwargs", f"at most {MAX_BYTES} are allowed"),
    ({"a": nested(300)}, "chat_template_kwargs", "nested deeper than 254"),
    ({"a": 2**70}, "chat_template_kwargs", "an integer of more than 64 bits"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("given", "param", "part"), BAD, ids=[next(iter(given)) for given, _, _ in BAD])
async def test_what_is_not_a_clients_to_give_is_refused(
    client: httpx.AsyncClient, path: str, given: dict[str, object], param: str, part: str
) -> None:
    response = await client.post(path, json={**PATHS[path], "chat_template_kwargs": given})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} ") and part in error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_variables_of_its_own_and_documents_are_a_clients_to_give(
    client: httpx.AsyncClient, path: str
) -> None:
    given = {
        "documents": [{"title": "t", "text": "x" * (MAX_BYTES // 2)}],
        "enable_thinking": False,
        "depth": 2,
    }
    response = await client.post(path, json={**PATHS[path], "chat_template_kwargs": given})
    assert response.status_code == 200, response.text


async def test_a_tool_whose_size_cannot_be_told_is_refused(client: httpx.AsyncClient) -> None:
    for schema in ({"maximum": 2**70}, {"items": nested(300)}):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {**PATHS["/v1/chat/completions"], "tools": [tool], "tool_choice": "required"}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "tools"
