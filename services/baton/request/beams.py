"""The fields of a beam search, checked: what it is, and what cannot go with it."""

from __future__ import annotations

import math
from typing import Protocol

from baton.beam_search import BeamParams, EarlyStopping
from baton.request.errors import invalid, shown
from baton.request.limits import MAX_BEAMS, MAX_LENGTH_PENALTY


class BeamFields(Protocol):
    """Those of a request's fields that concern a beam search; None is "not given"."""

    use_beam_search: bool | None
    best_of: int | None
    length_penalty: float | None
    early_stopping: bool | str | None


def beam_params(fields: BeamFields, n: int) -> BeamParams | None:
    """The search that a request for ``n`` answers asks for; None: none.

    Raises RequestError for a value that is not allowed, and for a field of the search without one, unless it
    asks for what happens anyway.
    """
    if not fields.use_beam_search:
        _check_unused(fields, n)
        return None
    return BeamParams(
        width=_width(fields.best_of, n),
        length_penalty=_length_penalty(fields.length_penalty),
        early_stopping=_early_stopping(fields.early_stopping),
    )


def check_alone(given: dict[str, object]) -> None:
    """Raise RequestError for the first field of ``given`` that has a value other than None: those that a
    search could not heed, since it takes the model's own distribution and tells nothing before its end."""
    for param, value in given.items():
        if value is not None:
            raise invalid(
                param,
                f"{param} ({shown(value)}) is not allowed with use_beam_search, which draws nothing and "
                "takes the model's own distribution.",
            )


def _width(best_of: int | None, n: int) -> int:
    param, width = ("n", n) if best_of is None else ("best_of", best_of)
    if not 1 <= width <= MAX_BEAMS:
        raise invalid(
            param, f"{param} must be between 1 and {MAX_BEAMS} with use_beam_search, not {shown(width)}."
        )
    if n > width:
        raise invalid("best_of", f"best_of must be at least n ({shown(n)}), not {shown(width)}.")
    return width


def _length_penalty(value: float | None) -> float:
    if value is None:
        return 1.0
    if math.isnan(value) or abs(value) > MAX_LENGTH_PENALTY:
        raise invalid(
            "length_penalty",
            f"length_penalty must be between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}, "
            f"not {value!r}.",
        )
    return value


def _early_stopping(value: bool | str | None) -> EarlyStopping:
    match value:
        case True:
            return EarlyStopping.ALWAYS
        case None | False:
            return EarlyStopping.HEURISTIC
        case "never":
            return EarlyStopping.NEVER
    raise invalid("early_stopping", f'early_stopping must be true, false or "never", not {shown(value)}.')


def _check_unused(fields: BeamFields, n: int) -> None:
    for param, value, neutral in (
        ("best_of", fields.best_of, n),
        ("length_penalty", fields.length_penalty, 1.0),
        ("early_stopping", fields.early_stopping, False),
    ):
        if value is not None and value != neutral:
            raise invalid(
                param, f"{param} is {shown(value)}; without use_beam_search, {shown(neutral)} is allowed."
            )
