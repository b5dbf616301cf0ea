"""How one request wants its tokens chosen. Shared by router and engine; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1 import inference_pb2 as pb

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. ``seed`` is required: the router draws one when the client gives
    none, so that a request resumed on another worker continues the same stream.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 turn the respective filter off. ``stop`` strings are matched by
    whoever owns the text (the router), never by the engine.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def to_proto(self) -> pb.SamplingParams:
        return pb.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=sorted(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> SamplingParams:
        return cls(
            max_tokens=message.max_tokens,
            seed=message.seed,
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            stop=tuple(message.stop),
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
        )
