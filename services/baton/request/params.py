"""Sampling parameters as a Python program writes them."""

from __future__ import annotations

from baton.request.sampling import SamplingFields
from baton.request.structured import StructuredOutputs


class SamplingParams(SamplingFields, kw_only=True, frozen=True):  # type: ignore[misc]  # a Struct may
    """How one prompt is to be answered: the sampling fields of the HTTP API, with its names, defaults and
    ranges (``docs/sampling.md``), and what is beside them there.

    This is what people construct. `baton.sampling_params.SamplingParams`, which goes over the wire to the
    engine, cannot be it: stop strings and bad words must have been checked and tokenized for one model by
    then, ``max_tokens`` must fit beside one prompt, and the seed is drawn. `baton.request.sampling.resolve`
    makes it from these fields, for the router and offline alike.
    """

    n: int = 1
    """Answers to each prompt."""
    logprobs: int | None = None
    """Tell each token's log-probability and those of this many likeliest tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the text must have (``docs/structured-outputs.md``)."""
