"""Log-probabilities of tokens on their way from the engine to clients. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import inference_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens under the model's own distribution: that of its logits, before
    penalties, biases, temperature and filters. The likeliest tokens lie flat, ``num_top`` for each place."""

    num_top: int
    chosen: Sequence[float] = ()
    """Of each token itself."""
    ranks: Sequence[int] = ()
    """Of each token: 1 is the likeliest."""
    top_ids: Sequence[int] = ()
    """The likeliest tokens, in order."""
    top: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, part: slice) -> Logprobs:
        """Those of some of the tokens, by a slice without a step."""
        start, stop, _ = part.indices(len(self))
        tops = slice(start * self.num_top, stop * self.num_top)
        return Logprobs(self.num_top, self.chosen[part], self.ranks[part], self.top_ids[tops], self.top[tops])

    def top_of(self, index: int, most: int) -> list[tuple[int, float]]:
        """Up to ``most`` likeliest tokens at one place, with their log-probabilities."""
        at = slice(index * self.num_top, index * self.num_top + min(most, self.num_top))
        return list(zip(self.top_ids[at], self.top[at], strict=True))

    def narrowed(self, num_top: int) -> Logprobs:
        """With no more than ``num_top`` likeliest tokens for each place."""
        if num_top >= self.num_top:
            return self
        places = range(0, len(self.top), self.num_top)
        top_ids = [token for at in places for token in self.top_ids[at : at + num_top]]
        top = [logprob for at in places for logprob in self.top[at : at + num_top]]
        return Logprobs(num_top, self.chosen, self.ranks, top_ids, top)

    @classmethod
    def join(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """One after the other; all have the same ``num_top``."""
        chosen: list[float] = []
        ranks: list[int] = []
        top_ids: list[int] = []
        top: list[float] = []
        for part in parts:
            chosen += part.chosen
            ranks += part.ranks
            top_ids += part.top_ids
            top += part.top
        return cls(parts[0].num_top if parts else 0, chosen, ranks, top_ids, top)

    def to_proto(self) -> inference_pb2.Logprobs:
        return inference_pb2.Logprobs(
            num_top=self.num_top, chosen=self.chosen, ranks=self.ranks, top_ids=self.top_ids, top=self.top
        )

    @classmethod
    def from_proto(cls, message: inference_pb2.Logprobs) -> Logprobs:
        return cls(
            message.num_top,
            list(message.chosen),
            list(message.ranks),
            list(message.top_ids),
            list(message.top),
        )


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """What a request asked to be told beside its tokens."""

    logprobs: Logprobs | None = None
    """Of these tokens."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt but its first token, which follows nothing. With the request's first output."""

    def to_proto(self) -> worker_pb2.TokenDetails:
        return worker_pb2.TokenDetails(
            logprobs=None if self.logprobs is None else self.logprobs.to_proto(),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.to_proto(),
        )
