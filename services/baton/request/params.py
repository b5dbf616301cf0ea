"""Sampling parameters as a Python program writes them."""

from __future__ import annotations

from baton.core.sampling_params import SamplingFields
from baton.request.structured import StructuredOutputs


class SamplingParams(SamplingFields, kw_only=True, frozen=True):  # type: ignore[misc]  # a Struct may
    """The parameters for answering one prompt: the sampling fields of the HTTP API, with its names, defaults
    and ranges (``docs/sampling.md``), and the fields that stand beside them there.

    Programs construct this class. The engine gets a `baton.core.sampling_params.ResolvedSampling`, which
    `baton.request.sampling.resolve` makes of these fields for the router and offline alike. The two cannot be
    one class: here a field may be left to the model's publisher, a seed to chance and ``max_tokens`` to the
    room beside a prompt, and words are text; there everything has a value, checked for one prompt of one
    model, and words are token ids. The type tells the engine that a request's parameters are resolved.
    """

    n: int = 1
    """The number of answers to each prompt."""
    logprobs: int | None = None
    """The number of likeliest tokens whose log-probabilities are reported beside each token's own; None: no
    log-probabilities are."""
    skip_special_tokens: bool = True
    """Whether to leave special tokens out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the text must have (``docs/structured-outputs.md``)."""
