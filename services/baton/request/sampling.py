"""From what a client asks to `SamplingParams`: ranges, defaults and seeds, the same for every protocol."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import secrets
import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.request.beams import beam_params, check_alone
from baton.request.defaults import SamplingDefaults
from baton.request.errors import invalid, shown
from baton.request.limits import (
    MAX_BEAMS,
    MAX_BIAS,
    MAX_LENGTH_PENALTY,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_TEMPERATURE,
    ModelInfo,
    SamplingLimits,
)
from baton.request.prompts import check_ids
from baton.sampling_params import SamplingParams
from baton.structured_output import StructuredOutput
from baton.text.tokenizer import Tokenizer

MAX_TOP_K = 2**31 - 1
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
_SEED_MASK = 2**64 - 1
OPENAI = SamplingDefaults()
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


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
    repetition_penalty: (
        Annotated[
            float, _range("Above 1: against tokens of prompt and answer.", 1 / MAX_REPETITION, MAX_REPETITION)
        ]
        | None
    ) = None
    presence_penalty: (
        Annotated[float, _range("Above 0: against tokens of the answer.", -MAX_PENALTY, MAX_PENALTY)] | None
    ) = None
    frequency_penalty: (
        Annotated[float, _range("Likewise, for each time they came.", -MAX_PENALTY, MAX_PENALTY)] | None
    ) = None
    logit_bias: (
        Annotated[dict[str, float], Meta(description="Token id: -100 to 100, added to its logit.")] | None
    ) = None
    min_tokens: Annotated[int, _range("Nothing ends the answer before.", 0, MAX_TOP_K)] | None = None
    bad_words: Annotated[list[str], Meta(description="Never to be generated.")] | None = None
    allowed_token_ids: Annotated[list[int], Meta(description="Nothing else is generated.")] | None = None
    prompt_logprobs: (
        Annotated[int, Meta(description="Tell the prompt's log-probabilities and so many likeliest tokens.")]
        | None
    ) = None
    use_beam_search: (
        Annotated[bool, Meta(description="Search for the likeliest answers as wholes; draw nothing.")] | None
    ) = None
    best_of: Annotated[int, _range("How many beams to follow, from n.", 1, MAX_BEAMS)] | None = None
    length_penalty: (
        Annotated[
            float,
            _range("Of beams; above 0: for long answers.", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        ]
        | None
    ) = None
    early_stopping: (
        Annotated[bool | str, Meta(description='Of a beam search: true, false or "never".')] | None
    ) = None


def resolve(
    fields: SamplingFields,
    model: ModelInfo,
    settings: SamplingLimits,
    tokenizer: Tokenizer,
    *,
    prompt_tokens: int,
    default_max_tokens: int | None,
    max_tokens_param: str = "max_tokens",
    logprobs: int | None = None,
    logprobs_param: str = "logprobs",
    echo: bool = False,
    choices: int = 1,
    n: int = 1,
    bad_word_ids: Iterable[tuple[int, ...]] = (),
    structured_output: StructuredOutput | None = None,
    defaults: SamplingDefaults = OPENAI,
) -> SamplingParams:
    """Check ``fields`` and fill in what is not given; a seed is drawn. ``default_max_tokens`` None is all
    there is room for. ``logprobs`` has another type in each API; with an ``echo``, it asks for those of the
    prompt as well. ``choices`` are those of all prompts, ``n`` those of each. ``bad_word_ids`` are
    given as tokens. ``structured_output`` is checked already. ``defaults`` do not hold for beam searches.

    Raises RequestError that names the field, its value and what is allowed.
    """
    if fields.use_beam_search:
        defaults = OPENAI
    max_tokens = _max_tokens(
        fields.max_tokens, model.max_model_len, prompt_tokens, default_max_tokens, max_tokens_param
    )
    runs = (*bad_word_ids, *_bad_word_ids(fields.bad_words or [], tokenizer, model.vocab_size, settings))
    logprobs = _num_logprobs(logprobs_param, logprobs, settings)
    prompt_logprobs = _num_logprobs("prompt_logprobs", fields.prompt_logprobs, settings)
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    _check_prompt_logprobs(prompt_logprobs, prompt_tokens, choices, settings)
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=_seed(fields.seed),
        temperature=_number("temperature", fields.temperature, defaults.temperature, 0.0, MAX_TEMPERATURE),
        top_k=min(_top_k(fields.top_k, defaults.top_k), model.vocab_size),
        top_p=_top_p(fields.top_p, defaults.top_p),
        min_p=_number("min_p", fields.min_p, defaults.min_p, 0.0, 1.0),
        stop=_stop_strings(fields.stop, settings),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, model.vocab_size, settings),
        ignore_eos=bool(fields.ignore_eos),
        repetition_penalty=_number(
            "repetition_penalty",
            fields.repetition_penalty,
            defaults.repetition_penalty,
            1 / MAX_REPETITION,
            MAX_REPETITION,
        ),
        presence_penalty=_penalty("presence_penalty", fields.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", fields.frequency_penalty),
        logit_bias=_logit_bias(fields.logit_bias or {}, model.vocab_size, settings),
        min_tokens=_min_tokens(fields.min_tokens, max_tokens, max_tokens_param),
        bad_word_ids=tuple(dict.fromkeys(runs)),
        allowed_token_ids=_allowed_token_ids(fields.allowed_token_ids, model.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=structured_output,
        beam_search=beam_params(fields, n),
    )
    if params.beam_search is not None:
        check_alone(_not_for_beams(params))
    _check_choice_left(params, model)
    return params


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice ``index``: the first keeps the seed, the others get one mixed from both."""
    if index == 0:
        return params
    digest = hashlib.blake2b(struct.pack("<QQ", params.seed, index), digest_size=8).digest()
    return dataclasses.replace(params, seed=int.from_bytes(digest, "little"))


def _not_for_beams(params: SamplingParams) -> dict[str, object]:
    """Field → its value, None where that changes nothing. A seed or temperature 0 or 1 are no matter: nothing
    is drawn."""
    return {
        "temperature": None if params.greedy or params.temperature == 1 else params.temperature,
        "top_k": params.top_k or None,
        "top_p": None if params.top_p == 1 else params.top_p,
        "min_p": params.min_p or None,
        "stop": params.stop or None,
        "repetition_penalty": None if params.repetition_penalty == 1 else params.repetition_penalty,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
        "logit_bias": dict(params.logit_bias) or None,
        "min_tokens": params.min_tokens or None,
        "bad_words": params.bad_word_ids or None,
        "allowed_token_ids": params.allowed_token_ids or None,
        "structured_output": None if params.structured_output is None else params.structured_output.kind,
    }


def _check_choice_left(params: SamplingParams, model: ModelInfo) -> None:
    """Raise RequestError when a step could find every token barred."""
    if params.leaves_a_token(model.vocab_size, model.eos_token_ids):
        return
    fields = [
        name
        for name, given in (
            ("allowed_token_ids", params.allowed_token_ids),
            ("bad_words", params.bad_word_ids),
            ("min_tokens", params.min_tokens),
        )
        if given
    ]
    raise invalid(
        fields[0],
        f"{' and '.join(fields)} leave no token to be generated: at least 1 must be allowed that ends no bad "
        "word and, with min_tokens, does not end the answer.",
    )


def _number(param: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if math.isnan(value) or not low <= value <= high:
        raise invalid(param, f"{param} must be between {low:g} and {high:g}, not {value!r}.")
    return value


def _top_p(value: float | None, default: float) -> float:
    if value is None:
        return default
    if math.isnan(value) or not 0 < value <= 1:
        raise invalid("top_p", f"top_p must be above 0 and at most 1, not {value!r}.")
    return value


def _top_k(value: int | None, default: int) -> int:
    if value is None:
        return default
    if value in (-1, 0):
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


def _stop_strings(value: str | list[str] | None, settings: SamplingLimits) -> tuple[str, ...]:
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


def _stop_token_ids(value: list[int] | None, vocab_size: int, settings: SamplingLimits) -> frozenset[int]:
    ids = value or []
    if len(ids) > settings.max_stop_token_ids:
        raise invalid(
            "stop_token_ids",
            f"stop_token_ids has {len(ids)} ids; at most {settings.max_stop_token_ids} are allowed.",
        )
    check_ids(ids, vocab_size, "stop_token_ids")
    return frozenset(ids)


def _allowed_token_ids(value: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not value:
        raise invalid("allowed_token_ids", "allowed_token_ids is empty; it must hold at least one token id.")
    check_ids(value, vocab_size, "allowed_token_ids")
    return tuple(dict.fromkeys(value))


def _penalty(param: str, value: float | None) -> float:
    return _number(param, value, 0.0, -MAX_PENALTY, MAX_PENALTY)


def _min_tokens(value: int | None, max_tokens: int, max_tokens_param: str) -> int:
    if value is None:
        return 0
    if not 0 <= value <= max_tokens:
        raise invalid(
            "min_tokens",
            f"min_tokens must be between 0 and {max_tokens_param} ({max_tokens}), not {shown(value)}.",
        )
    return value


def _num_logprobs(param: str, value: int | None, settings: SamplingLimits) -> int | None:
    if value is not None and not 0 <= value <= settings.max_logprobs:
        raise invalid(param, f"{param} must be between 0 and {settings.max_logprobs}, not {shown(value)}.")
    return value


def _check_prompt_logprobs(
    value: int | None, prompt_tokens: int, choices: int, settings: SamplingLimits
) -> None:
    """Raise RequestError when more would be told of prompts than the answer has room for."""
    if value is None:
        return
    told = prompt_tokens * (value + 1) * choices
    if told > settings.max_prompt_logprobs:
        raise invalid(
            "prompt_logprobs",
            f"{told} log-probabilities of a prompt of {prompt_tokens} tokens are asked for "
            f"({value + 1} for each, in {choices} choices); at most {settings.max_prompt_logprobs} are told.",
        )


def _logit_bias(
    value: dict[str, float], vocab_size: int, settings: SamplingLimits
) -> tuple[tuple[int, float], ...]:
    if len(value) > settings.max_logit_bias:
        raise invalid(
            "logit_bias",
            f"logit_bias has {len(value)} entries; at most {settings.max_logit_bias} are allowed.",
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise invalid(
                "logit_bias", f"logit_bias has the key {shown(key)}; token ids are 0 to {vocab_size - 1}."
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(
                "logit_bias",
                f"logit_bias[{shown(key)}] must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {bias!r}.",
            )
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _bad_word_ids(
    words: list[str], tokenizer: Tokenizer, vocab_size: int, settings: SamplingLimits
) -> list[tuple[int, ...]]:
    """The tokens of each word, with and without a space before it: most tokenizers have other tokens within
    a text than at its start."""
    if len(words) > settings.max_bad_words:
        raise invalid(
            "bad_words", f"bad_words has {len(words)} words; at most {settings.max_bad_words} are allowed."
        )
    runs = []
    for index, word in enumerate(words):
        if not word:
            raise invalid("bad_words", f"bad_words[{index}] is empty; a bad word needs at least 1 character.")
        if len(word) > settings.max_bad_word_chars:
            raise invalid(
                "bad_words",
                f"bad_words[{index}] has {len(word)} characters; at most {settings.max_bad_word_chars} are "
                "allowed.",
            )
        bare = word.lstrip() or word
        for spelled in (bare, " " + bare):
            run = tokenizer.encode(spelled, add_special_tokens=False)
            if run and max(run) < vocab_size:  # the model cannot generate other tokens
                runs.append(tuple(run))
    return runs
