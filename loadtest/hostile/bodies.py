"""Bodies of requests that do not end, or are 8 MiB of one element again and again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtest.hostile.vocabulary import MIB, Attack, Felt, Found, Target, Watched
from loadtest.hostile.wire import ask, call, push, request

LARGEST = 8 * MIB - 4096
"""The size of the largest bodies in bytes, a little below the limit."""
HELD = 60
LONGER_S = 12.0
PATIENCE_S = 12.0
LONG_TURN_S = 0.5
"""The silence that a probe must see, in seconds; in the calm it is some milliseconds."""


@dataclass(frozen=True)
class Repeated:
    """A body that is one element again and again."""

    name: str
    path: str
    before: str
    element: str
    after: str
    between: str = ","
    most: int = LARGEST
    """Most bytes, where fewer elements than fit are allowed."""

    def body(self, size: int = LARGEST) -> bytes:
        count = (min(size, self.most) - len(self.before) - len(self.after)) // (
            len(self.element) + len(self.between)
        )
        return (self.before + self.between.join([self.element] * count) + self.after).encode()


_CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}'
_TOOL = '{"type":"function","function":{"name":"f"}}'
_USER = '{"role":"user","content":"a"}'
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_END = '],"max_tokens":1}'

DEVELOPER = Repeated(
    "developer messages", _CHAT, '{"messages":[', '{"role":"developer","content":"aaaaaaaa"}', _END
)
CALLS = Repeated(
    "function calls",
    "/v1/responses",
    '{"input":[',
    '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}',
    '],"max_output_tokens":1}',
)
THOUGHTS = Repeated(
    "thinking parts",
    "/v1/messages",
    '{"max_tokens":1,"messages":[' + _USER + ',{"role":"assistant","content":[',
    '{"type":"thinking","thinking":"a"}',
    "]}," + _USER + "]}",
)
WRONG_MESSAGES = Repeated(
    "messages, one wrong", "/v1/messages", '{"max_tokens":1,"top_k":-5,"messages":[', _USER, "]}"
)
WRONG_ITEMS = Repeated("items, one wrong", "/v1/responses", '{"temperature":99,"input":[', _USER, "]}")
LONG_PROMPTS = Repeated(
    "prompts of 16 KiB, one empty",
    _TEXT,
    '{"max_tokens":1,"prompt":[',
    json.dumps(("a long prompt of words " * 1000)[: 16 * 1024]),
    ',""]}',
    most=250 * 16 * 1024,
)
"""The most prompts that are allowed, each fitting the context; the last one is wrong, so that none is
computed."""

CHATS = (
    Repeated("messages", _CHAT, '{"messages":[', _USER, _END),
    Repeated("system messages", _CHAT, '{"messages":[', '{"role":"system","content":"a"}', _END),
    Repeated(
        "parts",
        _CHAT,
        '{"messages":[{"role":"user","content":[',
        '{"type":"text","text":"a"}',
        ']}],"max_tokens":1}',
    ),
    Repeated(
        "tool calls",
        _CHAT,
        '{"messages":[' + _USER + ',{"role":"assistant","tool_calls":[',
        _CALL,
        "]}," + _USER + _END,
    ),
    Repeated(
        "tool results", _CHAT, '{"messages":[', '{"role":"tool","tool_call_id":"c","content":"a"}', _END
    ),
    Repeated("tools", _CHAT, '{"messages":[' + _USER + '],"tools":[', _TOOL, _END),
    Repeated("stop strings", _CHAT, '{"messages":[' + _USER + '],"stop":[', '"a"', _END),
    Repeated(
        "enum",
        _CHAT,
        '{"messages":[' + _USER + '],"max_tokens":1,"response_format":{"type":"json_schema",'
        '"json_schema":{"name":"a","schema":{"enum":[',
        '"a"',
        "]}}}}",
    ),
    Repeated("nesting", _CHAT, '{"messages":', "[", "", between=""),
    Repeated("keys", _CHAT, '{"messages":[' + _USER + "],", '"a":1', ',"max_tokens":1}'),
)
TEXTS = (
    Repeated("short prompts", _TEXT, '{"max_tokens":1,"prompt":[', '"a"', "]}"),
    Repeated("prompts of ids", _TEXT, '{"max_tokens":1,"prompt":[', "[1]", "]}"),
    Repeated("ids", _TEXT, '{"max_tokens":1,"prompt":[', "1", "]}"),
    Repeated("one text", _TEXT, '{"max_tokens":1,"prompt":"', "aZ9 ", '"}', between=""),
    Repeated("biases", _TEXT, '{"max_tokens":1,"prompt":"a","logit_bias":{', '"1":1', "}}"),
    Repeated("stop ids", _TEXT, '{"max_tokens":1,"prompt":"a","stop_token_ids":[', "1", "]}"),
    Repeated("bad words", _TEXT, '{"max_tokens":1,"prompt":"a","bad_words":[', '"a"', "]}"),
    Repeated("choices", _TEXT, '{"max_tokens":1,"prompt":"a","guided_choice":[', '"a"', "]}"),
)
MESSAGES = (
    Repeated("turns", "/v1/messages", '{"max_tokens":1,"messages":[', _USER, "]}"),
    Repeated(
        "tool uses",
        "/v1/messages",
        '{"max_tokens":1,"messages":[' + _USER + ',{"role":"assistant","content":[',
        '{"type":"tool_use","id":"c","name":"f","input":{}}',
        "]}," + _USER + "]}",
    ),
    Repeated(
        "tool results",
        "/v1/messages",
        '{"max_tokens":1,"messages":[{"role":"user","content":[',
        '{"type":"tool_result","tool_use_id":"c","content":"a"}',
        "]}]}",
    ),
    Repeated(
        "system parts",
        "/v1/messages",
        '{"max_tokens":1,"messages":[' + _USER + '],"system":[',
        '{"type":"text","text":"a"}',
        "]}",
    ),
    Repeated(
        "tools",
        "/v1/messages",
        '{"max_tokens":1,"messages":[' + _USER + '],"tools":[',
        '{"name":"f","input_schema":{}}',
        "]}",
    ),
    Repeated("counted turns", "/v1/messages/count_tokens", '{"messages":[', _USER, "]}"),
)
RESPONSES = (
    Repeated("items", "/v1/responses", '{"max_output_tokens":1,"input":[', _USER, "]}"),
    Repeated(
        "outputs",
        "/v1/responses",
        '{"max_output_tokens":1,"input":[',
        '{"type":"function_call_output","call_id":"c","output":"a"}',
        "]}",
    ),
    Repeated(
        "reasoning",
        "/v1/responses",
        '{"max_output_tokens":1,"input":[',
        '{"type":"reasoning","content":[{"type":"reasoning_text","text":"a"}]}',
        "]}",
    ),
    Repeated(
        "parts",
        "/v1/responses",
        '{"max_output_tokens":1,"input":[{"role":"user","content":[',
        '{"type":"input_text","text":"a"}',
        "]}]}",
    ),
    Repeated(
        "tools",
        "/v1/responses",
        '{"max_output_tokens":1,"input":"a","tools":[',
        '{"type":"function","name":"f"}',
        "]}",
    ),
)
TOKENS = (
    Repeated("tokenized messages", "/tokenize", '{"messages":[', _USER, "]}"),
    Repeated("told tokens", "/tokenize", '{"return_token_strs":true,"prompt":"', "aZ9 ", '"}', between=""),
    Repeated("ids to detokenize", "/detokenize", '{"tokens":[', "1", "]}"),
)
EVERY = (
    DEVELOPER,
    CALLS,
    THOUGHTS,
    WRONG_MESSAGES,
    WRONG_ITEMS,
    LONG_PROMPTS,
    *CHATS,
    *TEXTS,
    *MESSAGES,
    *RESPONSES,
    *TOKENS,
)


def _sending(bodies: Sequence[Repeated]) -> Callable[[Target, Found], Awaitable[None]]:
    """Send the bodies one after the other, each when the one before is answered."""

    async def run(target: Target, found: Found) -> None:
        found.figures["unsent"] = len(bodies)
        for each in bodies:
            sent = request(each.path, each.body(), key=target.keys.get("evil"))
            answer = await ask(target.http, sent, wait_s=PATIENCE_S)
            found.figures["unsent"] -= 1
            found.figures[f"{each.name}, s"] = round(answer.seconds, 3)
            found.count(answer.ending)
            if answer.ending[0] not in "24":
                found.said += f"{each.name}: {answer.ending} {answer.body[:160].decode(errors='replace')}; "

    return run


def _stood_still(found: Found, watched: Watched, felt: Felt) -> bool:
    return felt.silence > LONG_TURN_S


def _repeated(name: str, *bodies: Repeated) -> Attack:
    return Attack(
        name=name,
        finding="S3",
        aim="the event loop stands still for 0.5 s",
        run=_sending(bodies),
        reached=_stood_still,
        max_s=30 if len(bodies) > 1 else PATIENCE_S + 2,
    )


async def held(target: Target, found: Found) -> None:
    """Hold bodies that are each a byte short of their end."""
    sent = request("/v1/completions", b" " * (LARGEST - 1), key=target.keys.get("evil"), length=LARGEST)
    lines = []
    for _ in range(HELD):
        lines.append(await call(target.http))
        await push(lines[-1], sent, until=time.monotonic() + 2)
    await asyncio.sleep(LONGER_S)
    open_still = await asyncio.gather(*(line.is_open(0.5) for line in lines))
    found.figures["still_open"] = sum(open_still)
    found.got |= {"still open": sum(open_still), "closed": HELD - sum(open_still)}


async def endless(target: Target, found: Found) -> None:
    """Send a byte a second, in chunks, of bodies without a length."""
    head = request("/v1/completions", key=target.keys.get("evil")).replace(b"GET", b"POST", 1)
    more = b"transfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\n"
    lines = []
    for _ in range(HELD):
        lines.append(await call(target.http))
        lines[-1].writer.write(head[:-2] + more)
    for _ in range(int(LONGER_S) + 6):
        await asyncio.sleep(1.0)
        for line in lines:
            if not line.writer.transport.is_closing():
                line.writer.write(b"1\r\n \r\n")
    open_still = await asyncio.gather(*(line.is_open(0.5) for line in lines))
    found.figures["still_open"] = sum(open_still)
    found.got |= {"still open": sum(open_still), "closed": HELD - sum(open_still)}


def _held(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.rss_grew > 200


def _endless(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("still_open") >= HELD / 2


ATTACKS = (
    Attack(
        name="body-held",
        finding="S13",
        aim="60 unfinished bodies hold 200 MiB",
        run=held,
        reached=_held,
        max_s=40,
    ),
    Attack(
        name="body-endless",
        finding="S13",
        aim="30 bodies of a byte a second are open after 18 s",
        run=endless,
        reached=_endless,
        max_s=40,
    ),
    _repeated("body-developer", DEVELOPER),
    _repeated("body-calls", CALLS),
    _repeated("body-thoughts", THOUGHTS),
    _repeated("body-wrong-messages", WRONG_MESSAGES),
    _repeated("body-wrong-items", WRONG_ITEMS),
    _repeated("body-prompts", LONG_PROMPTS),
    _repeated("bodies-chat", *CHATS),
    _repeated("bodies-completions", *TEXTS),
    _repeated("bodies-messages", *MESSAGES),
    _repeated("bodies-responses", *RESPONSES),
    _repeated("bodies-tokens", *TOKENS),
)
