"""However a text is cut, its parsers find the same, and lose nothing of it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from baton.tools.answer import AnswerFormat
from baton.tools.events import MessageBuilder, ParsedAnswer
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


def parsed(format_: AnswerFormat, pieces: list[str]) -> ParsedAnswer:
    parser, message = format_.parser(), MessageBuilder()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    return message.message()


@given(FORMATS, TEXTS, st.data())
def test_any_cut_gives_the_same_answer(format_: AnswerFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(format_, [text])
    assert parsed(format_, pieces) == whole == parsed(format_, list(text))
    for call in whole.calls:
        assert call.name in NAMES
        assert isinstance(json.loads(call.arguments), dict)


@given(FORMATS, TEXTS)
def test_nothing_is_lost_or_told_twice(format_: AnswerFormat, text: str) -> None:
    """Reasoning, content and arguments are parts of the text, in its order and apart from each other; what is
    left of it is markup."""
    message = parsed(format_, [text])
    if format_.tools is None and format_.reasoning is None:
        assert message.content == text
    told = message.reasoning + message.content + "".join(call.arguments for call in message.calls)
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
    found = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert found == [(function, arguments) for function, arguments, _ in written]


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def scanned(text: str) -> bool:
    """Whether the scanner takes all of ``text`` as an object."""
    scanner = JsonScanner()
    return all(scanner.push(character) for character in text) and scanner.done


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]))
def test_the_scanner_takes_every_object(value: dict[str, object], escaped: bool, indent: int | None) -> None:
    assert scanned(json.dumps(value, ensure_ascii=escaped, indent=indent))


@given(
    OBJECTS.map(json.dumps),
    st.integers(0, 200),
    st.integers(0, 3),
    st.text('{}[]":,01-+.eE \\u\ntrue', max_size=3),
)
def test_the_scanner_takes_what_json_takes(text: str, at: int, cut: int, put: str) -> None:
    at = min(at, len(text))
    changed = (text[:at] + put + text[at + cut :]).strip()
    if "NaN" not in changed and "Infinity" not in changed:
        assert scanned(changed) == is_object(changed)
