"""What a load report does not know of yet."""

from __future__ import annotations

from baton.router.fleet.unreported import UnreportedLoad
from baton.v1 import worker_pb2 as pb


def test_a_report_takes_in_what_it_says_and_no_more() -> None:
    sent = UnreportedLoad()
    for tokens in (100, 20, 3):
        sent.add(tokens, 1)
    sent.acknowledge(pb.Load(submits_taken=0))
    assert (sent.tokens, sent.sequences) == (123, 3), "a report that was on its way when they were sent"
    sent.acknowledge(pb.Load(submits_taken=2))
    assert (sent.tokens, sent.sequences) == (3, 1)
    sent.acknowledge(pb.Load(submits_taken=2))
    sent.add(7, 2)
    sent.acknowledge(pb.Load(submits_taken=3))
    assert (sent.tokens, sent.sequences) == (7, 2)


def test_a_worker_that_does_not_count_is_believed() -> None:
    sent = UnreportedLoad()
    sent.add(100, 1)
    sent.acknowledge(pb.Load())
    assert (sent.tokens, sent.sequences) == (0, 0)
