"""The requests of a workload, before they are written as tokens or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.process.options import UserError


class WorkloadError(UserError):
    """A workload cannot be made: its file is missing or holds something that is not allowed."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A run of tokens. Two pieces with one ``seed`` begin alike, whatever their lengths."""

    seed: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Item:
    """One request. A prompt is pieces of made-up tokens, or a text."""

    prompt: tuple[PromptPiece, ...] | str
    prompt_tokens: int
    output_tokens: int
    at: float | None = None
    """The time at which a trace sends the request, in seconds after the first one."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The items that fit a model's context, and the number that did not."""

    items: list[Item]
    left_out: int


def fit(items: Sequence[Item], context: int | None) -> Fitted:
    """Leave out items longer than ``context`` tokens. Raises WorkloadError when that is everything."""
    fitting = [
        item for item in items if context is None or item.prompt_tokens + item.output_tokens <= context
    ]
    if not fitting:
        least = min(item.prompt_tokens + item.output_tokens for item in items)
        raise WorkloadError(
            f"no request of the workload fits the model's context of {context} tokens: the shortest has "
            f"{least} with its answer; ask for shorter ones (--input-len, --output-len) or another workload"
        )
    return Fitted(fitting, len(items) - len(fitting))
