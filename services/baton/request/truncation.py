"""The cutting of prompts that are too long, where a request asks for it by ``truncate_prompt_tokens``."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.sampling_params import SamplingFields
from baton.request.errors import invalid, shown
from baton.request.limits import ModelInfo

LEFT, RIGHT = "left", "right"
MAX_CUT_TOKENS = 512 * 1024
"""Most tokens of a text that is cut: each takes 270 bytes while the text is encoded."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is kept of a prompt that is too long."""

    tokens: int
    """The number of tokens that are kept at most."""
    side: str = LEFT
    """The side that is cut off."""

    @property
    def most(self) -> int:
        """The most tokens that a text may have before it is cut."""
        return max(MAX_CUT_TOKENS, self.tokens)

    def cut(self, ids: list[int]) -> list[int]:
        """Return the tokens of ``ids`` that are kept."""
        if len(ids) <= self.tokens:
            return ids
        return ids[-self.tokens :] if self.side == LEFT else ids[: self.tokens]


def truncation_of(fields: SamplingFields, model: ModelInfo) -> Truncation | None:
    """Return how the prompts of a request are cut; None: they are not. Raises RequestError, which names the
    field, for a number of tokens that no prompt may have, and for an unknown side."""
    tokens, side = fields.truncate_prompt_tokens, fields.truncation_side
    if side not in (None, LEFT, RIGHT):
        raise invalid("truncation_side", f"truncation_side must be left or right, not {shown(side)}.")
    if tokens is None:
        return None
    most = model.max_model_len - 1
    if tokens != -1 and not 1 <= tokens <= most:
        raise invalid(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1, or between 1 and {most}, which leaves room for an answer in "
            f"this model's context, not {shown(tokens)}.",
        )
    return Truncation(most if tokens == -1 else tokens, side or LEFT)
