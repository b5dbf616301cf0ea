"""Checks structured outputs and converts them to llguidance's notation."""

from __future__ import annotations

import msgspec
from llguidance import LLMatcher, grammar_from

from baton.core.structured_output import FORM, StructuredOutput
from baton.grammar.errors import GrammarError
from baton.grammar.limits import JSON_SPACE, MAX_CHOICES, MAX_DEPTH, MAX_SOURCE_BYTES
from baton.text.config import Json


def check_source(output: StructuredOutput) -> None:
    """Check size, depth and well-formed JSON, without compiling. Raises GrammarError."""
    try:
        size = len(output.text.encode()) + len(output.around.encode())
    except UnicodeEncodeError:
        raise GrammarError("it is not valid Unicode") from None
    if size > MAX_SOURCE_BYTES:
        raise GrammarError(f"it has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed")
    if output.around and FORM not in output.around:
        raise GrammarError(f"what is around it has no {FORM}")
    match output.kind:
        case "json_schema":
            _check_schema(_json(output.text))
        case "choice":
            _check_choice(_json(output.text))
        case "regex" | "grammar":
            if not output.text.strip():
                raise GrammarError("it is empty")


def to_llguidance(output: StructuredOutput) -> str:
    """Return the grammar as ``LLMatcher`` takes it, not compiled yet. Raises GrammarError if it cannot be
    converted."""
    form = _form(output)
    if not output.around:
        return form
    # llguidance writes grammars as JSON unless they are in Lark's notation.
    lark = output.kind in ("choice", "grammar")
    [parsed] = [{"lark_grammar": form}] if lark else msgspec.json.decode(form)["grammars"]
    grammars = [{"lark_grammar": output.around}, {**parsed, "name": FORM.removeprefix("@")}]
    return msgspec.json.encode({"grammars": grammars}).decode()


def _form(output: StructuredOutput) -> str:
    match output.kind:
        case "json_object":
            return _json_grammar('{"type": "object"}')
        case "json_schema":
            return _json_grammar(output.text)
        case "regex":
            return LLMatcher.grammar_from_regex(output.text)
        case "choice":
            # One terminal: as a rule, each choice would be a lexeme of its own, and every mask slower.
            options = msgspec.json.decode(output.text, type=list[str])
            quoted = (msgspec.json.encode(option).decode() for option in dict.fromkeys(options))
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))
        case "grammar":
            return grammar_from("grammar", output.text)


def _json_grammar(text: str) -> str:
    schema = _json(text)
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    own = isinstance(options, dict) and "whitespace_flexible" in options
    return LLMatcher.grammar_from_json_schema(
        "{}" if schema is True else text,
        # A pattern would outweigh the schema's own choice.
        defaults={} if own else {"whitespace_pattern": JSON_SPACE},
        # A keyword that is not implemented is refused, whatever the schema's own options say.
        overrides={"lenient": False},
    )


def _json(text: str) -> Json:
    try:
        document: Json = msgspec.json.decode(text)
    except RecursionError:
        raise GrammarError(f"it is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise GrammarError(f"it is not valid JSON: {error}") from None
    return document


def _check_schema(schema: Json) -> None:
    if not isinstance(schema, dict) and schema is not True:
        raise GrammarError("a JSON schema must be an object (or true)")
    layer: list[Json] = [schema]
    for _ in range(MAX_DEPTH):
        layer = [child for value in layer for child in _children(value)]
        if not layer:
            return
    raise GrammarError(f"it is nested deeper than {MAX_DEPTH}")


def _children(value: Json) -> list[Json]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_choice(options: Json) -> None:
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise GrammarError("a choice must be a list of strings")
    if not 1 <= len(options) <= MAX_CHOICES:
        raise GrammarError(f"it has {len(options)} choices; allowed are 1 to {MAX_CHOICES}")
    if "" in options:
        raise GrammarError(f"choice {options.index('')} is empty; each needs at least 1 character")
