"""Calls and reasoning in texts as models write them."""

from __future__ import annotations

import json

import pytest

from baton.tools.answer import AnswerFormat
from baton.tools.events import CallArguments, CallBroken, CallStarted, Content, MessageBuilder, ParsedAnswer
from baton.tools.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from baton.tools.parsers import HermesParser

NAMES = frozenset({"get_weather", "now", "search"})


def parsed(
    text: str, tools: str | None = None, reasoning: str | None = None, opened: bool = False
) -> ParsedAnswer:
    """The answer, fed whole; as pieces of one character it must amount to the same."""
    results = []
    for step in (len(text) or 1, 1):
        parser = AnswerFormat(
            reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
            opened=opened,
            tools=TOOL_FORMATS[tools] if tools else None,
            names=NAMES,
        ).parser()
        message = MessageBuilder()
        for at in range(0, len(text), step):
            message.add(parser.push(text[at : at + step]))
        message.add(parser.finish())
        results.append(message.message())
    assert results[0] == results[1]
    return results[0]


def calls(message: ParsedAnswer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


ULM = '{"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}}'

HERMES = {
    # What Qwen2.5-Instruct, Qwen3 and Hermes 2 Pro write, by their model cards and templates.
    "qwen": (f"<tool_call>\n{ULM}\n</tool_call>", "", [("get_weather", {"city": "Ulm", "days": 3})]),
    "qwen parallel": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Francisco, CA, USA"}}'
        "\n</tool_call>\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln \\"West\\" 🌧"}}\n</tool_call>',
        "",
        [
            ("get_weather", {"city": "San Francisco, CA, USA"}),
            ("get_weather", {"city": 'Köln "West" 🌧'}),
        ],
    ),
    "hermes": (
        '<tool_call>\n{"arguments": {"city": "Ulm"}, "name": "get_weather"}\n</tool_call>\n',
        "",
        [("get_weather", {"city": "Ulm"})],
    ),
    "words first": (
        f"Let me look that up.\n\n<tool_call>\n{ULM}\n</tool_call>",
        "Let me look that up.",
        [("get_weather", {"city": "Ulm", "days": 3})],
    ),
    "words after": (
        f"<tool_call>{ULM}</tool_call>\nDone.",
        "\nDone.",
        [("get_weather", {"city": "Ulm", "days": 3})],
    ),
    "no closing marker": (f"<tool_call>\n{ULM}", "", [("get_weather", {"city": "Ulm", "days": 3})]),
    "no arguments": ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [("now", {})]),
    "other keys": (
        '<tool_call>{"id": 7, "type": "function", "x": [{"name": "y"}, -1.5e3, null], "name": "now", '
        '"arguments": {"deep": {"er": [[{}]]}}}</tool_call>',
        "",
        [("now", {"deep": {"er": [[{}]]}})],
    ),
}

LLAMA = {
    "plain": (
        '{"name": "get_weather", "parameters": {"city": "Ulm", "days": 3}}',
        "",
        [("get_weather", {"city": "Ulm", "days": 3})],
    ),
    "with the token": (
        '<|python_tag|>{"name": "search", "parameters": {"query": "a;b}"}}',
        "",
        [("search", {"query": "a;b}"})],
    ),
    "several": (
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Ulm"}} ;'
        '{"type": "function", "name": "now", "parameters": {}}',
        "",
        [("now", {}), ("get_weather", {"city": "Ulm"}), ("now", {})],
    ),
    "arguments": ('{"name": "now", "arguments": {}}\n', "", [("now", {})]),
    "words first": (
        'I will look.\n<|python_tag|>{"name": "now", "parameters": {}}',
        "I will look.",
        [("now", {})],
    ),
}

MALFORMED = {
    "hermes": (
        "<tool_call>get_weather(Ulm)</tool_call>",
        '<tool_call>\n{"name": "get_weather"}\n</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": "Ulm"}</tool_call>',
        '<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "rm_rf"}</tool_call>',
        '<tool_call>{"name": "now", "name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\\x"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "cut sho',
        '<tool_call>{"name": "now", "arguments": {}',
        '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 70 + "1",
        "<tool_call>",
        "  <tool_ca",
        "a < b, <tool_box>, </tool_call>",
    ),
    "llama3_json": (
        '{"city": "Ulm"}',
        '{"name": "Ada", "parameters": {}}',
        '{"name": "now", "parameters": {}',
        '{"name": "now"}',
        "<|python_tag|>print('hello')",
        "<|python_",
        "Plain text; {not json}",
        ' \n{"name": "now", "parameters": [1]}',
    ),
}


@pytest.mark.parametrize(("text", "content", "expected"), HERMES.values(), ids=HERMES)
def test_hermes(text: str, content: str, expected: list[tuple[str, object]]) -> None:
    message = parsed(text, "hermes")
    assert (message.content, calls(message)) == (content, expected)


@pytest.mark.parametrize(("text", "content", "expected"), LLAMA.values(), ids=LLAMA)
def test_llama(text: str, content: str, expected: list[tuple[str, object]]) -> None:
    message = parsed(text, "llama3_json")
    assert (message.content, calls(message)) == (content, expected)


@pytest.mark.parametrize(
    ("tools", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts]
)
def test_what_is_no_call_is_content_to_the_last_character(tools: str, text: str) -> None:
    message = parsed(text, tools)
    assert (message.content, message.calls) == (text, ())


def test_a_call_after_a_malformed_one_is_a_call() -> None:
    broken = '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>'
    message = parsed(f"{broken}<tool_call>{ULM}</tool_call>", "hermes")
    assert message.content == broken
    assert calls(message) == [("get_weather", {"city": "Ulm", "days": 3})]


def test_the_name_comes_first_and_arguments_as_they_are_written() -> None:
    parser = HermesParser(NAMES)
    assert parser.push('Hm. <tool_call>{"name": "now", "argum') == [Content("Hm.")]
    assert parser.push('ents": {"a": "b') == [CallStarted(0, "now"), CallArguments(0, '{"a": "b')]
    assert parser.push('c"') == [CallArguments(0, 'c"')]
    assert parser.push("} }</tool") == [CallArguments(0, "}")]
    assert parser.push("_call>") + parser.finish() == []


def test_a_call_that_breaks_off_is_told_to_have_been_none() -> None:
    parser = HermesParser(NAMES)
    text = '<tool_call>{"name": "now", "arguments": {"a"'
    parser.push(text)
    assert parser.finish() == [CallBroken(0, text)]


THINK = [
    ("<think>\nhm, <b>\n</think>\n\nIt is 3.", False, "hm, <b>", "It is 3."),
    ("hm\n</think>It is 3.", True, "hm", "It is 3."),
    ("<think>hm</think>It is 3.", True, "hm", "It is 3."),
    ("<think>\n\n</think>\n\nIt is 3.", False, "", "It is 3."),
    ("It is <think>3</think>.", False, "", "It is <think>3</think>."),
    ("\n It is 3.", False, "", "\n It is 3."),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("cut off\n", True, "cut off\n", ""),
    ("<thi", False, "", "<thi"),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), THINK)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    message = parsed(text, reasoning="think", opened=opened)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    call = f"<tool_call>{ULM}</tool_call>"
    message = parsed(f"<think>maybe {call}</think>\n{call}", "hermes", "think")
    assert message.reasoning == f"maybe {call}"
    assert (message.content, len(message.calls)) == ("", 1)


def test_the_format_is_found_by_the_chat_template() -> None:
    qwen = "... return a json object within <tool_call></tool_call> XML tags ... split('</think>')"
    assert tool_format("auto", qwen) is TOOL_FORMATS["hermes"]
    assert reasoning_format("auto", qwen) is REASONING_FORMATS["think"]
    for foreign in ("<function=example_function_name>", "<arg_key>{arg-key-1}</arg_key>"):
        assert tool_format("auto", qwen + foreign) is None
    llama = '{{- "<|python_tag|>" + tool_call.name }}'
    assert tool_format("auto", llama) is TOOL_FORMATS["llama3_json"]
    assert tool_format("auto", "{{ messages }}") is tool_format("auto", None) is None
    assert reasoning_format("auto", llama) is None
    assert tool_format("none", qwen) is None
    assert reasoning_format("none", qwen) is None
    assert tool_format("llama3_json", qwen) is TOOL_FORMATS["llama3_json"]
    assert REASONING_FORMATS["think"].opened_by("<|assistant|>\n<think>\n")
    assert not REASONING_FORMATS["think"].opened_by("<think>\n\n</think>\n\n")
    assert REASONING_FORMATS["deepseek_r1"].opened_by("<|assistant|>")
