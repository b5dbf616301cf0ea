"""The phases of a request at decode: its handoff, and its first step there."""

from __future__ import annotations

from baton.engine.phases import microseconds
from baton.handoff.messages import Name
from baton.handoff.timeline import Stage, Timeline
from baton.v1 import worker_pb2 as pb


def handoff_phases(name: Name, timeline: Timeline) -> pb.Phases:
    """Return the phases of a committed handoff."""

    def between(start: Stage, end: Stage) -> int:
        return microseconds(timeline.between(start, end) or 0.0)

    handoff = pb.HandoffPhases(
        room_us=between(Stage.ASKED, Stage.CREDITED),
        wait_us=between(Stage.CREDITED, Stage.READY),
        grant_us=between(Stage.READY, Stage.GRANTED),
        transfer_us=between(Stage.GRANTED, Stage.ARRIVED),
        flush_us=timeline.flush_us,
        commit_us=between(Stage.COMPLETE, Stage.COMMITTED),
        connector=timeline.connector,
        bytes=timeline.received_bytes,
    )
    return pb.Phases(request_id=name.request_id, attempt=name.attempt, handoff=handoff)


def join_phases(name: Name, timeline: Timeline, ended: float, now: float) -> pb.Phases:
    """Return the phases of a request's first step at decode, which ended at ``ended``, in seconds of
    ``time.monotonic`` like ``now``."""
    join = pb.JoinPhases(
        queue_us=microseconds(timeline.between(Stage.COMMITTED, Stage.STARTED) or 0.0),
        step_us=microseconds(ended - (timeline.reached(Stage.STARTED) or ended)),
        publish_us=microseconds(now - ended),
    )
    return pb.Phases(request_id=name.request_id, attempt=name.attempt, join=join)
