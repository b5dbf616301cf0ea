"""However a text is cut, its parsers find the same, and lose nothing of it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from baton.tools.answer import AnswerFormat
from baton.tools.events import Message
from baton.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from baton.tools.json_scanner import JsonScanner

NAMES = frozenset({"f", "get_weather"})

SCRAPS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        '{"name": "f", "arguments": {}}',
        '{"name": "get_weather", "parameters": {"a": [1, "\\u00e9}"]}}',
        '{"name": "f", "arguments": {"b": tru',
        '{"name": "f", "arguments": {"b": 1}',
        '{"arguments": {"c": -0.5}, "name": "f"}',
        '{"name": "other", "arguments": {}}',
        "; ",
        "\n",
        "}",
        "<",
        "words, ",
    ]
)
TEXTS = st.lists(st.one_of(SCRAPS, st.text(max_size=6)), max_size=8).map("".join)
FORMATS = st.builds(
    AnswerFormat,
    reasoning=st.sampled_from([None, *REASONING_FORMATS.values()]),
    opened=st.booleans(),
    tools=st.sampled_from([None, *TOOL_FORMATS.values()]),
    names=st.just(NAMES),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)


def parsed(format_: AnswerFormat, pieces: list[str]) -> Message:
    parser, message = format_.parser(), Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    return message


@given(FORMATS, TEXTS, st.data())
def test_any_cut_gives_the_same_answer(format_: AnswerFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(format_, [text])
    assert parsed(format_, pieces) == whole == parsed(format_, list(text))
    for call in whole.calls.values():
        assert call.name in NAMES
        assert isinstance(json.loads(call.arguments), dict)


@given(FORMATS, TEXTS)
def test_nothing_is_lost_or_told_twice(format_: AnswerFormat, text: str) -> None:
    """Reasoning, content and arguments are parts of the text, in its order and apart from each other; what is
    left of it is markup."""
    message = parsed(format_, [text])
    if format_.tools is None and format_.reasoning is None:
        assert message.content == text
    told = message.reasoning + message.content + "".join(call.arguments for call in message.calls.values())
    counted = {character: text.count(character) for character in set(told)}
    assert all(told.count(character) <= count for character, count in counted.items())
    if format_.reasoning is None and not message.calls:
        assert message.content == text


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), OBJECTS, st.booleans()), min_size=1, max_size=4),
)
def test_calls_come_back_as_they_were_written(
    name: str, written: list[tuple[str, dict[str, object], bool]]
) -> None:
    spelling = TOOL_FORMATS[name].spelling
    texts = [
        spelling.opening
        + json.dumps({"name": function, spelling.arguments_key: arguments}, ensure_ascii=escaped)
        + spelling.closing
        for function, arguments, escaped in written
    ]
    format_ = AnswerFormat(tools=TOOL_FORMATS[name], names=NAMES)
    message = parsed(format_, list(spelling.separator.join(texts)))
    assert message.content == ""
    found = [(call.name, json.loads(call.arguments)) for call in message.calls.values()]
    assert found == [(function, arguments) for function, arguments, _ in written]


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]), st.text(max_size=2))
def test_the_scanner_accepts_what_json_does(
    value: dict[str, object], escaped: bool, indent: int | None, more: str
) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=indent)
    scanner = JsonScanner()
    assert all(scanner.push(character) for character in text)
    assert scanner.done and scanner.depth == 0
    broken = JsonScanner()
    spoiled = text[:-1] + more
    valid = all(broken.push(character) for character in spoiled) and broken.done
    try:
        decoded = isinstance(json.loads(spoiled), dict)
    except ValueError:
        decoded = False
    assert valid <= decoded, "what the scanner takes is JSON"
