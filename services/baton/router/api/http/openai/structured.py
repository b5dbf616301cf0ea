"""The fields of HTTP requests that ask for a form of the answer: OpenAI's, vLLM's, and vLLM's older ones."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from baton.core.sampling_params import SamplingFields
from baton.core.structured_output import StructuredOutput
from baton.request.beams import check_alone
from baton.request.structured import Schema, StructuredOutputs, form_of, forms, schema_text
from baton.router.api.errors import invalid, shown


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of a ``response_format``. It is always followed, ``strict`` or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's field for the form of the answer."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredFields(SamplingFields, kw_only=True):
    """All fields that ask for a form of the answer; a request may have one of them."""

    response_format: (
        Annotated[ResponseFormat, Meta(description="text, json_object or json_schema.")] | None
    ) = None
    structured_outputs: (
        Annotated[StructuredOutputs, Meta(description="One of json, json_object, regex, choice, grammar.")]
        | None
    ) = None
    guided_json: Annotated[Schema, Meta(description="Older name of structured_outputs.json.")] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class Form(NamedTuple):
    """The form that a request asks for, and the field that asks for it."""

    param: str
    output: StructuredOutput


def form_asked(fields: StructuredFields) -> Form | None:
    """Return the form that a request asks for, not checked yet. Raises RequestError, which names the field,
    if there are several, or if there is a beam search."""
    found = _asked(fields)
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(found)
        raise invalid(list(found)[1], f"{names} are given, but an answer can have only one form.")
    [(param, output)] = found.items()
    if fields.use_beam_search:
        check_alone({param: output.kind})
    return Form(param, output)


def _asked(fields: StructuredFields) -> dict[str, StructuredOutput]:
    found = {}
    if fields.response_format is not None:
        output = _response_format(fields.response_format)
        if output is not None:
            found["response_format"] = output
    if fields.structured_outputs is not None:
        found["structured_outputs"] = form_of(fields.structured_outputs)
    older = StructuredOutputs(
        json=fields.guided_json,
        json_object=fields.guided_json_object,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )
    found.update({f"guided_{name}": output for name, output in forms(older).items()})
    return found


def _response_format(asked: ResponseFormat) -> StructuredOutput | None:
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise invalid(
            "response_format.json_schema", "response_format.json_schema needs the type json_schema."
        )
    match asked.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutput("json_object")
        case "json_schema":
            schema = None if asked.json_schema is None else asked.json_schema.schema
            if schema is None:
                param = "response_format.json_schema.schema"
                raise invalid(param, f"{param} is required.", "missing_required_parameter")
            return StructuredOutput("json_schema", schema_text(schema))
    raise invalid(
        "response_format.type",
        f"response_format.type must be text, json_object or json_schema, not {shown(asked.type)}.",
    )
