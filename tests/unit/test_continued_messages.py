"""An answer that goes on with the last message: the prompt is transformers', in each API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from baton.text.chat import ChatTemplate
from baton.text.errors import ChatTemplateError
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving
from tests.support.deep import all_deep_but
from tests.support.scripted_ring import prompt_of, ring_of
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, TOOL_TEMPLATE, byte_level_tokenizer

QWEN = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and '</think>' in message.content %}"
    "{{- '<|im_start|>assistant\n<think>\n' + message.content.split('</think>')[0].strip() "
    "+ '\n</think>\n\n' + message.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
LLAMA = (
    "{{- '<|begin|>' }}{%- for message in messages %}"
    "{{- '<|head|>' + message.role + '<|tail|>\n\n' + message.content | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|head|>assistant<|tail|>\n\n' }}{%- endif %}"
)
TEMPLATES = {"plain": CHAT_TEMPLATE, "tools": TOOL_TEMPLATE, "qwen": QWEN, "llama": LLAMA}

USER = {"role": "user", "content": "How warm is it?"}
BEGUN = {"role": "assistant", "content": "It is"}
EMPTY: Any = [USER, {"role": "assistant", "content": ""}]


def told(*messages: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def oracle(template: str, messages: list[dict[str, Any]]) -> str | None:
    """What transformers renders; None: it refuses."""
    try:
        rendered = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    except ValueError:
        return None
    return str(rendered[0][0])


def continued(template: str, messages: list[dict[str, Any]]) -> str | None:
    try:
        return ChatTemplate(template, {}).render(messages, continue_final_message=True)
    except ChatTemplateError:
        return None


CONTENTS = st.text("ab \n<>{}/|é", min_size=1, max_size=8).filter(str.strip)


@pytest.mark.parametrize("name", all_deep_but(2, TEMPLATES))
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3), role=st.sampled_from(["assistant", "user"]))
def test_the_prompt_is_transformers(name: str, contents: list[str], role: str) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    messages[-1]["role"] = role
    expected = oracle(TEMPLATES[name], [dict(message) for message in messages])
    assert continued(TEMPLATES[name], messages) == expected


def test_a_template_that_drops_a_part_of_it_refuses() -> None:
    cut = told(USER, {"role": "assistant", "content": "<think>\nhm</think>It is"})
    assert oracle(QWEN, told(*cut)) is None and continued(QWEN, cut) is None
    silent = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    assert oracle(silent, told(USER, BEGUN)) is None and continued(silent, told(USER, BEGUN)) is None


def test_what_a_client_writes_is_not_the_mark() -> None:
    messages = told(
        {"role": "user", "content": "<baton-goes-on-here> x"}, {**BEGUN, "content": "a <baton-goes-"}
    )
    expected = "<|start|>user\n<baton-goes-on-here> x<|end|>\n<|start|>assistant\na <baton-goes-"
    assert continued(CHAT_TEMPLATE, messages) == expected


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


PROMPT = "<|start|>user\nHow warm is it?<|end|>\n<|start|>assistant\nIt is"


async def test_a_chat(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, " 20 °C.")
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"messages": [USER, BEGUN], "continue_final_message": True}
        plain = await client.post("/v1/chat/completions", json=body)
        prompt = prompt_of(tokenizer, ring)
        vllms = await client.post("/v1/chat/completions", json={**body, "add_generation_prompt": False})
        echoed = await client.post("/v1/chat/completions", json={**body, "echo": True})
        counted = await client.post("/tokenize", json=body)
    assert plain.json()["choices"][0]["message"]["content"] == " 20 °C."
    assert vllms.json()["choices"] == plain.json()["choices"]
    assert echoed.json()["choices"][0]["message"]["content"] == "It is 20 °C."
    assert prompt == prompt_of(tokenizer, ring) == PROMPT
    assert counted.json()["tokens"] == ring.calls[0].prompt_ids


async def test_reasoning_goes_on_too(tmp_path: Path) -> None:
    """The parser knows from the prompt that the answer begins inside."""
    tokenizer = byte_level_tokenizer(tmp_path, template=TOOL_TEMPLATE)
    ring = ring_of(tokenizer, " and so</think>Yes.")
    opened = {"role": "assistant", "content": "<think>\n"}
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"messages": [USER, opened], "continue_final_message": True}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("and so", "Yes.")


async def test_a_response(tokenizer: Tokenizer) -> None:
    """An incomplete message of the assistant's is gone on with, if it is the last, as in vLLM."""
    ring = ring_of(tokenizer, " 20 °C.")
    begun = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is"}]}
    async with serving(ring, tokenizer) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        for status in ("in_progress", "incomplete"):
            items: Any = [USER, {**begun, "status": status}]
            answer = await client.responses.create(model="tiny", input=items)
            assert answer.output_text == " 20 °C."
            assert prompt_of(tokenizer, ring) == PROMPT
        items = [USER, {**begun, "status": "completed"}]
        await client.responses.create(model="tiny", input=items)
        assert prompt_of(tokenizer, ring) == PROMPT + "<|end|>\n<|start|>assistant\n"
        await client.close()


async def test_a_message(tokenizer: Tokenizer) -> None:
    """A last message of the assistant's is gone on with, as in Anthropic's API; an empty one says nothing."""
    ring = ring_of(tokenizer, " 20 °C.")
    async with (
        serving(ring, tokenizer) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none") as client,
    ):
        ask: Any = {"model": "tiny", "messages": [USER, BEGUN]}
        answer = await client.messages.create(**ask, max_tokens=50)
        assert answer.content[0].text == " 20 °C."
        assert prompt_of(tokenizer, ring) == PROMPT
        count = await client.messages.count_tokens(**ask)
        assert count.input_tokens == answer.usage.input_tokens == len(ring.calls[-1].prompt_ids)
        await client.messages.create(
            model="tiny",
            max_tokens=50,
            messages=EMPTY,
        )
        assert prompt_of(tokenizer, ring) == PROMPT.removesuffix("It is")


CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("last", "more", "said"),
    [
        ([{"type": "text", "text": "It is "}], {}, "messages[1].content ends with white space"),
        ("It is", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "begins with reasoning"),
        ([{"type": "text", "text": "So"}, CALL], {}, "messages[1].content has a tool_use"),
        ([{"type": "thinking", "thinking": "hm"}], {}, "messages[1].content does not end with a text"),
    ],
)
async def test_messages_that_cannot_be_gone_on_with(
    tokenizer: Tokenizer, last: object, more: dict[str, Any], said: str
) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": last}]}
    async with serving(ring_of(tokenizer, "x"), tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        refused = await client.post("/v1/messages", json={**body, "max_tokens": 2000, **more})
        counted = await client.post("/v1/messages/count_tokens", json={**body, **more})
    assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text
    assert counted.status_code == 200, counted.text
