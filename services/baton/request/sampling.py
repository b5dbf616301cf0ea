"""Resolves a client's fields to `ResolvedSampling`: ranges, defaults and seeds, the same for every
protocol."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
import struct
from collections.abc import Iterable, Iterator

from baton.core.sampling_params import PARAMETERS, ResolvedSampling, SamplingFields
from baton.core.structured_output import StructuredOutput
from baton.request.beams import beam_params, check_beams
from baton.request.defaults import SamplingDefaults
from baton.request.errors import invalid, shown
from baton.request.limits import ModelInfo, SamplingLimits
from baton.request.prompts import check_ids
from baton.text.tokenizer import Tokenizer

_SEED_MASK = 2**64 - 1
_REAL = tuple((row.name, row.range, row.neutral) for row in PARAMETERS.values() if row.kind is float)
_TOP_K, _BIASES = PARAMETERS["top_k"].range, PARAMETERS["logit_bias"].range
OPENAI = SamplingDefaults()
Run = tuple[int, ...]
"""The tokens of a bad word."""
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


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
    bad_word_ids: Iterable[Run] = (),
    word_runs: Iterable[Run] | None = None,
    structured_output: StructuredOutput | None = None,
    defaults: SamplingDefaults = OPENAI,
) -> ResolvedSampling:
    """Check ``fields`` and fill in the missing ones; a seed is drawn. ``default_max_tokens`` None: all there
    is room for. ``logprobs`` has another type in each API; with an ``echo``, it also asks for the prompt's.
    ``choices``: the number for all prompts; ``n``: the number for each. ``bad_word_ids``: bad words given as
    tokens; ``word_runs``: what `runs_of` has made of the others, None: that is done here.
    ``structured_output`` is checked already. ``defaults`` do not hold for beam searches.

    Raises RequestError that names the field, its value and what is allowed.
    """
    if fields.use_beam_search:
        defaults = OPENAI
    room = model.max_model_len - prompt_tokens
    asked = fields.max_tokens
    if fields.truncate_prompt_tokens is not None and asked is not None:
        asked = min(asked, room)  # as in vLLM: a prompt that is cut may leave less room than is asked for
    max_tokens = _max_tokens(asked, model.max_model_len, prompt_tokens, default_max_tokens, max_tokens_param)
    if word_runs is None:
        word_runs = runs_of(fields.bad_words or [], tokenizer, model.vocab_size, settings)
    runs = _bad_word_ids(
        bad_word_ids, word_runs, "bad_words" if fields.bad_words else "bad_word_ids", settings
    )
    logprobs = _num_logprobs(logprobs_param, logprobs, settings)
    prompt_logprobs = _num_logprobs("prompt_logprobs", fields.prompt_logprobs, settings)
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    _check_prompt_logprobs(prompt_logprobs, prompt_tokens, choices, settings)
    params = ResolvedSampling(
        max_tokens=max_tokens,
        seed=_seed(fields.seed),
        **_numbers(fields, defaults),
        top_k=min(_top_k(fields.top_k, defaults.top_k), model.vocab_size),
        stop=_stop_strings(fields.stop, settings),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        detokenize=fields.detokenize is not False,
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, model.vocab_size, settings),
        ignore_eos=bool(fields.ignore_eos),
        logit_bias=_logit_bias(fields.logit_bias or {}, model.vocab_size, settings),
        min_tokens=_min_tokens(fields.min_tokens, max_tokens, max_tokens_param),
        bad_word_ids=runs,
        allowed_token_ids=_allowed_token_ids(fields.allowed_token_ids, model.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=structured_output,
        beam_search=beam_params(fields, n),
    )
    if params.beam_search is not None:
        check_beams(params)
    if params.stop and not params.detokenize:
        raise invalid("stop", f"stop ({shown(params.stop)}) needs a text; detokenize is false.")
    _check_choice_left(params, model)
    return params


def for_choice(params: ResolvedSampling, index: int) -> ResolvedSampling:
    """Return the parameters of choice ``index``: the first keeps the seed, the others get one mixed from
    both."""
    if index == 0:
        return params
    digest = hashlib.blake2b(struct.pack("<QQ", params.seed, index), digest_size=8).digest()
    return dataclasses.replace(params, seed=int.from_bytes(digest, "little"))


def _check_choice_left(params: ResolvedSampling, model: ModelInfo) -> None:
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


def _numbers(fields: SamplingFields, defaults: SamplingDefaults) -> dict[str, float]:
    """Return the parameters, by name, whose allowed values the table describes completely."""
    numbers = {}
    for name, allowed, neutral in _REAL:
        value = getattr(fields, name)
        if value is None:
            value = getattr(defaults, name, neutral)
        elif value not in allowed:
            raise invalid(name, f"{name} must be {allowed}, not {value!r}.")
        numbers[name] = value
    return numbers


def _top_k(value: int | None, default: int) -> int:
    if value is None:
        return default
    if value in (-1, 0):
        return 0
    if value not in _TOP_K:
        raise invalid("top_k", f"top_k must be -1 or 0 (off), or 1 to {_TOP_K.high}, not {shown(value)}.")
    return value


def _seed(value: int | None) -> int:
    if value is None:
        return secrets.randbits(64)
    if value not in PARAMETERS["seed"].range:
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
    """Raise RequestError when more log-probabilities of prompts are asked for than an answer has room for."""
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
        if bias not in _BIASES:
            raise invalid("logit_bias", f"logit_bias[{shown(key)}] must be {_BIASES}, not {bias!r}.")
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _bad_word_ids(
    given: Iterable[Run], word_runs: Iterable[Run], param: str, settings: SamplingLimits
) -> tuple[Run, ...]:
    """Return all runs, each once. ``param``: the field to blame if they are too many."""
    runs = tuple(dict.fromkeys((*given, *word_runs)))
    total = sum(map(len, runs))
    if total > settings.max_bad_word_tokens:
        raise invalid(
            param,
            f"{param} has {total} tokens, counting those of words with and without a space before; at most "
            f"{settings.max_bad_word_tokens} are allowed.",
        )
    return runs


def runs_of(
    words: list[str], tokenizer: Tokenizer, vocab_size: int, settings: SamplingLimits
) -> Iterator[Run]:
    """Make the tokens of each word, with and without a space before it: most tokenizers have other tokens
    within a text than at its start."""
    if len(words) > settings.max_bad_words:
        raise invalid(
            "bad_words", f"bad_words has {len(words)} words; at most {settings.max_bad_words} are allowed."
        )
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
                yield tuple(run)
