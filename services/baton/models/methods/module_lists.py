"""The ways in which configs list modules. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from baton.models.json_fields import Fields
from baton.models.methods.fp8 import strings
from baton.models.quantization.weight_spec import ModuleNames


def containing(fields: Fields, name: str) -> ModuleNames:
    """The modules whose names contain one of a list of strings, as AWQ means them."""
    listed = "|".join(map(re.escape, strings(fields, name)))
    return ModuleNames(pattern=f".*(?:{listed})" if listed else "")


def wildcards(fields: Fields, name: str) -> ModuleNames:
    """The modules that a list names with * for any characters, and those below them, as ModelOpt means
    them."""
    return below(re.escape(item).replace(r"\*", ".*") for item in strings(fields, name))


def below(patterns: Iterable[str]) -> ModuleNames:
    """The modules whose whole names match one of these regular expressions, and those below them."""
    listed = "|".join(patterns)
    return ModuleNames(pattern=rf"(?:{listed})(?:\..*)?$" if listed else "")


def from_start(fields: Fields, name: str) -> ModuleNames:
    """The modules that a list of regular expressions matches from their start to the end of a part, and those
    whose names end with an item, as transformers means them."""
    items = [pattern(fields, name, item) for item in strings(fields, name)]
    starts = [rf"(?:{item})(?:(?<=\.)|\.|$)" for item in items]
    ends = [f".*{re.escape(item)}$" for item in items]
    return ModuleNames(pattern="|".join(starts + ends))


def pattern(fields: Fields, name: str, item: str) -> str:
    """The regular expression ``item`` of the field. ModelError if it is none."""
    try:
        re.compile(item)
    except re.error as error:
        raise fields.error(name, f"regular expressions ({item} is none: {error})") from None
    return item
