"""The reference of the chart's values: values.yaml has defaults and words, its schema what is allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from scripts.reference.markdown import code, plain, prose, table
from scripts.site.pages import ROOT

CHART = ROOT / "helm/baton"
HEAD = """\
# Values

Every value of the Helm chart. `values.schema.json` refuses what is not here. [Installing](../install.md)
shows them at work, and `helm/baton/examples` has values that fit together.
"""
OPTIONS: Mapping[str, str] = {
    "routerOptions": "`router.options`, for `baton router`",
    "workerOptions": "`workers.options`, and those of `prefill`, `decode` and `both`",
    "plannerOptions": "`planner.options`, for `baton planner`",
}

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart."""

    path: str
    default: str
    """JSON; empty where keys follow below."""
    text: str


def page() -> str:
    """Return the page: a section for each key at the top, then the options of the programs."""
    schema: Schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    sections: dict[str, list[Value]] = {}
    for value in values(schema):
        first = value.path.partition(".")[0]
        sections.setdefault(first, []).append(value)
    parts = [HEAD]
    alone = [entries[0] for entries in sections.values() if len(entries) == 1]
    parts.append("## At the top\n\n" + _table(alone, schema))
    for name, entries in sections.items():
        if len(entries) > 1:
            parts.append(f"## {name}\n\n" + _intro(entries[0]) + _table(entries[1:], schema))
    parts.append("## Options of the programs\n\nThe keys of `options`, which are in [options](options.md).\n")
    for definition, where in OPTIONS.items():
        options = _at(schema, ("$defs", definition, "properties"))
        rows = ([code(name), _allowed(one, schema)] for name, one in options.items())
        parts.append(f"### {where}\n\n" + table(("key", "allowed"), rows))
    return "\n".join(parts).rstrip() + "\n"


def values(schema: Schema) -> Iterator[Value]:
    """Yield the values of values.yaml in their order, maps before what is in them. A map of which the schema
    knows no keys is one value."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _below(root, schema, "", text.splitlines())


def _below(node: yaml.MappingNode, schema: Schema, prefix: str, lines: Sequence[str]) -> Iterator[Value]:
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue  # a role like another one: what differs follows
        path = f"{prefix}{key.value}"
        said = _comment_above(lines, key.start_mark.line)
        has_keys = isinstance(value, yaml.MappingNode) and value.value and not value.flow_style
        if has_keys and "properties" in _schema_of(path, schema):
            merged = any(each.tag == "tag:yaml.org,2002:merge" for each, _ in value.value)
            yield Value(path, "", said or ("As `prefill`, but for what is here." if merged else ""))
            yield from _below(value, schema, f"{path}.", lines)
        else:
            loaded = yaml.SafeLoader("").construct_document(value)
            yield Value(path, json.dumps(loaded, ensure_ascii=False), said)


def _comment_above(lines: Sequence[str], line: int) -> str:
    """Return what the comment in front of a line says, from its ``--`` on where it has one."""
    found: list[str] = []
    while line and lines[line - 1].strip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
    return " ".join(found).partition("-- ")[2] or " ".join(found)


def _intro(value: Value) -> str:
    return prose(value.text) + "\n\n" if value.text else ""


def _table(entries: Sequence[Value], schema: Schema) -> str:
    rows = (
        [code(one.path), code(one.default), _allowed(_schema_of(one.path, schema), schema), plain(one.text)]
        for one in entries
        if one.default or one.text
    )
    return table(("value", "default", "allowed", "meaning"), rows)


def _schema_of(path: str, schema: Schema) -> Schema:
    """Return what the schema says of a value."""
    found: Schema = schema
    for name in path.split("."):
        found = _resolved(_at(_resolved(found, schema), ("properties", name)), schema)
    return found


def _allowed(one: Schema, schema: Schema) -> str:
    """Return what the schema allows, in a few words."""
    match _resolved(one, schema):
        case {"enum": [*choices]}:
            return ", ".join(code(json.dumps(choice)) for choice in choices)
        case {"oneOf": [*either]}:
            return " or ".join(_allowed(each, schema) for each in either)
        case {"type": [*kinds]}:
            return " or ".join({"object": "map"}.get(kind, kind) for kind in kinds)
        case {"type": "array", "items": items}:
            return f"list of {_allowed(items, schema)}"
        case {"type": kind, **more}:
            bounds = [
                f"{word} {more[name]}"
                for name, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
                if name in more
            ]
            return " ".join([{"object": "map"}.get(str(kind), str(kind)), *bounds])
    return "anything"


def _resolved(one: Schema, schema: Schema) -> Schema:
    while isinstance(reference := one.get("$ref"), str):
        one = _at(schema, reference.removeprefix("#/").split("/"))
    return one


def _at(found: Schema, path: Sequence[str]) -> Schema:
    for name in path:
        found = found[name]
    return found
