"""A router's stream to one worker, without a router."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from baton.core.sampling_params import ResolvedSampling
from baton.net.message_parts import in_parts
from baton.process.ready import WorkerReady
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb
from baton.v1.worker_pb2_grpc import WorkerStub
from tests.support.greetings import greet_worker
from tests.support.ring import CLUSTER_KEY, Service


class BareRouter:
    """Submits to ``worker`` what no router would."""

    def __init__(self, worker: Service) -> None:
        assert isinstance(worker.ready, WorkerReady)
        self.channel = grpc.aio.insecure_channel(worker.ready.address)
        self.call = WorkerStub(self.channel).Connect(None)

    async def greet(self) -> pb.WorkerHello:
        return await greet_worker(self.call, CLUSTER_KEY.encode(), "bare")

    async def _heard(self) -> pb.WorkerMessage:
        message = await self.call.read()
        assert isinstance(message, pb.WorkerMessage), "the worker has ended the stream"
        return message

    async def submit(
        self,
        request_id: str,
        attempt: int,
        prompt: Sequence[int],
        params: ResolvedSampling,
        output_ids: Sequence[int] = (),
        decode: pb.DecodeTarget | None = None,
        forks: Iterable[pb.Fork] = (),
    ) -> None:
        """A request that the worker is to answer, from the outputs given on, itself or by handing it on."""
        submit = pb.Submit(
            request_id=request_id,
            attempt=attempt,
            prompt_ids=prompt,
            output_ids=output_ids,
            params=params.to_proto(),
            decode=decode,
            forks=forks,
        )
        for part in in_parts(pb.RouterMessage(submit=submit)):
            await self.call.write(pb.RouterMessage.FromString(part))

    async def first_delta(self) -> pb.TokenDelta:
        while True:
            message = await self._heard()
            for delta in message.frame.deltas:
                if not delta.started:
                    return delta

    async def answers(self, *request_ids: str) -> list[list[int]]:
        """All tokens of these requests that the worker tells, each once, from the first that it tells on."""
        found: dict[str, dict[int, int]] = {request_id: {} for request_id in request_ids}
        open_ = set(request_ids)
        while open_:
            message = await self._heard()
            for delta in message.frame.deltas:
                found[delta.request_id].update(enumerate(delta.token_ids, delta.first_seq))
                if delta.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
                    open_.discard(delta.request_id)
        return [[tokens[at] for at in sorted(tokens)] for tokens in found.values()]

    async def answer(self, request_id: str) -> tuple[list[int], pb.TokenDelta]:
        """The tokens of a request and its last delta."""
        token_ids: list[int] = []
        while True:
            message = await self._heard()
            for delta in message.frame.deltas:
                if delta.request_id == request_id:
                    token_ids += delta.token_ids
                    if delta.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED:
                        return token_ids, delta

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close(None)
