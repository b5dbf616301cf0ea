"""Chat templates, which turn messages into one prompt text, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser

from baton.text.config import Json
from baton.text.errors import ChatTemplateError, TextTooLongError
from baton.text.sandbox import SandboxedTemplates

DEFAULT_MAX_PROMPT_CHARS = 16 * 1024 * 1024

_CONTINUED = "<baton-goes-on-here> "
"""Marks the end of a message that is gone on with. The space tells whether the template trims contents."""


class _GenerationTag(Extension):
    """The tag ``{% generation %}``, which marks the assistant's part for training. Serving renders only its
    content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A chat template, with the names that Hugging Face templates expect.

    It is compiled when it is first rendered, or by `compile`: whoever only reads its source runs nothing of
    it. A template that does not compile is reported by `render`, as a request's error: the model still serves
    plain completions.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        max_chars: int = DEFAULT_MAX_PROMPT_CHARS,
    ) -> None:
        """``tool_source`` takes the place of ``source`` in chats with tools; None: ``source`` is for all."""
        self.source = source
        self.tool_source = tool_source or source
        self._for_tools = (
            ChatTemplate(tool_source, special_tokens, max_chars=max_chars) if tool_source else None
        )
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._template: jinja2.Template | None = None
        self._broken: str | None = None

    def compile(self) -> None:
        """Compile the template, if that has not been done."""
        if self._for_tools is not None:
            self._for_tools.compile()
        if self._template is not None or self._broken is not None:
            return
        try:
            self._template = _environment().from_string(self.source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            self._broken = f"the model's chat template does not compile: {error}"

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Json]] | None = None,
        arguments: Mapping[str, Json] | None = None,
    ) -> str:
        """Render the prompt for ``messages``; ``tools`` are functions that the answer may call, ``arguments``
        a request's own template variables. The role developer becomes system for a template that does not
        know it. With ``continue_final_message`` the prompt ends where the last message's content does, as in
        transformers' ``apply_chat_template``.

        Raises ChatTemplateError when the template fails or refuses, or leaves out the content to go on with,
        TextTooLongError when it writes too much, and MemoryError. Its time has no bound here: a service
        renders in a process that has one.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                arguments=arguments,
            )
        if continue_final_message:
            marked = {**messages[-1], "content": f"{messages[-1]['content']}{_CONTINUED}"}
            text = self.render(
                [*messages[:-1], marked], add_generation_prompt=False, tools=tools, arguments=arguments
            )
            return _up_to_mark(text, str(messages[-1]["content"]))
        self.compile()
        if self._template is None:
            raise ChatTemplateError(self._broken or "the model's chat template does not compile")
        variables: dict[str, object] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
            "messages": messages if "developer" in self.source else _without_developer(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            variables["tools"] = tools
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > self._max_chars:
                    raise TextTooLongError(size, self._max_chars)
                pieces.append(piece)
        except (ChatTemplateError, TextTooLongError, MemoryError):
            raise
        except Exception as error:  # a template can raise anything that Python can
            raise ChatTemplateError(
                f"the model's chat template cannot render these messages: {error}"
            ) from error
        return "".join(pieces)


def _up_to_mark(text: str, content: str) -> str:
    """Return ``text`` up to the mark behind ``content``, which must be in it; without white space at its end
    if the template has trimmed the content's."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0 or content.strip() not in text[:at]:
        raise ChatTemplateError(
            "the model's chat template does not write the last message as it is, so it cannot be gone on with"
        )
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


def _without_developer(messages: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """Turn the role developer, OpenAI's newer name, into system: a template without a branch for it would
    leave the messages out. A developer message after a system message is joined to it, since many templates
    take one system message, at the beginning."""
    told: list[Mapping[str, Json]] = []
    contents: list[str] = []
    """The contents of the system message at the end of ``told``; empty if another message is last."""
    for message in messages:
        if message["role"] == "developer" and contents:
            contents.append(str(message["content"]))
            continue
        _join(told, contents)
        told.append({**message, "role": "system"} if message["role"] == "developer" else message)
        contents = [str(message["content"])] if told[-1]["role"] == "system" else []
    _join(told, contents)
    return told


def _join(told: list[Mapping[str, Json]], contents: Sequence[str]) -> None:
    """Give the last message of ``told``, a system message, all its ``contents``. They are joined at once:
    text that grows message by message is copied each time."""
    if len(contents) > 1:
        told[-1] = {**told[-1], "content": "\n\n".join(contents)}


def _environment() -> SandboxedTemplates:
    environment = SandboxedTemplates(["jinja2.ext.loopcontrols", _GenerationTag])
    environment.filters["tojson"] = _to_json
    globals_: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(globals_)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without jinja2's escapes for HTML, which a prompt must not have."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the model's chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
