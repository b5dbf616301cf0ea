"""Clients of others, unmodified, against a ring of real processes: a chat, a stream, a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import ToolChoiceAnyParam, ToolParam
from openai import OpenAI

from tests.support.ring import Ring

pytestmark = pytest.mark.beside

QUESTION = "What is Baton?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The temperature in a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES: list = [{"role": "user", "content": QUESTION}]  # type: ignore[type-arg]


@pytest.fixture
def ring(demo_ring: Ring) -> Iterator[Ring]:
    yield demo_ring
    demo_ring.wait_idle()


def check(arguments: object) -> None:
    assert isinstance(arguments, dict) and set(arguments) == {"city", "unit"}, arguments
    assert len(arguments["city"]) <= 12 and arguments["unit"] in ("C", "F")


def test_openai(ring: Ring) -> None:
    with OpenAI(base_url=f"{ring.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
        stream = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content and "Baton" in text
        called = client.chat.completions.create(  # type: ignore[call-overload]
            model="demo", messages=MESSAGES, tools=[TOOL], tool_choice="required", seed=1, max_tokens=400
        )
        check(json.loads(called.choices[0].message.tool_calls[0].function.arguments))
        response = client.responses.create(  # type: ignore[call-overload]
            model="demo",
            input=QUESTION,
            tools=[{"type": "function", **FUNCTION}],
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body={"seed": 1},
        )
        [call] = [item for item in response.output if item.type == "function_call"]
        check(json.loads(call.arguments))


def test_anthropic(ring: Ring) -> None:
    with Anthropic(base_url=ring.url, api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "demo", "max_tokens": 400, "messages": MESSAGES}
        whole = client.messages.create(**ask, extra_body={"temperature": 0})
        with client.messages.stream(**ask, extra_body={"temperature": 0}) as stream:
            text = "".join(stream.text_stream)
        assert text == whole.content[0].text and "Baton" in text
        tool: ToolParam = {"name": "get_weather", "description": "The temperature.", "input_schema": SCHEMA}
        choice: ToolChoiceAnyParam = {"type": "any", "disable_parallel_tool_use": True}
        called = client.messages.create(**ask, tools=[tool], tool_choice=choice)
        assert called.stop_reason == "tool_use"
        check(called.content[-1].input)
        with client.messages.stream(**ask, tools=[tool], tool_choice=choice) as stream:
            check(stream.get_final_message().content[-1].input)


def test_langchain(ring: Ring) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="demo", base_url=f"{ring.url}/v1", api_key="none", max_retries=0, temperature=0
    )
    whole = model.invoke(QUESTION)
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == whole.text
    assert "Baton" in whole.text and whole.usage_metadata["output_tokens"] > 0
    tools = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    [call] = tools.invoke(QUESTION).tool_calls
    check(call["args"])
    structured = model.with_structured_output({"title": "place", **SCHEMA}, method="json_schema")
    check(structured.invoke(QUESTION))
    responses = langchain.ChatOpenAI(
        model="demo", base_url=f"{ring.url}/v1", api_key="none", use_responses_api=True, temperature=0
    )
    assert responses.invoke(QUESTION).text == whole.text


@pytest.mark.deep
def test_litellm(ring: Ring) -> None:
    litellm = pytest.importorskip("litellm")
    asks: list[dict[str, Any]] = [
        {"model": "openai/demo", "api_base": f"{ring.url}/v1"},
        {"model": "anthropic/demo", "api_base": ring.url},
    ]
    for ask in asks:
        ask |= {"api_key": "none", "messages": MESSAGES, "max_tokens": 400, "num_retries": 0}
        whole = litellm.completion(**ask, temperature=0).choices[0].message.content
        stream = litellm.completion(**ask, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole and "Baton" in text
        called = litellm.completion(**ask, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        check(json.loads(called.choices[0].message.tool_calls[0].function.arguments))
