"""How an attempt failed, on the wire and off it."""

from __future__ import annotations

import pytest

from baton.core.attempt_failure import AttemptFailure, failure_from_proto, failure_to_proto
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

FLAGS = {
    AttemptFailure.REFUSED: ["refused"],
    AttemptFailure.HANDOFF_LOST: ["lost"],
    AttemptFailure.INVALID: ["invalid"],
    AttemptFailure.EXPIRED: ["expired"],
    AttemptFailure.WORKER_ERROR: [],
}


@pytest.mark.parametrize("failure", AttemptFailure)
def test_each_failure_has_its_flag_on_the_wire_and_comes_back(failure: AttemptFailure) -> None:
    delta = pb.TokenDelta.FromString(failure_to_proto("r", 3, failure, "why").SerializeToString())
    assert [flag for flags in FLAGS.values() for flag in flags if getattr(delta, flag)] == FLAGS[failure]
    assert (delta.request_id, delta.attempt, delta.error) == ("r", 3, "why")
    assert delta.finish_reason == inference_pb2.FINISH_REASON_ERROR
    assert failure_from_proto(delta) is failure
