"""How a worker speculates. Imports no torch, so that a bad option is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["none", "ngram", "draft", "medusa", "eagle"]
METHODS: tuple[Method, ...] = get_args(Method)
WITH_MODEL: tuple[Method, ...] = ("draft", "medusa", "eagle")
"""Methods that load weights of their own."""

MOST_TOKENS = 16
"""Drafts per step and sequence: beyond that few are ever accepted, and each costs a row of the step."""
MOST_NGRAM = 16


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """ValueError names the option at fault, its value and what is allowed."""

    method: Method = "none"
    model: str | None = None
    """For the methods that load one: a directory, or a hub id. None: the one of the method's name in the
    directory of the model that is sped up."""
    num_tokens: int = 4
    """Most drafts per step and sequence."""
    ngram_min: int = 2
    ngram_max: int = 4
    """``ngram`` looks for the last so many tokens, at most and at least."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculative_method is {self.method!r}; allowed: {', '.join(METHODS)}")
        if not 1 <= self.num_tokens <= MOST_TOKENS:
            raise ValueError(f"num_speculative_tokens is {self.num_tokens}; allowed: 1 to {MOST_TOKENS}")
        if not 1 <= self.ngram_max <= MOST_NGRAM:
            raise ValueError(f"speculative_ngram_max is {self.ngram_max}; allowed: 1 to {MOST_NGRAM}")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise ValueError(
                f"speculative_ngram_min is {self.ngram_min}; allowed: 1 to speculative_ngram_max "
                f"({self.ngram_max})"
            )
        if self.method not in WITH_MODEL and self.model:
            raise ValueError(
                f"speculative_model is {self.model!r}; allowed with speculative_method "
                f"{', '.join(WITH_MODEL)} only, not with {self.method}"
            )
