"""Commands whose options are the fields of configurations: typer's side of `baton.process.fields`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache, wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar, get_origin

import typer

from baton.cli.completion import Completion, among, model_names
from baton.process.fields import DeclaredOption, options_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Result = TypeVar("_Result")


class Source(Protocol):
    """Somewhere that options of a command come from."""

    def parameters(self) -> Iterator[inspect.Parameter]:
        """A parameter of the command for each, in the order in which help lists them."""


@dataclass(frozen=True, slots=True)
class OptionsOf:
    """The options of a configuration that a command takes: all, or ``only`` some, in that order; of one
    ``panel`` alone; ``without`` some.

    ``help`` and ``defaults`` replace what the configuration says, by the name of the field.
    """

    config: type[DataclassInstance]
    only: Sequence[str] = ()
    panel: str | None = None
    without: Collection[str] = ()
    help: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)

    def parameters(self) -> Iterator[inspect.Parameter]:
        """A parameter of the command for each, in the order in which help lists them."""
        known = _parameters_of(self.config)
        for name in self.only or known:
            declared, parameter = known[name]
            if name in self.without or self.panel not in (None, declared.option.panel):
                continue
            if name in self.help or name in self.defaults:
                text = self.help.get(name, declared.option.help)
                parameter = _parameter(declared, text, self.defaults.get(name, declared.default))
            yield parameter


@dataclass(frozen=True, slots=True)
class Given:
    """What a command was given for the fields of configurations."""

    values: Mapping[str, object]

    def fields(self, config: type[DataclassInstance], *but: str) -> dict[str, Any]:
        """The values for the options of ``config``, by the names of its fields. None, and a list of nothing,
        leave the field its default."""
        return {
            declared.field: tuple(value) if isinstance(value, list) else value
            for declared in options_of(config)
            if declared.field not in but and (value := self.values.get(declared.field)) not in (None, [])
        }


def takes(
    *sources: Source | str,
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Make a function a command that takes the options of configurations besides those of its own.

    ``sources`` are in the order in which help lists them; a name means a parameter of the function itself.
    Parameters that are not named come last. The first parameter is the `Given` with the values of the fields.
    """

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
        own = {one.name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters}
        listed: dict[str, inspect.Parameter] = {}
        for source in sources:
            for one in [own[source]] if isinstance(source, str) else source.parameters():
                listed.setdefault(one.name, one)
        listed |= {name: one for name, one in own.items() if name not in listed}

        @wraps(function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def command(**values: Any) -> _Result:
            mine = {name: values.pop(name) for name in own}
            return function(Given(values), **mine)

        command.__annotations__ = {}  # its signature has them
        command.__signature__ = inspect.Signature(list(listed.values()))  # type: ignore[attr-defined]
        return command

    return decorate


@cache
def _parameters_of(config: type[DataclassInstance]) -> dict[str, tuple[DeclaredOption, inspect.Parameter]]:
    """The options of a configuration with their parameters, made once for all commands."""
    return {
        declared.field: (declared, _parameter(declared, declared.option.help, declared.default))
        for declared in options_of(config)
    }


def _parameter(declared: DeclaredOption, text: str, default: object) -> inspect.Parameter:
    option, kind = declared.option, declared.type
    if get_origin(kind) is Literal:
        kind = str  # the configuration refuses others, in its own words
    elif get_origin(kind) is tuple:
        kind, default = list[str] | None, None
    info = typer.Option(
        *([declared.flags] if declared.flags else []),
        help=text,
        rich_help_panel=option.panel,
        metavar=option.metavar,
        envvar=option.env,
        show_default=option.show_default,
        parser=_parser(option.parse) if option.parse else None,
        autocompletion=_completion(declared),
    )
    return inspect.Parameter(
        declared.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, info],
    )


def _completion(declared: DeclaredOption) -> Completion | None:
    if declared.choices:
        return among(declared.choices)
    return model_names if declared.field == "model" else None


def _parser(parse: Callable[[str], int]) -> Callable[[str | int], int]:
    def parsed(text: str | int) -> int:
        try:
            return parse(str(text))  # a default is a number already
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed
