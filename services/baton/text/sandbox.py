"""The sandbox in which chat templates run: no access to Python, and an error for usual ways to make a text
huge.

What bounds a template is the process that renders it: its time and its memory. The checks here only give a
better error than a process that ends, and are all that there is where a program renders its own templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEATED = 1_000_000
"""The most characters, or entries of a list, that one operation may add by a number."""

_PADDING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
"""Methods of texts whose first argument is a width."""
_PADDING_FILTERS = ("center", "indent")
_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|[0-9]*\.?[0-9]{7,})")
_FORMAT_WIDTH = re.compile(r"\{[^{}]*:[^{}]*[0-9]{7,}[^{}]*\}")
"""Widths and precisions in formats of more than ``MAX_REPEATED``, or for ``%`` from an argument (``*``)."""

Given = ParamSpec("Given")
Made = TypeVar("Made")


class SandboxedTemplates(ImmutableSandboxedEnvironment):
    """The environment of templates. Nothing of a template is computed when it is compiled."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, extensions: Sequence[str | type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=extensions,
        )
        for name in _PADDING_FILTERS:
            self.filters[name] = _narrow(self.filters[name])

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        if operator == "%":
            if isinstance(left, str):
                _check_format(_PERCENT_WIDTH, left.replace("%%", ""))
            return super().call_binop(context, operator, left, right)
        for sequence, count in ((left, right), (right, left)):
            repeats = isinstance(count, int) and isinstance(sequence, str | list | tuple)
            if repeats and len(sequence) * count > MAX_REPEATED:  # type: ignore[arg-type, operator]
                raise _too_much()
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:  # noqa: N805
        # Two underscores, as in jinja2: the template's own keywords may be called self.
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in _PADDING:
            _check_narrow((*args, *kwargs.values()))
        if name in ("format", "format_map"):  # jinja2 wraps these methods
            _check_format(_FORMAT_WIDTH, getattr(getattr(__obj, "__wrapped__", None), "__self__", None))
        return super().call(__context, __obj, *args, **kwargs)


def _narrow(
    pad: Callable[Concatenate[str, Given], Made],
) -> Callable[Concatenate[str, Given], Made]:
    """Return the filter ``pad``, which takes no width above ``MAX_REPEATED``."""

    def narrow(text: str, /, *args: Given.args, **kwargs: Given.kwargs) -> Made:
        _check_narrow((*args, *kwargs.values()))
        return pad(text, *args, **kwargs)

    return narrow


def _check_narrow(widths: tuple[object, ...]) -> None:
    if any(isinstance(width, int) and width > MAX_REPEATED for width in widths):
        raise _too_much()


def _check_format(widths: re.Pattern[str], template: object) -> None:
    if isinstance(template, str) and widths.search(template):
        raise _too_much()


def _too_much() -> SecurityError:
    return SecurityError("the chat template repeats a text too often")
