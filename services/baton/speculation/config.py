"""The settings of speculation. Imports no torch, so that a bad option is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["none", "ngram", "draft", "medusa", "eagle"]
METHODS: tuple[Method, ...] = get_args(Method)
WITH_MODEL: tuple[Method, ...] = ("draft", "medusa", "eagle")
"""Methods that load weights of their own."""
ONE_PROCESS: tuple[Method, ...] = ("medusa", "eagle")
"""Methods that draft from the model's hidden states, which a split model has in no one place."""

MAX_TOKENS = 16
"""Most drafts per step and sequence: beyond that few are ever accepted, and each costs a row of the step."""
MAX_NGRAM = 16


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How an engine speculates. Each value is within its option's bounds; ValueError names one that does not
    go with the others, its value and what is allowed."""

    method: Method = "none"
    model: str | None = None
    """A directory or a hub id, for the methods that load a model. None: the directory of the method's name in
    the directory of the model that is sped up."""
    num_tokens: int = 4
    """Most drafts per step and sequence."""
    ngram_min: int = 2
    ngram_max: int = 4
    """Most last tokens that ``ngram`` looks for; ``ngram_min`` is the fewest."""

    def __post_init__(self) -> None:
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
