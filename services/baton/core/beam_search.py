"""The parameters of a beam search. Shared by router and engine; imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.core.parameter_spec import Range
from baton.v1 import inference_pb2 as pb

BEAM_WIDTHS = Range(1, 16)
"""The numbers of beams that a search may follow."""
LENGTH_PENALTIES = Range(-10.0, 10.0)
"""The penalties with which length ** penalty is finite for any context."""


class EarlyStopping(enum.IntEnum):
    """The rule that ends a search which has as many complete answers as beams. Values are those of the
    protobuf enum."""

    HEURISTIC = pb.EARLY_STOPPING_UNSPECIFIED
    """End when the best beam, ended where it is, would be no better than the worst complete answer."""
    ALWAYS = pb.EARLY_STOPPING_ALWAYS
    """End at once."""
    NEVER = pb.EARLY_STOPPING_NEVER
    """End when the best beam could not become better than the worst complete answer at any length."""


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
        """Raises ValueError for an unknown early stopping."""
        penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
        return cls(message.width, penalty, EarlyStopping(message.early_stopping))
