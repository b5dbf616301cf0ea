"""Calls that must be made, by a model that never saw one: the grammar sees to it, through the ring."""

from __future__ import annotations

import json

import pytest
from openai import AsyncOpenAI

from tests.support.ring import Ring

pytestmark = pytest.mark.beside

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FIELDS = {
    "model": "demo",
    "messages": [{"role": "user", "content": "How warm is it in Ulm?"}],
    "tools": TOOLS,
    "temperature": 1.0,
    "max_tokens": 400,
}


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "now":
        assert given == {}
        return
    assert name == "get_weather"
    assert set(given) <= {"city", "unit", "days"}
    assert len(given["city"]) <= 12 and given["unit"] in ("C", "F")
    assert all(0 <= day <= 9 for day in given.get("days", [])) and len(given.get("days", [])) <= 3


async def test_a_call_that_must_be_made_is_valid(demo_ring: Ring) -> None:
    async with AsyncOpenAI(base_url=f"{demo_ring.url}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", NAMED):
            whole = await client.chat.completions.create(  # type: ignore[call-overload]
                **FIELDS, tool_choice=choice, parallel_tool_calls=False, n=8, seed=1
            )
            for answer in whole.choices:
                assert answer.finish_reason == "tool_calls", answer
                assert answer.message.content is None
                [call] = answer.message.tool_calls
                check(call.function.name, call.function.arguments)
            stream = await client.chat.completions.create(  # type: ignore[call-overload]
                **FIELDS, tool_choice=choice, parallel_tool_calls=False, n=8, seed=1, stream=True
            )
            told = {index: ["", ""] for index in range(8)}
            async for chunk in stream:
                for piece in chunk.choices:
                    for call in piece.delta.tool_calls or []:
                        told[piece.index][0] += call.function.name or ""
                        told[piece.index][1] += call.function.arguments
            assert list(told.values()) == [
                [a.message.tool_calls[0].function.name, a.message.tool_calls[0].function.arguments]
                for a in whole.choices
            ]
    demo_ring.wait_idle()
