"""Turns a command line for ``vllm serve`` into one for ``baton serve``. Baton's own options pass as is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.cli.vllm.option import OFF, ON, VllmOption
from baton.cli.vllm.table import BY_NAME
from baton.process.options import ConfigError

_NEGATION = "--no-"


@dataclass(slots=True)
class Translation:
    """What a command line has become."""

    argv: list[str] = field(default_factory=list)
    """Baton's arguments, in the order in which vLLM's were given."""
    different: list[VllmOption] = field(default_factory=list)
    """The options among them that are not quite the same."""


def translate(argv: Sequence[str]) -> Translation:
    """Translate the options of ``argv`` that vLLM has, and leave the others as they are.

    Underscores in names count as dashes, as in vLLM. Raises ConfigError for an option that is refused, and
    for a value that cannot be taken.
    """
    done = Translation()
    rest = list(argv)
    while rest:
        typed = rest.pop(0)
        if typed == "--":
            done.argv += [typed, *rest]
            break
        name, has_value, value = typed.partition("=")
        found = _find(name)
        if found is None:
            done.argv.append(typed)
            continue
        option, key, is_negated = found
        values = [value] if has_value else []
        if option.verdict != "refused":
            values = _values(option, is_negated, values, rest)
        done.argv += option.to_argv(values, key)
        if option.verdict == "different" and option not in done.different:
            done.different.append(option)
    return done


def _find(typed: str) -> tuple[VllmOption, str, bool] | None:
    """The option, the key behind a dot, and whether its ``--no-`` form was typed. None for Baton's own."""
    if not typed.startswith("-"):
        return None
    name, _, key = typed.partition(".")
    name = name.replace("_", "-")
    if name in BY_NAME:
        return BY_NAME[name], key, False
    positive = "--" + name.removeprefix(_NEGATION)
    if name.startswith(_NEGATION) and positive in BY_NAME:
        return BY_NAME[positive], key, True
    return None


def _values(option: VllmOption, is_negated: bool, attached: list[str], rest: list[str]) -> list[str]:
    """The values of ``option``: the one attached by ``=``, or those that come next, which leave ``rest``."""
    if option.arity == "none":
        if attached and attached[0] not in option.choices:
            raise ConfigError(option.name.lstrip("-"), f"takes no value, and was given {attached[0]!r}")
        if not attached and rest and rest[0] in option.choices:
            attached = [rest.pop(0)]
        return attached or [OFF if is_negated else ON]
    values = attached
    while rest and not _is_option(rest[0]) and (option.arity == "several" or not values):
        values.append(rest.pop(0))
    if not values:
        raise ConfigError(option.name.lstrip("-"), "needs a value")
    return values


def _is_option(text: str) -> bool:
    """Whether an argument is no value: it begins with a dash, and is no negative number."""
    return text.startswith("-") and not text[1:].replace(".", "", 1).isdigit()
