"""The beats by which routers with busy event loops keep their streams to this worker alive."""

from __future__ import annotations

import grpc

from baton.greeting.cluster_key import ClusterKeys
from baton.telemetry.beats import BeatMetrics
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from baton.worker.bond import BeatRefusedError
from baton.worker.routers import Routers


class BeatService(pb_grpc.RouterPulseServicer):
    """Serves ``RouterPulse``. Event loop's thread only."""

    def __init__(self, routers: Routers, keys: ClusterKeys, metrics: BeatMetrics) -> None:
        self._routers = routers
        self._keys = keys
        self._metrics = metrics

    async def Beat(  # noqa: N802 (the name is the contract's)
        self, request: pb.RouterBeat, context: grpc.aio.ServicerContext[pb.RouterBeat, pb.RouterBeatHeard]
    ) -> pb.RouterBeatHeard:
        try:
            self.hear(request)
        except BeatRefusedError as error:
            self._metrics.refused.inc()
            # ``abort`` would leave a reference cycle with the call, and callers here are not authenticated.
            context.set_code(error.status)
            context.set_details(str(error))
        else:
            self._metrics.heard.inc()
        return pb.RouterBeatHeard()

    def hear(self, beat: pb.RouterBeat) -> None:
        """Take a beat of a router that lives while its event loop is busy. Raises BeatRefusedError."""
        stream = self._routers.stream_of(beat.router_id)
        if stream is None or stream.bond is None:
            raise BeatRefusedError(
                grpc.StatusCode.NOT_FOUND, "router_id: no router of this name that beats is connected"
            )
        stream.bond.take(beat, self._keys)
        stream.pulse.heard()
