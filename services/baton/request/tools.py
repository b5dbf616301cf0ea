"""The tools of a chat: their checks, and their form for the chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.request.errors import invalid, shown
from baton.request.sizes import check_json_bytes
from baton.text.config import Json

NAME = re.compile(r"[A-Za-z0-9_-]+")
NAME_CHARS = 64
"""Most characters of a function's name in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of tools. Each bounds memory or work of one request."""

    max_tools: int = 128
    max_tools_bytes: int = 256 * 1024
    """Most bytes of all definitions together, as JSON."""


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: Annotated[str, Meta(description="1 to 64 of A-Z, a-z, 0-9, _ and -.")]
    description: str | None = None
    parameters: (
        Annotated[dict[str, object], Meta(description="JSON schema of an object: its arguments.")] | None
    ) = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """One tool: always a function."""

    type: str
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """The choice of one function."""

    type: str
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a chat may call, and whether it must."""

    definitions: Sequence[dict[str, Json]]
    """Definitions of all tools given, whichever is chosen, as chat templates take them."""
    names: frozenset[str]
    """Names of the functions that may be called."""
    mode: Literal["auto", "required", "named"]
    parallel: bool
    """Whether an answer may hold several calls."""


def tool_use(
    tools: Sequence[Tool] | None,
    choice: str | NamedTool | None,
    parallel: bool | None,
    limits: ToolLimits,
    name_chars: int = NAME_CHARS,
) -> ToolUse | None:
    """Check the fields of a request; return None if nothing may be called. ``name_chars``: most characters of
    a name.

    Raises RequestError that names the field, its value and what is allowed.
    """
    definitions = definitions_of(tools or [], limits, name_chars)
    names = frozenset(tool.function.name for tool in tools or [])
    mode, chosen = _choice(choice, names)
    if mode == "none" or (not names and mode == "auto"):
        return None
    if not names:
        raise invalid("tool_choice", "tool_choice is only allowed with tools.")
    if mode == "named":
        return ToolUse(definitions, frozenset({chosen}), mode, parallel=False)
    return ToolUse(definitions, names, mode, parallel=parallel is not False)


def _choice(
    choice: str | NamedTool | None, names: frozenset[str]
) -> tuple[Literal["none", "auto", "required", "named"], str]:
    if isinstance(choice, NamedTool):
        if choice.type != "function":
            raise invalid(
                "tool_choice.type", f'tool_choice.type must be "function", not {shown(choice.type)}.'
            )
        if names and choice.function.name not in names:
            raise invalid(
                "tool_choice.function.name",
                f"tool_choice names the function {shown(choice.function.name)}, which is not among tools.",
            )
        return "named", choice.function.name
    match choice:
        case None | "auto":
            return "auto", ""
        case "none":
            return "none", ""
        case "required":
            return "required", ""
    raise invalid(
        "tool_choice",
        f'tool_choice must be "none", "auto", "required" or the choice of a function, not {shown(choice)}.',
    )


def definitions_of(
    tools: Sequence[Tool], limits: ToolLimits, name_chars: int = NAME_CHARS
) -> list[dict[str, Json]]:
    """Return the tools as chat templates take them: with what is given of each, and nothing else. Raises
    RequestError for a tool that cannot be used."""
    if len(tools) > limits.max_tools:
        raise invalid("tools", f"tools has {len(tools)} entries; at most {limits.max_tools} are allowed.")
    seen: set[str] = set()
    definitions = []
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        name = tool.function.name
        if tool.type != "function":
            raise invalid(f"{at}.type", f'{at}.type must be "function", not {shown(tool.type)}.')
        if not NAME.fullmatch(name) or len(name) > name_chars:
            raise invalid(
                f"{at}.function.name",
                f"{at}.function.name must be 1 to {name_chars} of A-Z, a-z, 0-9, _ and -, not {shown(name)}.",
            )
        if name in seen:
            raise invalid(f"{at}.function.name", f"{at}.function.name is {shown(name)} a second time.")
        seen.add(name)
        definitions.append(_definition(tool.function, at))
    check_json_bytes("tools", definitions, limits.max_tools_bytes)
    return definitions


def _definition(function: Function, at: str) -> dict[str, Json]:
    where = f"{at}.function.parameters"
    # The parameters are decoded from JSON, which msgspec's types cannot say.
    parameters: dict[str, Json] | None = function.parameters  # type: ignore[assignment]
    kind = "object" if parameters is None else parameters.get("type", "object")
    if kind != "object":
        raise invalid(where, f"{where} must be the schema of an object, not of type {shown(kind)}.")
    given = {
        "name": function.name,
        "description": function.description,
        "parameters": parameters,
        "strict": function.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in given.items() if value is not None},
    }
