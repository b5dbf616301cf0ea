"""Bodies of nearly the largest size, each of one element over and over: what a client can make a router read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType

MAX_BYTES = 8 * 1024 * 1024
_ROOM = 64 * 1024
"""For what is around the elements."""


def repeated(element: str, most: int | None = None) -> str:
    """``element``, JSON, so often that a body is nearly full, or ``most`` times."""
    count = (MAX_BYTES - _ROOM) // (len(element.encode()) + 1)
    return ",".join([element] * (count if most is None else min(most, count)))


def numbered(form: str) -> str:
    """Likewise entries that differ: ``form`` has a place for a number."""
    count = (MAX_BYTES - _ROOM) // (len(form.format(10**6)) + 1)
    return ",".join([form.format(number) for number in range(10**6, 10**6 + count)])


@cache
def text(kind: str) -> str:
    """A text of a kind that fills a body, as JSON."""
    size = MAX_BYTES - _ROOM
    if kind == "noise":
        alphabet = "".join(chr(code) for code in range(33, 127) if chr(code) not in '"\\')
        return '"' + "".join(random.Random(0).choices(alphabet, k=size)) + '"'
    return (
        '"'
        + {"spaces": " ", "emoji": "🙂", "digits": "7", "english": "the quick fox "}[kind]
        * (size // {"spaces": 1, "emoji": 4, "digits": 1, "english": 14}[kind])
        + '"'
    )


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


QUOTED = '"s"'
EMPTY = '""'
USER = '{"role":"user","content":"a"}'
TOOL = '{"type":"function","function":{"name":"f","parameters":{}}}'
CALL = '{"id":"i","type":"function","function":{"name":"f","arguments":"{}"}}'
DEEP = '{"a":' * 200 + "1" + "}" * 200


def _chats() -> Iterator[tuple[str, str]]:
    for role in ("user", "assistant", "system", "developer", "tool"):
        yield f"messages of {role}", '"messages":[' + repeated('{"role":"%s","content":"a"}' % role) + "]"
        most = repeated('{"role":"%s","content":"%s"}' % (role, "a" * 780), 10_000)
        yield f"as many messages of {role} as may be", f'"messages":[{most}]'
    yield "empty messages", '"messages":[' + repeated("{}") + "]"
    parts = repeated('{"type":"text","text":""}')
    yield "parts", f'"messages":[{{"role":"user","content":[{parts}]}}]'
    parts = repeated('{"type":"text","text":"%s"}' % ("b" * 780), 10_000)
    yield "as many parts as may be", f'"messages":[{{"role":"user","content":[{parts}]}}]'
    yield "calls", f'"messages":[{{"role":"assistant","tool_calls":[{repeated(CALL)}]}}]'
    yield (
        "as many calls as may be",
        f'"messages":[{{"role":"assistant","tool_calls":[{repeated(CALL, 10_000)}]}}]',
    )
    arguments = json.dumps('{"a":[' + repeated("[]", 2_000_000) + "]}")
    call = f'{{"id":"i","function":{{"name":"f","arguments":{arguments}}}}}'
    yield "a call's arguments", f'"messages":[{{"role":"assistant","tool_calls":[{call}]}}]'
    for kind in ("noise", "spaces", "emoji", "digits", "english"):
        yield f"text of {kind}", f'"messages":[{{"role":"user","content":{text(kind)}}}]'
    yield "tools", f'"messages":[{USER}],"tools":[{repeated(TOOL)}]'
    wide = numbered('"p{}":{{}}')
    schema = f'{{"type":"object","properties":{{{wide}}}}}'
    function = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    yield "a tool's wide schema", f'"messages":[{USER}],"tools":[{function}]'
    deep = repeated(DEEP)
    function = f'{{"type":"function","function":{{"name":"f","parameters":{{"anyOf":[{deep}]}}}}}}'
    yield "a tool's deep schema", f'"messages":[{USER}],"tools":[{function}]'
    form = f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
    yield "a wide schema of the answer", f'"messages":[{USER}],"response_format":{form}'
    yield "a choice", f'"messages":[{USER}],"guided_choice":[{repeated(EMPTY)}]'
    for name, element in (
        ("stop", '"s"'),
        ("stop_token_ids", "1"),
        ("bad_words", '"s"'),
        ("allowed_token_ids", "1"),
    ):
        yield name, f'"messages":[{USER}],"{name}":[{repeated(element)}]'
    entries = numbered('"{}":1')
    yield "logit_bias", f'"messages":[{USER}],"logit_bias":{{{entries}}}'
    yield "metadata", f'"messages":[{USER}],"metadata":{{{entries}}}'
    yield "an unknown field", f'"messages":[{USER}],"unknown":[{repeated("[]")}]'
    unknown = numbered('"u{}":1')
    yield "unknown fields", f'"messages":[{USER}],{unknown}'
    yield "a long name", f'"messages":[{USER}],{text("noise")}:1'
    yield "template variables", f'"messages":[{USER}],"chat_template_kwargs":{{"a":[{repeated("{}")}]}}'
    yield "a long model", f'"messages":[{USER}],"model":{text("english")}'
    yield "a long cache salt", f'"messages":[{USER}],"cache_salt":{text("english")}'
    yield "a long user", f'"messages":[{USER}],"user":{text("english")}'
    yield "nesting", f'"messages":[{USER}],"user":{nested(4_000_000)}'


def _completions() -> Iterator[tuple[str, str]]:
    for kind in ("noise", "spaces", "emoji", "digits", "english"):
        yield f"text of {kind}", f'"prompt":{text(kind)}'
    yield "empty prompts", f'"prompt":[{repeated(EMPTY)}]'
    yield "ids", f'"prompt":[{repeated("7")}]'
    yield "lists of ids", f'"prompt":[{repeated("[7]")}]'
    prompt = '"' + "the quick brown zebra " * 1400 + '"'
    yield "256 prompts", f'"prompt":[{repeated(prompt, 256)}]'
    ids = "[" + ",".join(["7"] * 3900) + "]"
    yield "256 lists of ids", f'"prompt":[{repeated(ids, 256)}]'
    ids = "[" + ",".join(["7"] * 130_000) + "]"
    yield "the longest ids", f'"prompt":{ids},"echo":true,"return_token_ids":true'
    yield "the longest ids, often", f'"prompt":{ids},"n":128,"return_token_ids":true'
    long = '"' + "the quick brown zebra " * 12_000 + '"'
    yield "a long echo", f'"prompt":{long},"echo":true'
    yield "a long echo, often", f'"prompt":{long},"echo":true,"n":128'
    yield "nothing", " " * (MAX_BYTES - _ROOM)
    yield "no JSON", "a" * (MAX_BYTES - _ROOM)


def _responses() -> Iterator[tuple[str, str]]:
    message = '{"role":"user","content":"a"}'
    yield "items", f'"input":[{repeated(message)}]'
    yield "as many items as may be", f'"input":[{repeated(message, 10_000)}]'
    call = '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'
    yield "calls", f'"input":[{repeated(call)}]'
    yield "as many calls as may be", f'"input":[{message},{repeated(call, 9_999)}]'
    output = '{"type":"function_call_output","call_id":"c","output":"o"}'
    yield "outputs", f'"input":[{repeated(output)}]'
    reasoning = '{"type":"reasoning"}'
    yield "reasoning", f'"input":[{repeated(reasoning)}]'
    part = '{"type":"input_text","text":""}'
    yield "parts", f'"input":[{{"role":"user","content":[{repeated(part)}]}}]'
    wrong = '{"role":"wrong","content":"a"}'
    yield "an error behind many items", f'"input":[{repeated(message, 9_999)},{wrong}]'
    yield "text", f'"input":{text("english")}'
    yield "instructions", f'"input":"a","instructions":{text("english")}'
    longest = '"' + "the quick brown zebra " * 12_000 + '"'
    yield "instructions that fit", f'"input":"a","stream":true,"instructions":{longest}'
    entries = numbered('"{}":"v"')
    yield "metadata", f'"input":"a","metadata":{{{entries}}}'
    logprobs = '"message.output_text.logprobs"'
    yield "include", f'"input":"a","include":[{repeated(logprobs)}]'
    tool = '{"type":"function","name":"f"}'
    yield "tools", f'"input":"a","tools":[{repeated(tool)}]'


def _messages() -> Iterator[tuple[str, str]]:
    last = '{"role":"user","content":"a"}'
    turn = '{"role":"user","content":"a"}'
    yield "turns", f'"messages":[{repeated(turn)}]'
    yield "as many turns as may be", f'"messages":[{repeated(turn, 10_000)}]'
    for name, block in (
        ("thoughts", '{"type":"thinking","thinking":"t"}'),
        ("calls", '{"type":"tool_use","id":"i","name":"f","input":{}}'),
        ("texts", '{"type":"text","text":"a"}'),
    ):
        yield name, f'"messages":[{{"role":"assistant","content":[{repeated(block)}]}},{last}]'
        yield (
            f"as many {name} as may be",
            f'"messages":[{{"role":"assistant","content":[{repeated(block, 9_999)}]}},{last}]',
        )
    result = '{"type":"tool_result","tool_use_id":"i","content":"r"}'
    yield "results", f'"messages":[{{"role":"user","content":[{repeated(result)}]}}]'
    yield "as many results as may be", f'"messages":[{{"role":"user","content":[{repeated(result, 9_999)}]}}]'
    long = '{"type":"thinking","thinking":"%s"}' % ("t" * 780)
    yield "long thoughts", f'"messages":[{{"role":"assistant","content":[{repeated(long, 9_999)}]}},{last}]'
    text_block = '{"type":"text","text":"s"}'
    yield "system", f'"messages":[{last}],"system":[{repeated(text_block)}]'
    wrong = '{"role":"user","content":[{"type":"image"}]}'
    yield "an error behind many turns", f'"messages":[{repeated(turn, 9_999)},{wrong}]'
    yield "text", f'"messages":[{{"role":"user","content":{text("noise")}}}]'
    yield "stop_sequences", f'"messages":[{last}],"stop_sequences":[{repeated(QUOTED)}]'
    edit = '{"type":"e","keep":"all"}'
    yield "edits", f'"messages":[{last}],"context_management":{{"edits":[{repeated(edit)}]}}'


def _tokenize() -> Iterator[tuple[str, str]]:
    for kind in ("noise", "emoji", "english"):
        yield f"text of {kind}", f'"prompt":{text(kind)}'
    longest = text("noise")[: 1024 * 1024 + 1] + '"'
    yield "the longest text", f'"prompt":{longest},"return_token_strs":true'
    yield "messages", f'"messages":[{repeated(USER)}]'


def _detokenize() -> Iterator[tuple[str, str]]:
    yield "ids", f'"tokens":[{repeated("7")}]'
    yield "as many ids as may be", f'"tokens":[{repeated("7", 1024 * 1024)}]'


def _count() -> Iterator[tuple[str, str]]:
    for kind in ("noise", "english"):
        yield f"text of {kind}", f'"messages":[{{"role":"user","content":{text(kind)}}}]'
    yield "turns", f'"messages":[{repeated(USER)}]'


ENDPOINTS: Mapping[str, Callable[[], Iterator[tuple[str, str]]]] = MappingProxyType(
    {
        "/v1/chat/completions": _chats,
        "/v1/completions": _completions,
        "/v1/responses": _responses,
        "/v1/messages": _messages,
        "/v1/messages/count_tokens": _count,
        "/tokenize": _tokenize,
        "/detokenize": _detokenize,
    }
)


_SHORT: Mapping[str, str] = MappingProxyType(
    {
        "/v1/chat/completions": ',"max_tokens":2',
        "/v1/completions": ',"max_tokens":2',
        "/v1/responses": ',"max_output_tokens":2',
        "/v1/messages": ',"max_tokens":2',
    }
)
"""What is measured is how a body is read, not how it is answered."""


def bodies(endpoint: str) -> Iterator[tuple[str, bytes]]:
    """Name → body, for one endpoint."""
    for name, fields in ENDPOINTS[endpoint]():
        yield name, f"{{{fields}{_SHORT.get(endpoint, '')}}}".encode()
