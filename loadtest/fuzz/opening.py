"""The beginning of a stream to a worker, over gRPC's blocking API and as bytes: the rest may be no
message."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import Caller, Kind
from baton.v1 import handoff_pb2, worker_pb2

CONNECT, LINK = "/baton.v1.Worker/Connect", "/baton.v1.Handoff/Link"
PATIENCE_S = 10.0


class Opening:
    """The opening of one stream, with the cluster key: greeting, proof, and the first message."""

    def __init__(self, path: str, cluster_key: bytes, name: str, first: bytes) -> None:
        kind: Kind = "router" if path == CONNECT else "prefill"
        self._sends = worker_pb2.RouterMessage if path == CONNECT else handoff_pb2.PrefillMessage
        self._hears = worker_pb2.WorkerMessage if path == CONNECT else handoff_pb2.DecodeMessage
        self._caller = Caller(ClusterKeys(cluster_key), kind, name)
        self._first = first
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def requests(self, sent: Sequence[bytes], hold_s: float = 0.0) -> Iterator[bytes]:
        """Yield the opening and ``sent``, then wait ``hold_s`` seconds before the stream's end, which ends
        its requests."""
        yield self._sends(greeting=self._caller.greeting).SerializeToString()
        answer = self._hears.FromString(self._heard.get(timeout=PATIENCE_S))
        yield self._sends(proof=self._caller.prove(answer.challenge)).SerializeToString()
        yield self._first
        yield from sent
        time.sleep(hold_s)

    def hear(self, answer: bytes) -> None:
        """Take a message of the worker."""
        self._heard.put(answer)
