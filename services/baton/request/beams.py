"""The checks of a beam search's fields, and of the fields that exclude one."""

from __future__ import annotations

from dataclasses import replace

from baton.core.beam_search import BEAM_WIDTHS, LENGTH_PENALTIES, BeamParams, EarlyStopping
from baton.core.sampling_params import PARAMETERS, ResolvedSampling, SamplingFields
from baton.request.errors import invalid, shown

_EXCLUDED = tuple(row for row in PARAMETERS.values() if not row.with_beams)


def beam_params(fields: SamplingFields, n: int) -> BeamParams | None:
    """Return the beam search that a request for ``n`` answers asks for; None: none.

    Raises RequestError for a value that is not allowed, and for a field of the search without a search,
    unless its value changes nothing.
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
    """Raise RequestError for the first field of ``given`` with a value other than None. The fields are those
    that a beam search cannot heed, since it takes the model's own distribution and sends nothing before its
    end."""
    for param, value in given.items():
        if value is not None:
            raise invalid(
                param,
                f"{param} ({shown(value)}) is not allowed with use_beam_search, which draws nothing and "
                "takes the model's own distribution.",
            )


def check_beams(params: ResolvedSampling) -> None:
    """Raise RequestError for the first parameter that a beam search cannot heed."""
    if params.greedy:  # Greedy decoding draws nothing, as a beam search does.
        params = replace(params, temperature=PARAMETERS["temperature"].neutral)
    for row in _EXCLUDED:
        value = getattr(params, row.name)
        if value != row.neutral:
            check_alone({row.api_name or row.name: value if row.show is None else row.show(value)})


def _width(best_of: int | None, n: int) -> int:
    param, width = ("n", n) if best_of is None else ("best_of", best_of)
    if width not in BEAM_WIDTHS:
        raise invalid(param, f"{param} must be {BEAM_WIDTHS} with use_beam_search, not {shown(width)}.")
    if n > width:
        raise invalid("best_of", f"best_of must be at least n ({shown(n)}), not {shown(width)}.")
    return width


def _length_penalty(value: float | None) -> float:
    if value is None:
        return 1.0
    if value not in LENGTH_PENALTIES:
        raise invalid("length_penalty", f"length_penalty must be {LENGTH_PENALTIES}, not {value!r}.")
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


def _check_unused(fields: SamplingFields, n: int) -> None:
    for param, value, neutral in (
        ("best_of", fields.best_of, n),
        ("length_penalty", fields.length_penalty, 1.0),
        ("early_stopping", fields.early_stopping, False),
    ):
        if value is not None and value != neutral:
            raise invalid(
                param, f"{param} is {shown(value)}; without use_beam_search, {shown(neutral)} is allowed."
            )
