"""The files that lie beside ``tokenizer.json``: special tokens, the first token, the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from baton.text.errors import TokenizerError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_CONFIG_BYTES = 64 * 1024 * 1024

FOR_TOOLS = "tool_use"
"""What Hugging Face calls the template for chats with tools."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files of a model directory say, before any of it is interpreted."""

    tokenizer_json: Path
    special: dict[str, str]
    add_bos: bool | None
    chat_template: str | None
    tool_template: str | None
    """The template of chats with tools, where that is another one."""


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read the tokenizer's files in ``directory``.

    Only ``tokenizer.json`` must be there. Raises TokenizerError, in one line, for a missing or broken file.
    """
    tokenizer_json = directory / "tokenizer.json"
    if not directory.is_dir():
        raise TokenizerError(f"{directory} is not a directory")
    if not tokenizer_json.is_file():
        raise TokenizerError(f"{directory} has no tokenizer.json")
    config = _read_object(directory / "tokenizer_config.json")
    special_map = _read_object(directory / "special_tokens_map.json")
    add_bos = config.get("add_bos_token")
    chat_template, tool_template = _chat_templates(directory, config)
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        special=_special_names(special_map) | _special_names(config),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        chat_template=chat_template,
        tool_template=tool_template,
    )


def _read_object(path: Path) -> dict[str, Json]:
    """The JSON object in ``path``; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise TokenizerError(f"{path} is over {MAX_CONFIG_BYTES} bytes")
        content: Json = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return content


def _special_names(source: dict[str, Json]) -> dict[str, str]:
    """The special tokens' texts by name. A token is a string, or an object with its ``content``."""
    names: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = source.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[name] = value
    return names


def _chat_templates(directory: Path, config: dict[str, Json]) -> tuple[str | None, str | None]:
    """The usual one and that for tools: the files when there are any, else the configuration's, which is a
    string, or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        tools = directory / "additional_chat_templates" / f"{FOR_TOOLS}.jinja"
        return _text(path), _text(tools) if tools.is_file() else None
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value, None
    named = _named_templates(value)
    if not named:
        raise TokenizerError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be a string or a list of "
            "{name, template} objects"
        )
    return named.get("default"), named.get(FOR_TOOLS)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _named_templates(value: Json) -> dict[str, str]:
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else []:
        if isinstance(entry, dict):
            name, template = entry.get("name"), entry.get("template")
            if isinstance(name, str) and isinstance(template, str):
                named[name] = template
    return named
