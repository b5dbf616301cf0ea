"""From what a client asks to `SamplingParams`: ranges, defaults and seeds, the same for every protocol."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.router.api.errors import invalid, shown
from baton.router.api.settings import ApiSettings
from baton.router.types import ModelInfo
from baton.sampling_params import SamplingParams

MAX_TEMPERATURE = 2.0
MAX_TOP_K = 2**31 - 1
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
_SEED_MASK = 2**64 - 1


def _range(description: str, minimum: float, maximum: float) -> Meta:
    """Documentation only: `resolve` checks, with messages that say more."""
    return Meta(description=description, extra_json_schema={"minimum": minimum, "maximum": maximum})


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling fields of a request, as given; None is "not given"."""

    max_tokens: Annotated[int, Meta(description="How many tokens to generate at most.")] | None = None
    temperature: Annotated[float, _range("0 takes the likeliest token.", 0, MAX_TEMPERATURE)] | None = None
    top_p: (
        Annotated[float, _range("Keep the likeliest tokens with this total probability; above 0.", 0, 1)]
        | None
    ) = None
    top_k: Annotated[int, _range("Keep this many tokens; -1 or 0: all.", -1, MAX_TOP_K)] | None = None
    min_p: (
        Annotated[float, _range("Drop tokens under this share of the likeliest one's probability.", 0, 1)]
        | None
    ) = None
    seed: Annotated[int, _range("Repeats the same choice.", SEED_MIN, SEED_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


def resolve(
    fields: SamplingFields,
    model: ModelInfo,
    settings: ApiSettings,
    *,
    prompt_tokens: int,
    default_max_tokens: int | None,
    max_tokens_param: str = "max_tokens",
) -> SamplingParams:
    """Check ``fields`` and fill in what is not given; a seed is drawn. ``default_max_tokens`` None is all
    there is room for.

    Raises ApiError that names the field, its value and what is allowed.
    """
    return SamplingParams(
        max_tokens=_max_tokens(
            fields.max_tokens, model.max_model_len, prompt_tokens, default_max_tokens, max_tokens_param
        ),
        seed=_seed(fields.seed),
        temperature=_number("temperature", fields.temperature, 1.0, 0.0, MAX_TEMPERATURE),
        top_k=min(_top_k(fields.top_k), model.vocab_size),
        top_p=_top_p(fields.top_p),
        min_p=_number("min_p", fields.min_p, 0.0, 0.0, 1.0),
        stop=_stop_strings(fields.stop, settings),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, model.vocab_size, settings),
        ignore_eos=bool(fields.ignore_eos),
    )


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice ``index``: the first keeps the seed, the others get one mixed from both."""
    if index == 0:
        return params
    digest = hashlib.blake2b(struct.pack("<QQ", params.seed, index), digest_size=8).digest()
    return dataclasses.replace(params, seed=int.from_bytes(digest, "little"))


def _number(param: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if math.isnan(value) or not low <= value <= high:
        raise invalid(param, f"{param} must be between {low:g} and {high:g}, not {value!r}.")
    return value


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if math.isnan(value) or not 0 < value <= 1:
        raise invalid("top_p", f"top_p must be above 0 and at most 1, not {value!r}.")
    return value


def _top_k(value: int | None) -> int:
    if value is None or value in (-1, 0):
        return 0
    if not 1 <= value <= MAX_TOP_K:
        raise invalid("top_k", f"top_k must be -1 or 0 (off), or 1 to {MAX_TOP_K}, not {shown(value)}.")
    return value


def _seed(value: int | None) -> int:
    if value is None:
        return secrets.randbits(64)
    if not SEED_MIN <= value <= SEED_MAX:
        raise invalid("seed", f"seed must be a 64-bit integer, not {shown(value)}.")
    return value & _SEED_MASK


def _max_tokens(value: int | None, context: int, prompt_tokens: int, default: int | None, param: str) -> int:
    room = context - prompt_tokens
    if value is None:
        return room if default is None else min(default, room)
    if value < 1:
        raise invalid(param, f"{param} must be at least 1, not {shown(value)}.")
    if value > room:
        raise invalid(
            param,
            f"{param} is {shown(value)}, but this model's context is {context} tokens and the prompt has "
            f"{prompt_tokens}: at most {room} can be generated.",
            "context_length_exceeded",
        )
    return value


def _stop_strings(value: str | list[str] | None, settings: ApiSettings) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > settings.max_stop_strings:
        raise invalid(
            "stop", f"stop has {len(stops)} strings; at most {settings.max_stop_strings} are allowed."
        )
    for index, stop in enumerate(stops):
        if not stop:
            raise invalid("stop", f"stop[{index}] is empty; a stop string needs at least 1 character.")
        if len(stop) > settings.max_stop_chars:
            raise invalid(
                "stop",
                f"stop[{index}] has {len(stop)} characters; at most {settings.max_stop_chars} are allowed.",
            )
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(value: list[int] | None, vocab_size: int, settings: ApiSettings) -> frozenset[int]:
    ids = value or []
    if len(ids) > settings.max_stop_token_ids:
        raise invalid(
            "stop_token_ids",
            f"stop_token_ids has {len(ids)} ids; at most {settings.max_stop_token_ids} are allowed.",
        )
    for index, id_ in enumerate(ids):
        if not 0 <= id_ < vocab_size:
            raise invalid(
                "stop_token_ids",
                f"stop_token_ids[{index}] is {shown(id_)}; token ids are 0 to {vocab_size - 1}.",
            )
    return frozenset(ids)
