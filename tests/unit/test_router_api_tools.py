"""Tools and reasoning in chats, as OpenAI's own client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from baton.grammar.source import to_llguidance
from baton.grammar.table import Grammar, TokenTable, compiled
from baton.grammar.vocabulary import GuidedVocabulary
from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving
from tests.support.deep import all_deep_but
from tests.support.fake_ring import FakeRing
from tests.support.scripted_ring import prompt_of, ring_of
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer

Messages = list[ChatCompletionMessageParam]

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current temperature for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW: ChatCompletionToolParam = {"type": "function", "function": {"name": "now"}}
USER: ChatCompletionMessageParam = {"role": "user", "content": "How warm is it in Paris and Ulm?"}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ULM = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "C"}}\n</tool_call>'
CALLS = f"Let me look.\n{PARIS}\n{ULM}"
ANSWER = "Paris has 14 °C, Ulm has 9 °C."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def post(
    ring: FakeRing, tokenizer: Tokenizer, settings: ApiSettings | None = None, **fields: object
) -> dict:  # type: ignore[type-arg]
    async with serving(ring, tokenizer, settings) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [USER], **fields})
        body: dict[str, object] = response.json()
        return body


def message_of(body: dict) -> dict:  # type: ignore[type-arg]
    [choice] = body["choices"]
    message: dict[str, object] = choice["message"]
    return message


# -- a conversation with the official client


def turn(prompt: str) -> str:
    """What a model says: calls at first, then an answer from what they returned."""
    return ANSWER if "<|start|>tool" in prompt else CALLS


async def whole(client: openai.AsyncOpenAI, messages: Messages) -> tuple[str, dict[str, object]]:
    answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    [choice] = answer.choices
    return str(choice.finish_reason), choice.message.model_dump(exclude_none=True)


async def streamed(client: openai.AsyncOpenAI, messages: Messages) -> tuple[str, dict[str, object]]:
    """By hand, as OpenAI's guide adds up tool calls."""
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, tools=[WEATHER], stream=True
    )
    content, reason, calls = "", "", {}
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.name
                calls[call.index] = call
            else:
                assert call.id is None and call.function.name is None
                begun, more = calls[call.index].function, call.function.arguments
                assert begun.arguments is not None and more is not None
                begun.arguments += more
    told = [calls[index].model_dump(exclude={"index"}) for index in sorted(calls)]
    return reason, {"role": "assistant", "content": content, **({"tool_calls": told} if told else {})}


async def with_helper(client: openai.AsyncOpenAI, messages: Messages) -> tuple[str, dict[str, object]]:
    async with client.chat.completions.stream(model="tiny", messages=messages, tools=[WEATHER]) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    [choice] = final.choices
    message = choice.message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", []):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    message.pop("parsed", None)
    assert [event.name for event in done] == ["get_weather"] * len(message.get("tool_calls", []))
    return choice.finish_reason, message


@pytest.mark.parametrize("per_chunk", [1, 1000])
@pytest.mark.parametrize("ask", [whole, streamed, with_helper])
async def test_a_conversation_with_the_openai_client(
    tokenizer: Tokenizer, ask: Callable[..., object], per_chunk: int
) -> None:
    ring = ring_of(tokenizer, turn, per_chunk)
    messages: Messages = [USER]
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        reason, message = await ask(client, messages)  # type: ignore[misc]
        assert reason == "tool_calls"
        assert message["content"] == "Let me look."
        calls = message["tool_calls"]
        assert len({call["id"] for call in calls}) == 2
        assert [(call["type"], call["function"]["name"]) for call in calls] == [
            ("function", "get_weather")
        ] * 2
        arguments = [json.loads(call["function"]["arguments"]) for call in calls]
        assert arguments == [{"city": "Paris"}, {"city": "Ulm", "unit": "C"}]
        shown = prompt_of(tokenizer, ring)
        assert json.dumps(WEATHER) in shown and "# Tools" in shown
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": value}
            for call, value in zip(calls, ("14", "9"), strict=True)
        ]
        reason, message = await ask(client, messages)  # type: ignore[misc]
        assert (reason, message["content"]) == ("stop", ANSWER)
        assert "tool_calls" not in message
    shown = prompt_of(tokenizer, ring)
    assert f"<|start|>assistant\nLet me look.{PARIS}{ULM}<|end|>" in shown
    assert shown.endswith(
        "<|start|>tool get_weather\n14<|end|>\n<|start|>tool get_weather\n9<|end|>\n<|start|>assistant\n"
    )


async def test_a_message_of_calls_alone_has_no_content(tokenizer: Tokenizer) -> None:
    body = await post(ring_of(tokenizer, PARIS), tokenizer, tools=[WEATHER])
    assert message_of(body)["content"] is None
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_calls_an_answer_had_no_room_for_are_content(tokenizer: Tokenizer) -> None:
    body = await post(ring_of(tokenizer, PARIS), tokenizer, tools=[WEATHER], max_tokens=30)
    message = message_of(body)
    assert body["choices"][0]["finish_reason"] == "length"
    assert PARIS.startswith(message["content"]) and "tool_calls" not in message


async def test_each_choice_has_its_own_calls(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, PARIS)
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[USER],
            tools=[WEATHER],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        started: dict[int, list[str | None]] = {0: [], 1: []}
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                started[choice.index] += [call.id for call in choice.delta.tool_calls or [] if call.id]
    assert [len(ids) for ids in started.values()] == [1, 1]
    assert started[0] != started[1]
    assert usage is not None and usage.completion_tokens == 2 * (len(tokenizer.encode(PARIS)) + 1)


async def test_one_call_where_several_are_not_wanted(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, CALLS)
    body = await post(ring, tokenizer, tools=[WEATHER], parallel_tool_calls=False)
    [call] = message_of(body)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert ring.calls[0].params.structured_output is None


async def test_none_takes_the_tools_away(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, CALLS)
    body = await post(ring, tokenizer, tools=[WEATHER], tool_choice="none")
    assert message_of(body)["content"] == CALLS
    assert "# Tools" not in prompt_of(tokenizer, ring)


# -- calls that must be made


def accepts(tokenizer: Tokenizer, ring: FakeRing, text: str) -> bool:
    """Whether the grammar of the last request takes ``text`` as a whole answer."""
    asked = ring.calls[-1].params.structured_output
    assert asked is not None
    vocabulary = vocabulary_of(tokenizer)
    matcher = Grammar(compiled(vocabulary.tokenizer, to_llguidance(asked)), vocabulary).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@cache
def vocabulary_of(tokenizer: Tokenizer) -> GuidedVocabulary:
    eos = tokenizer.special.eos_id
    assert eos is not None
    return TokenTable.of(tokenizer, tokenizer.vocab_size, [eos]).build()


HELD = ["text", "special", "added"]
"""How published tokenizers hold markers: as several tokens, as a special token, as an added token that is
none."""


def holding(tmp_path: Path, held: str, *markers: str) -> Tokenizer:
    given = {"text": {}, "special": {"markers": markers}, "added": {"texts": markers}}[held]
    return byte_level_tokenizer(tmp_path, template=TOOL_TEMPLATE, **given)  # type: ignore[arg-type]


NO_ARGUMENTS = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BAD_UNIT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "K"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        (
            {"tool_choice": "required"},
            [PARIS, ULM, NO_ARGUMENTS, f"{PARIS}\n{NO_ARGUMENTS}"],
            ["", ANSWER, CALLS, BAD_UNIT, PARIS[:-1], NO_ARGUMENTS.replace("{}", '{"a": 1}')],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [PARIS, NO_ARGUMENTS],
            [f"{PARIS}\n{ULM}", ANSWER],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
            [NO_ARGUMENTS],
            [PARIS, f"{NO_ARGUMENTS}\n{NO_ARGUMENTS}", "", ANSWER],
        ),
    ],
    ids=["required", "one", "named"],
)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("thinks", all_deep_but(1, ["no", "may", "must"]))
async def test_a_call_that_must_be_made(
    tmp_path: Path,
    fields: dict[str, object],
    taken: list[str],
    refused: list[str],
    held: str,
    thinks: str,
) -> None:
    tokenizer = holding(tmp_path, held, "<tool_call>", "</tool_call>", "<think>", "</think>")
    settings = ApiSettings(reasoning_parser="none" if thinks == "no" else "auto")
    ring = ring_of(tokenizer, taken[0])
    body = await post(
        ring,
        tokenizer,
        settings,
        tools=[WEATHER, NOW],
        chat_template_kwargs={"opens": thinks == "must"},
        **fields,
    )
    assert body["choices"], body
    before = {"no": [""], "may": ["", "<think>a < b</think>\n\n"], "must": ["a < b\n</think>\n\n"]}[thinks]
    for start in before:
        assert all(accepts(tokenizer, ring, start + text) for text in taken)
        assert not any(accepts(tokenizer, ring, start + text) for text in refused)
    if thinks == "no":
        assert not accepts(tokenizer, ring, "<think>a</think>" + taken[0])
        assert len(message_of(body)["tool_calls"]) == 1


async def test_llamas_format(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path, markers=["<|python_tag|>"])
    settings = ApiSettings(tool_call_parser="llama3_json")
    text = '{"name": "get_weather", "parameters": {"city": "Ulm"}}; {"name": "now", "parameters": {}}'
    for answer in (text, f"<|python_tag|>{text}"):
        ring = ring_of(tokenizer, answer)
        body = await post(ring, tokenizer, settings, tools=[WEATHER, NOW])
        names = [call["function"]["name"] for call in message_of(body)["tool_calls"]]
        assert (names, message_of(body)["content"]) == (["get_weather", "now"], None)
    await post(ring, tokenizer, settings, tools=[WEATHER, NOW], tool_choice="required")
    assert accepts(tokenizer, ring, text)
    assert not accepts(tokenizer, ring, ANSWER)


async def test_markers_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    markers = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<other>"]
    tokenizer = byte_level_tokenizer(tmp_path, template=TOOL_TEMPLATE, markers=markers)
    ring = ring_of(tokenizer, f"<think>hm</think>{PARIS}")
    body = await post(ring, tokenizer, tools=[WEATHER])
    assert message_of(body)["reasoning_content"] == "hm"
    assert len(message_of(body)["tool_calls"]) == 1
    plain = await post(ring_of(tokenizer, "a<tool_call>b<other>c"), tokenizer)
    assert message_of(plain)["content"] == "abc", "nobody looks for calls here: special tokens are left out"


async def test_a_model_without_a_format_can_still_be_made_to_call(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path)
    ring = ring_of(tokenizer, NO_ARGUMENTS)
    refused = await post(ring, tokenizer, tools=[NOW])
    assert refused["error"]["param"] == "tools" and "--tool-call-parser" in refused["error"]["message"]
    body = await post(ring, tokenizer, tools=[NOW], tool_choice="required")
    assert len(message_of(body)["tool_calls"]) == 1
    assert accepts(tokenizer, ring, NO_ARGUMENTS)


# -- reasoning


@pytest.mark.parametrize("opens", [False, True])
async def test_reasoning_is_told_apart(tokenizer: Tokenizer, opens: bool) -> None:
    text = f"{'' if opens else '<think>'}\nFirst, é\n</think>\n\n{ANSWER}"
    ring = ring_of(tokenizer, text)
    fields = {"chat_template_kwargs": {"opens": opens}}
    message = message_of(await post(ring, tokenizer, None, **fields))
    assert (message["reasoning_content"], message["content"]) == ("First, é", ANSWER)
    assert message["reasoning"] == message["reasoning_content"]
    without = message_of(await post(ring, tokenizer, None, include_reasoning=False, **fields))
    assert "reasoning_content" not in without and without["content"] == ANSWER
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[USER],
            stream=True,
            extra_body=fields,
        )
        content = reasoning = ""
        async for chunk in stream:
            delta = chunk.choices[0].delta.model_dump()
            content += delta["content"] or ""
            reasoning += delta.get("reasoning_content") or ""
    assert (reasoning, content) == ("First, é", ANSWER)


async def test_reasoning_can_be_left_in(tokenizer: Tokenizer) -> None:
    text = f"<think>hm</think>{ANSWER}"
    body = await post(ring_of(tokenizer, text), tokenizer, ApiSettings(reasoning_parser="none"))
    assert message_of(body) == {"role": "assistant", "content": text, "refusal": None}


async def test_reasoning_goes_back_to_the_template(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, ANSWER)
    before = {"role": "assistant", "content": "Yes.", "reasoning": "hm"}
    await post(ring, tokenizer, messages=[USER, before, USER])
    assert "<think>hm</think>Yes." in prompt_of(tokenizer, ring)


# -- a form, and what may come before it or instead of it

PLACE: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
IN_ULM = '{"city": "Ulm"}'
FORMS: list[tuple[dict[str, object], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PLACE}}}, IN_ULM),
    ({"response_format": {"type": "json_object"}}, IN_ULM),
    ({"structured_outputs": {"regex": r"[a-z/]+\d"}}, "a/b7"),
    ({"guided_choice": ["yes", "no\n<b>"]}, "no\n<b>"),
    ({"guided_grammar": 'start: "x" B\nB: /y+/'}, "xyy"),
    ({"guided_grammar": 'root ::= "x" b\nb ::= "y" b | "y"'}, "xyy"),
]


@pytest.mark.parametrize("held", all_deep_but(1, HELD))
@pytest.mark.parametrize(("fields", "text"), FORMS, ids=lambda value: str(value)[:40])
async def test_reasoning_comes_before_a_form(
    tmp_path: Path, fields: dict[str, object], text: str, held: str
) -> None:
    """What a model thinks has no form; what it says then has."""
    tokenizer = holding(tmp_path, held, "<think>", "</think>")
    opened = {**fields, "chat_template_kwargs": {"opens": True}}
    ring = ring_of(tokenizer, f"a {{ b</think>\n{text}")
    message = message_of(await post(ring, tokenizer, None, **opened))
    assert (message["reasoning_content"], message["content"]) == ("a { b", text)
    assert accepts(tokenizer, ring, f"a {{ b</think>\n{text}")
    assert not accepts(tokenizer, ring, text), "the reasoning that was begun has to end"
    assert not accepts(tokenizer, ring, f"a</think>{ANSWER}")
    await post(ring, tokenizer, None, **fields)
    for before in ("", "<think>a { b</think>\n"):
        assert accepts(tokenizer, ring, before + text)
        assert not accepts(tokenizer, ring, before + ANSWER)
    settings = ApiSettings(reasoning_parser="none")
    await post(ring, tokenizer, settings, **fields)
    assert accepts(tokenizer, ring, text)
    assert not accepts(tokenizer, ring, f"<think>a</think>{text}")


async def test_no_reasoning_where_the_prompt_has_ended_it(tmp_path: Path) -> None:
    """As templates do that are told not to reason."""
    template = TOOL_TEMPLATE.replace("<think>\n{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
    assert template != TOOL_TEMPLATE
    tokenizer = byte_level_tokenizer(tmp_path, template=template)
    ring = ring_of(tokenizer, IN_ULM)
    ended = {"chat_template_kwargs": {"opens": True}}
    body = await post(ring, tokenizer, None, response_format={"type": "json_object"}, **ended)
    assert message_of(body)["content"] == IN_ULM
    assert accepts(tokenizer, ring, IN_ULM)
    assert not accepts(tokenizer, ring, f"<think>a</think>{IN_ULM}")
    await post(ring, tokenizer, None, tools=[NOW], tool_choice="required", **ended)
    assert accepts(tokenizer, ring, NO_ARGUMENTS)
    assert not accepts(tokenizer, ring, f"<think>a</think>{NO_ARGUMENTS}")


@pytest.mark.parametrize(("fields", "text"), all_deep_but(2, FORMS), ids=lambda value: str(value)[:40])
async def test_calls_may_come_instead_of_a_form(tmp_path: Path, fields: dict[str, object], text: str) -> None:
    tokenizer = byte_level_tokenizer(tmp_path, template=TOOL_TEMPLATE)
    ring = ring_of(tokenizer, f"{PARIS}\n{ULM}")
    body = await post(ring, tokenizer, None, tools=[WEATHER, NOW], **fields)
    assert len(message_of(body)["tool_calls"]) == 2
    for answer in (
        text,
        PARIS,
        f"{PARIS}\n{NO_ARGUMENTS}",
        f"<think>a</think>{ULM}",
        f"<think></think>{text}",
    ):
        assert accepts(tokenizer, ring, answer)
    for answer in ("", ANSWER, BAD_UNIT, CALLS, f"{text}{PARIS}", f"{PARIS}\n{text}"):
        assert not accepts(tokenizer, ring, answer)


async def test_calls_without_a_marker_are_refused_beside_a_form(tmp_path: Path) -> None:
    """Both are JSON, and begin alike."""
    tokenizer = byte_level_tokenizer(tmp_path, markers=["<|python_tag|>"])
    settings = ApiSettings(tool_call_parser="llama3_json")
    ring, (form, _) = ring_of(tokenizer, IN_ULM), FORMS[0]
    refused = await post(ring, tokenizer, settings, tools=[NOW], **form)
    assert refused["error"]["param"] == "tools" and "without a marker" in refused["error"]["message"]
    body = await post(ring, tokenizer, settings, tools=[NOW], tool_choice="none", **form)
    assert message_of(body)["content"] == IN_ULM


async def test_what_was_said_can_be_sent_back(tokenizer: Tokenizer) -> None:
    """An answer that was cut off in its reasoning has no content, and a refusal is one."""
    ring = ring_of(tokenizer, "<think>Paris is a city that")
    message = message_of(await post(ring, tokenizer))
    assert message["content"] is None
    for before, told in (
        (message, "<think>Paris is a city that</think>"),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ):
        body = await post(ring, tokenizer, messages=[USER, before, USER])
        assert "choices" in body, body
        assert f"<|start|>assistant\n{told}<|end|>" in prompt_of(tokenizer, ring)


# -- what is refused


def tool(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


CALLING = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}


def calling(**function: object) -> list[object]:
    return [USER, {**CALLING, "tool_calls": [{"id": "1", "function": {"name": "f", **function}}]}]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", "A-Z"),
        ({"tools": [tool(name="")]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "second time"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", '"function"'),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "object"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters", "array"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [tool(description="x" * 300_000)]}, "tools", "at most 262144"),
        ({"tools": "f"}, "tools", "array"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice", '"required"'),
        (
            {"tools": [NOW], "tool_choice": "required", "use_beam_search": True},
            "tool_choice",
            "use_beam_search cannot",
        ),
        ({"tools": [NOW], "tool_choice": 3}, "tool_choice", "expected"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "not among tools",
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "tool", "function": {"name": "now"}}},
            "tool_choice.type",
            '"function"',
        ),
        ({"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        ({"tools": [NOW], "echo": True}, "echo", "together with tools"),
        ({"messages": [{**USER, **CALLING, "role": "user"}]}, "messages[0].tool_calls", "assistant"),
        (
            {"messages": calling(arguments="{")},
            "messages[1].tool_calls[0].function.arguments",
            "JSON object",
        ),
        (
            {"messages": calling(arguments="[1]")},
            "messages[1].tool_calls[0].function.arguments",
            "JSON object",
        ),
        ({"messages": [{"role": "tool"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
            "messages[0].content[0].refusal",
            "required",
        ),
        (
            {
                "tools": [tool(parameters={"type": "object", "properties": {"a": {"not": {}}}})],
                "response_format": {"type": "json_object"},
            },
            "tools",
            "not",
        ),
        ({"tools": [NOW], "guided_regex": "("}, "guided_regex", "cannot be followed"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_is_refused(
    api: httpx.AsyncClient, fields: dict[str, object], param: str, message: str
) -> None:
    response = await api.post("/v1/chat/completions", json={"messages": [USER], **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none", "parallel_tool_calls": True},
        {"tools": [tool(parameters={})]},
        {"messages": calling(arguments="")},
        {"messages": [USER, {**CALLING, "content": None}, {"role": "tool", "content": "3"}]},
    ],
)
async def test_what_is_taken(api: httpx.AsyncClient, fields: dict[str, object]) -> None:
    response = await api.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert response.status_code == 200, response.text


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    ring = ring_of(tokenizer, ANSWER)
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        yield client
