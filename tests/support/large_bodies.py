"""Bodies of nearly the largest size, each of one element over and over: all that a router has to read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

MAX_BYTES = 8 * 1024 * 1024


class Filler:
    """What fills a body of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self._room = size - size // 64
        """The rest is for what is around the elements."""

    def repeated(self, element: str, most: int | None = None) -> str:
        """``element``, JSON, so often that a body is nearly full, or ``most`` times."""
        count = self._room // (len(element.encode()) + 1)
        return ",".join([element] * (count if most is None else min(most, count)))

    def numbered(self, form: str) -> str:
        """Likewise entries that differ: ``form`` has a place for a number."""
        count = self._room // (len(form.format(10**6)) + 1)
        return ",".join([form.format(number) for number in range(10**6, 10**6 + count)])

    def text(self, kind: str, most: int | None = None) -> str:
        """A text of a kind, as JSON, that fills a body or has ``most`` bytes."""
        size = self._room if most is None else min(most, self._room)
        if kind == "noise":
            alphabet = "".join(chr(code) for code in range(33, 127) if chr(code) not in '"\\')
            return f'"{"".join(random.Random(0).choices(alphabet, k=size))}"'
        element = {"spaces": " ", "emoji": "🙂", "digits": "7", "english": "the quick brown zebra "}[kind]
        return f'"{element * (size // len(element.encode()))}"'

    def nesting(self) -> str:
        return "[" * (self._room // 2) + "]" * (self._room // 2)


QUOTED = '"s"'
EMPTY = '""'
LONG = "a" * 780
USER = '{"role":"user","content":"a"}'
TOOL = '{"type":"function","function":{"name":"f","parameters":{}}}'
CALL = '{"id":"i","type":"function","function":{"name":"f","arguments":"{}"}}'
DEEP = '{"a":' * 200 + "1" + "}" * 200


def _chats(fill: Filler) -> Iterator[tuple[str, str]]:
    yield "messages", f'"messages":[{fill.repeated(USER)}]'
    for role in ("user", "assistant", "system", "developer", "tool"):
        most = fill.repeated(f'{{"role":"{role}","content":"{LONG}"}}', 10_000)
        yield f"as many messages of {role} as may be", f'"messages":[{most}]'
    yield "empty messages", '"messages":[' + fill.repeated("{}") + "]"
    parts = fill.repeated('{"type":"text","text":""}')
    yield "parts", f'"messages":[{{"role":"user","content":[{parts}]}}]'
    parts = fill.repeated(f'{{"type":"text","text":"{LONG}"}}', 10_000)
    yield "as many parts as may be", f'"messages":[{{"role":"user","content":[{parts}]}}]'
    yield "calls", f'"messages":[{{"role":"assistant","tool_calls":[{fill.repeated(CALL)}]}}]'
    yield (
        "as many calls as may be",
        f'"messages":[{{"role":"assistant","tool_calls":[{fill.repeated(CALL, 10_000)}]}}]',
    )
    arguments = json.dumps('{"a":[' + fill.repeated("[]", 2_000_000) + "]}")
    call = f'{{"id":"i","function":{{"name":"f","arguments":{arguments}}}}}'
    yield "a call's arguments", f'"messages":[{{"role":"assistant","tool_calls":[{call}]}}]'
    for kind in ("noise", "spaces", "emoji", "digits", "english"):
        yield f"text of {kind}", f'"messages":[{{"role":"user","content":{fill.text(kind)}}}]'
    yield "tools", f'"messages":[{USER}],"tools":[{fill.repeated(TOOL)}]'
    wide = fill.numbered('"p{}":{{}}')
    schema = f'{{"type":"object","properties":{{{wide}}}}}'
    function = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    yield "a tool's wide schema", f'"messages":[{USER}],"tools":[{function}]'
    deep = fill.repeated(DEEP)
    function = f'{{"type":"function","function":{{"name":"f","parameters":{{"anyOf":[{deep}]}}}}}}'
    yield "a tool's deep schema", f'"messages":[{USER}],"tools":[{function}]'
    form = f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
    yield "a wide schema of the answer", f'"messages":[{USER}],"response_format":{form}'
    yield "a choice", f'"messages":[{USER}],"guided_choice":[{fill.repeated(EMPTY)}]'
    for name, element in (
        ("stop", '"s"'),
        ("stop_token_ids", "1"),
        ("bad_words", '"s"'),
        ("allowed_token_ids", "1"),
    ):
        yield name, f'"messages":[{USER}],"{name}":[{fill.repeated(element)}]'
    entries = fill.numbered('"{}":1')
    yield "logit_bias", f'"messages":[{USER}],"logit_bias":{{{entries}}}'
    yield "metadata", f'"messages":[{USER}],"metadata":{{{entries}}}'
    yield "an unknown field", f'"messages":[{USER}],"unknown":[{fill.repeated("[]")}]'
    unknown = fill.numbered('"u{}":1')
    yield "unknown fields", f'"messages":[{USER}],{unknown}'
    yield "a long name", f'"messages":[{USER}],{fill.text("noise")}:1'
    yield "template variables", f'"messages":[{USER}],"chat_template_kwargs":{{"a":[{fill.repeated("{}")}]}}'
    yield "a long model", f'"messages":[{USER}],"model":{fill.text("english")}'
    yield "a long cache salt", f'"messages":[{USER}],"cache_salt":{fill.text("english")}'
    yield "a long user", f'"messages":[{USER}],"user":{fill.text("english")}'
    yield "nesting", f'"messages":[{USER}],"user":{fill.nesting()}'


def _completions(fill: Filler) -> Iterator[tuple[str, str]]:
    for kind in ("noise", "spaces", "emoji", "digits", "english"):
        yield f"text of {kind}", f'"prompt":{fill.text(kind)}'
    yield "empty prompts", f'"prompt":[{fill.repeated(EMPTY)}]'
    yield "ids", f'"prompt":[{fill.repeated("7")}]'
    yield "lists of ids", f'"prompt":[{fill.repeated("[7]")}]'
    prompt = fill.text("english", 30_000)
    yield "256 prompts", f'"prompt":[{fill.repeated(prompt, 256)}]'
    ids = "[" + ",".join(["7"] * 3900) + "]"
    yield "256 lists of ids", f'"prompt":[{fill.repeated(ids, 256)}]'
    ids = "[" + ",".join(["7"] * 130_000) + "]"
    yield "the longest ids", f'"prompt":{ids},"echo":true,"return_token_ids":true'
    yield "the longest ids, often", f'"prompt":{ids},"n":128,"return_token_ids":true'
    long = fill.text("english", 260_000)
    yield "a long echo", f'"prompt":{long},"echo":true'
    yield "a long echo, often", f'"prompt":{long},"echo":true,"n":128'
    yield "nothing", fill.text("spaces")[1:-1]
    yield "no JSON", fill.text("digits")[1:-1] + "a"


def _responses(fill: Filler) -> Iterator[tuple[str, str]]:
    message = '{"role":"user","content":"a"}'
    yield "items", f'"input":[{fill.repeated(message)}]'
    yield "as many items as may be", f'"input":[{fill.repeated(message, 10_000)}]'
    call = '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'
    yield "calls", f'"input":[{fill.repeated(call)}]'
    yield "as many calls as may be", f'"input":[{message},{fill.repeated(call, 9_999)}]'
    output = '{"type":"function_call_output","call_id":"c","output":"o"}'
    yield "outputs", f'"input":[{fill.repeated(output)}]'
    reasoning = '{"type":"reasoning"}'
    yield "reasoning", f'"input":[{fill.repeated(reasoning)}]'
    part = '{"type":"input_text","text":""}'
    yield "parts", f'"input":[{{"role":"user","content":[{fill.repeated(part)}]}}]'
    wrong = '{"role":"wrong","content":"a"}'
    yield "an error behind many items", f'"input":[{fill.repeated(message, 9_999)},{wrong}]'
    yield "text", f'"input":{fill.text("english")}'
    yield "instructions", f'"input":"a","instructions":{fill.text("english")}'
    longest = fill.text("english", 260_000)
    yield "instructions that fit", f'"input":"a","stream":true,"instructions":{longest}'
    entries = fill.numbered('"{}":"v"')
    yield "metadata", f'"input":"a","metadata":{{{entries}}}'
    logprobs = '"message.output_text.logprobs"'
    yield "include", f'"input":"a","include":[{fill.repeated(logprobs)}]'
    tool = '{"type":"function","name":"f"}'
    yield "tools", f'"input":"a","tools":[{fill.repeated(tool)}]'


def _messages(fill: Filler) -> Iterator[tuple[str, str]]:
    last = '{"role":"user","content":"a"}'
    turn = '{"role":"user","content":"a"}'
    yield "turns", f'"messages":[{fill.repeated(turn)}]'
    yield "as many turns as may be", f'"messages":[{fill.repeated(turn, 10_000)}]'
    for name, block in (
        ("thoughts", '{"type":"thinking","thinking":"t"}'),
        ("calls", '{"type":"tool_use","id":"i","name":"f","input":{}}'),
        ("texts", '{"type":"text","text":"a"}'),
    ):
        yield name, f'"messages":[{{"role":"assistant","content":[{fill.repeated(block)}]}},{last}]'
        yield (
            f"as many {name} as may be",
            f'"messages":[{{"role":"assistant","content":[{fill.repeated(block, 9_999)}]}},{last}]',
        )
    result = '{"type":"tool_result","tool_use_id":"i","content":"r"}'
    yield "results", f'"messages":[{{"role":"user","content":[{fill.repeated(result)}]}}]'
    yield (
        "as many results as may be",
        f'"messages":[{{"role":"user","content":[{fill.repeated(result, 9_999)}]}}]',
    )
    long = f'{{"type":"thinking","thinking":"{LONG}"}}'
    yield (
        "long thoughts",
        f'"messages":[{{"role":"assistant","content":[{fill.repeated(long, 9_999)}]}},{last}]',
    )
    text_block = '{"type":"text","text":"s"}'
    yield "system", f'"messages":[{last}],"system":[{fill.repeated(text_block)}]'
    wrong = '{"role":"user","content":[{"type":"image"}]}'
    yield "an error behind many turns", f'"messages":[{fill.repeated(turn, 9_999)},{wrong}]'
    yield "text", f'"messages":[{{"role":"user","content":{fill.text("noise")}}}]'
    yield "stop_sequences", f'"messages":[{last}],"stop_sequences":[{fill.repeated(QUOTED)}]'
    edit = '{"type":"e","keep":"all"}'
    yield "edits", f'"messages":[{last}],"context_management":{{"edits":[{fill.repeated(edit)}]}}'


def _tokenize(fill: Filler) -> Iterator[tuple[str, str]]:
    for kind in ("noise", "emoji", "english"):
        yield f"text of {kind}", f'"prompt":{fill.text(kind)}'
    longest = fill.text("noise", 1024 * 1024)
    yield "the longest text", f'"prompt":{longest},"return_token_strs":true'
    yield "messages", f'"messages":[{fill.repeated(USER)}]'


def _detokenize(fill: Filler) -> Iterator[tuple[str, str]]:
    yield "ids", f'"tokens":[{fill.repeated("7")}]'
    yield "as many ids as may be", f'"tokens":[{fill.repeated("7", 1024 * 1024)}]'


def _count(fill: Filler) -> Iterator[tuple[str, str]]:
    for kind in ("noise", "english"):
        yield f"text of {kind}", f'"messages":[{{"role":"user","content":{fill.text(kind)}}}]'
    yield "turns", f'"messages":[{fill.repeated(USER)}]'


ENDPOINTS: Mapping[str, Callable[[Filler], Iterator[tuple[str, str]]]] = MappingProxyType(
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


def bodies(endpoint: str, size: int = MAX_BYTES) -> Iterator[tuple[str, bytes]]:
    """Name → body of about ``size`` bytes at most, for one endpoint."""
    for name, fields in ENDPOINTS[endpoint](Filler(size)):
        yield name, f"{{{fields}{_SHORT.get(endpoint, '')}}}".encode()
