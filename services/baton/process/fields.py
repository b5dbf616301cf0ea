"""An option stands once: on the field of the configuration that it belongs to.

The field has the type and the default; an `Option` in its annotation has the rest. What the command line
offers, what a configuration refuses, and what a child process is called with derive from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from functools import cache, wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from baton.process.options import check_choice, check_range, flag

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Fields = ParamSpec("_Fields")
_Config = TypeVar("_Config")
_Self = TypeVar("_Self")


@dataclass(frozen=True, slots=True)
class Option:
    """What an option says besides the type and the default of its field."""

    help: str
    panel: str | None = None
    """The heading that help lists it under; None: with the command's own."""
    _: KW_ONLY
    least: float | None = None
    most: float | None = None
    """Bounds of a number. ``most`` needs a ``least``."""
    choices: tuple[str, ...] = ()
    """The only values, where the field's type is no Literal."""
    check: Callable[[str, str], None] | None = None
    """Raises ConfigError for a text that cannot work; is called with the option's name and the text."""
    flags: str | None = None
    """How it is spelled, where that is not as the field is: ``--worker``, ``--allow/--no-allow``."""
    metavar: str | None = None
    env: str | None = None
    """The environment variable that it is read from, too."""
    parse: Callable[[str], int] | None = None
    """Reads what is typed; raises ValueError."""
    show_default: bool = True
    secret: bool = False
    """Whether the value is a secret, never an argument of a child process: every process list would show
    it."""


@dataclass(frozen=True, slots=True)
class Before:
    """Has help list an option in front of another: fields of a base class would come first."""

    field: str


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """An option, and the field that declares it."""

    field: str
    type: object
    """Without its annotation."""
    default: object
    """``dataclasses.MISSING``: it must be given."""
    option: Option
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        """What errors call it: how it is spelled, with underscores."""
        if self.option.flags is None:
            return self.field
        return self.option.flags.partition("/")[0].removeprefix("--").replace("-", "_")

    @property
    def flags(self) -> str | None:
        """How it is spelled; None: as its field. Something that is off can only be switched on."""
        if self.option.flags is None and self.type is bool and not self.default:
            return flag(self.field)
        return self.option.flags

    @property
    def is_whole(self) -> bool:
        """Whether its value is an int."""
        return int in (self.type, *get_args(self.type))

    @property
    def may_be_none(self) -> bool:
        """Whether its value may be left open."""
        return type(None) in get_args(self.type)

    @property
    def allowed(self) -> str:
        """The values that it may have, for a caller from Python."""
        if self.choices:
            return ", ".join(self.choices)
        bounds = f"at least {self.option.least}"
        if self.option.most is not None:
            bounds += f", at most {self.option.most}"
        return f"a whole number of {bounds}" if self.is_whole else bounds

    def allows(self, value: object) -> bool:
        """Whether ``value`` is among its choices, and within its bounds."""
        if self.choices:
            return value in self.choices
        if self.option.least is None:
            return True
        if not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return value >= self.option.least and (self.option.most is None or value <= self.option.most)

    def check(self, value: object) -> None:
        """Raise ConfigError, which names the option as it is typed, for a value that cannot work."""
        if self.choices:
            check_choice(self.name, str(value), self.choices)
        elif self.option.least is not None and isinstance(value, int | float):
            check_range(self.name, value, self.option.least, self.option.most)
        if self.option.check is not None:
            self.option.check(self.name, str(value))

    def to_argv(self, value: object) -> list[str]:
        """The arguments that give it ``value``."""
        if isinstance(value, tuple):
            return [part for each in value for part in (flag(self.name), each)]
        if isinstance(value, bool):
            return [flag(self.name) if value else flag("no_" + self.name)]
        return [flag(self.name), str(value)]


@cache
def options_of(config: type[DataclassInstance]) -> tuple[DeclaredOption, ...]:
    """The options of a configuration, in the order in which help lists them."""
    found: list[DeclaredOption] = []
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, *said = get_args(hint)
        options = [one for one in said if isinstance(one, Option)]
        if not options:
            continue
        choices = get_args(kind) if get_origin(kind) is Literal else options[0].choices
        declared = DeclaredOption(field.name, kind, field.default, options[0], choices)
        behind = [one.field for one in said if isinstance(one, Before)]
        at = [one.field for one in found].index(behind[0]) if behind else len(found)
        found.insert(at, declared)
    return tuple(found)


def check_options(config: DataclassInstance) -> None:
    """Raise ConfigError for the first option whose value cannot work by itself. What options must satisfy
    together is for the configuration to check."""
    for declared, value in _given(config):
        declared.check(value)


def check_arguments(config: DataclassInstance) -> None:
    """Check as ``check_options`` does, for a caller from Python: ValueError names the field, its value and
    what is allowed."""
    for declared, value in _given(config):
        if not declared.allows(value):
            raise ValueError(f"{declared.field} is {value!r}; allowed: {declared.allowed}")


def to_argv(config: DataclassInstance) -> list[str]:
    """The arguments that make ``config`` again: the options that differ from their defaults. Fields that are
    no options are left out, and so are secrets."""
    argv: list[str] = []
    for declared, value in _given(config):
        if value != declared.default and not declared.option.secret:
            argv += declared.to_argv(value)
    return argv


def values_of(config: DataclassInstance, kind: type[DataclassInstance]) -> dict[str, Any]:
    """What ``config`` has in the fields of ``kind``, which it inherits from, by their names."""
    return {field.name: getattr(config, field.name) for field in fields(kind)}


def arguments_from(
    config: Callable[_Fields, _Config],
) -> Callable[[Callable[[_Self, _Config], None]], Callable[Concatenate[_Self, _Fields], None]]:
    """Have ``__init__`` take the fields of ``config`` as its arguments, and be given the configuration."""

    def decorate(init: Callable[[_Self, _Config], None]) -> Callable[Concatenate[_Self, _Fields], None]:
        @wraps(init)
        def taking_fields(self: _Self, /, *args: _Fields.args, **kwargs: _Fields.kwargs) -> None:
            init(self, config(*args, **kwargs))

        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        types = get_type_hints(config)
        parameters = [
            one.replace(annotation=types[name]) for name, one in inspect.signature(config).parameters.items()
        ]
        taking_fields.__signature__ = inspect.Signature([me, *parameters])  # type: ignore[attr-defined]
        return taking_fields

    return decorate


def _given(config: DataclassInstance) -> Iterator[tuple[DeclaredOption, object]]:
    """The options that have a value. None is one where the field's type does not have it: it is refused."""
    for declared in options_of(type(config)):
        value = getattr(config, declared.field)
        if value is not None or not declared.may_be_none:
            yield declared, value
