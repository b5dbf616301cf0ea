"""Log-probabilities of tokens, as the engine sends them to clients. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import inference_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens under the model's own distribution: the one of its logits
    before penalties, biases, temperature and filters. ``top_ids`` and ``top`` are flat: ``num_top`` entries
    for each position."""

    num_top: int
    chosen: Sequence[float] = ()
    """The log-probability of each token."""
    ranks: Sequence[int] = ()
    """The rank of each token: 1 is the likeliest."""
    top_ids: Sequence[int] = ()
    """The likeliest tokens of each position, in order."""
    top: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, part: slice) -> Logprobs:
        """Return the log-probabilities of a slice of the tokens. The slice has no step."""
        start, stop, _ = part.indices(len(self))
        tops = slice(start * self.num_top, stop * self.num_top)
        return Logprobs(self.num_top, self.chosen[part], self.ranks[part], self.top_ids[tops], self.top[tops])

    def top_of(self, index: int, most: int) -> list[tuple[int, float]]:
        """Return up to ``most`` likeliest tokens at one position, with their log-probabilities."""
        at = slice(index * self.num_top, index * self.num_top + min(most, self.num_top))
        return list(zip(self.top_ids[at], self.top[at], strict=True))

    def narrowed(self, num_top: int) -> Logprobs:
        """Return the same with at most ``num_top`` likeliest tokens for each position."""
        if num_top >= self.num_top:
            return self
        places = range(0, len(self.top), self.num_top)
        top_ids = [token for at in places for token in self.top_ids[at : at + num_top]]
        top = [logprob for at in places for logprob in self.top[at : at + num_top]]
        return Logprobs(num_top, self.chosen, self.ranks, top_ids, top)

    @classmethod
    def join(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Concatenate ``parts``, which have the same ``num_top``."""
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
    """What a request asked for beside its tokens."""

    logprobs: Logprobs | None = None
    """Log-probabilities of the tokens sent with this message."""
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens after the first, which follows nothing. Sent with the
    request's first output."""

    def to_proto(self) -> worker_pb2.TokenDetails:
        return worker_pb2.TokenDetails(
            logprobs=None if self.logprobs is None else self.logprobs.to_proto(),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.to_proto(),
        )
