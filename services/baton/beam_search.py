"""How one request wants its answers searched for. Shared by router and workers; imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.v1 import inference_pb2 as pb


class EarlyStopping(enum.IntEnum):
    """When a search that has as many complete answers as beams is over. The values are the contract's."""

    HEURISTIC = pb.EARLY_STOPPING_UNSPECIFIED
    """When the best beam, ended where it is, would be no better than the worst of them."""
    ALWAYS = pb.EARLY_STOPPING_ALWAYS
    """At once."""
    NEVER = pb.EARLY_STOPPING_NEVER
    """When the best beam could not become better than the worst of them at any length."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A beam search: ``width`` beginnings are followed at once. Complete answers are compared by the sum of
    their tokens' log-probabilities / length ** ``length_penalty``."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def to_proto(self) -> pb.BeamSearch:
        return pb.BeamSearch(
            width=self.width,
            length_penalty=self.length_penalty,
            early_stopping=pb.EarlyStopping.ValueType(self.early_stopping),
        )

    @classmethod
    def from_proto(cls, message: pb.BeamSearch) -> BeamParams:
        """ValueError for an early stopping that there is not."""
        penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
        return cls(message.width, penalty, EarlyStopping(message.early_stopping))
