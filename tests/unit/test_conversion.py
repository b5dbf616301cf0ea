"""Conversations of other protocols become chats in time that grows with their length, and errors keep their
names."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from baton.request.limits import ConversationLimits
from baton.router.api.errors import RequestError
from baton.router.api.http.anthropic import input as messages
from baton.router.api.http.anthropic.fields import ContentBlock, CountRequest, InputMessage
from baton.router.api.http.openai.renaming import Names, renaming
from baton.router.api.http.responses import input as responses
from baton.router.api.http.responses.fields import InputItem, ResponseRequest

LIMITS = ConversationLimits(max_messages=10**6, max_parts=10**6)
COUNT = 20_000


def response_calls() -> None:
    items = [InputItem(type="function_call", call_id="c", name="f", arguments="{}") for _ in range(COUNT)]
    chat = responses.chat_of(ResponseRequest(input=items), {}, LIMITS)
    assert len(chat.body.messages[0].tool_calls or ()) == COUNT
    assert (
        chat.names.of(f"messages[0].tool_calls[{COUNT - 1}].function.arguments")
        == f"input[{COUNT - 1}].arguments"
    )


def assistant_blocks(block: ContentBlock) -> None:
    turns = [InputMessage(role="assistant", content=[block] * COUNT)]
    [message] = messages.chat_of(CountRequest(messages=turns), {}, LIMITS).body.messages
    assert len(message.tool_calls or message.reasoning_content or ()) >= COUNT


def message_thoughts() -> None:
    assistant_blocks(ContentBlock(type="thinking", thinking="t" * 400))


def message_calls() -> None:
    assistant_blocks(ContentBlock(type="tool_use", id="i", name="f", input={}))


def error_names() -> None:
    names = Names((("messages", "input"),), [f"input[{index}]" for index in range(COUNT)])
    for index in range(COUNT):
        with pytest.raises(RequestError) as told, renaming(names):
            raise RequestError(f"messages[{index}].role is wrong", param=f"messages[{index}].role")
        assert told.value.message == f"input[{index}].role is wrong"


@pytest.mark.parametrize("convert", [response_calls, message_thoughts, message_calls, error_names])
def test_twenty_thousand_take_less_than_a_second(convert: Callable[[], None]) -> None:
    began = time.process_time()
    convert()
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("param", "name"),
    [
        ("messages", "input"),
        ("messages[0].content", "instructions.content"),
        ("messages[1].tool_calls[0].function.name", "input[1].name"),
        ("messages[1].tool_calls[7].function.name", "input[0].tool_calls[7].function.name"),
        ("messages[9].content", "input[9].content"),
        ("messagesome", "messagesome"),
        ("tools[3].function.name", "tools[3].name"),
        ("stop", "stop"),
    ],
)
def test_fields_have_the_names_of_their_protocol(param: str, name: str) -> None:
    names = Names(
        (("messages", "input"), (r"tools\[(\d+)\]\.function", r"tools[\1]")),
        ["instructions", "input[0]"],
        {(1, 0): "input[1]"},
    )
    assert names.of(param) == name


@pytest.mark.parametrize(
    ("convert", "told"),
    [
        (
            lambda limits: responses.chat_of(
                ResponseRequest(input=[InputItem(role="user", content="a")] * 4), {}, limits
            ),
            "input has 4 items; at most 3 are allowed.",
        ),
        (
            lambda limits: messages.chat_of(
                CountRequest(messages=[InputMessage(role="user", content="a")] * 4), {}, limits
            ),
            "messages has 4 entries; at most 3 are allowed.",
        ),
        (
            lambda limits: messages.chat_of(
                CountRequest(
                    messages=[
                        InputMessage(
                            role="user",
                            content=[
                                ContentBlock(type="tool_result", content=[ContentBlock(type="text")] * 5)
                            ],
                        )
                    ]
                ),
                {},
                limits,
            ),
            "messages has 6 blocks in all; at most 5 are allowed.",
        ),
    ],
)
def test_more_than_one_request_may_have_is_refused(
    convert: Callable[[ConversationLimits], object], told: str
) -> None:
    with pytest.raises(RequestError) as error:
        convert(ConversationLimits(max_messages=3, max_parts=5))
    assert error.value.message == told
