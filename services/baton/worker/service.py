"""Router ↔ worker: submits and cancels come up the stream, frames of tokens go down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from baton.connector.messages import AbortReason, Name
from baton.decode.role import DecodeRole
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.sequence import FinishReason, Sequence
from baton.prefill.role import PrefillRole
from baton.sampling_params import SamplingParams
from baton.telemetry.worker import WorkerStats
from baton.v1 import inference_pb2, worker_pb2
from baton.v1 import worker_pb2_grpc as pb_grpc
from baton.worker.routers import Routers, RouterStream

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 1.0

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}


class WorkerService(pb_grpc.WorkerServicer):
    """Serves ``Worker.Connect``. Event loop's thread only."""

    def __init__(
        self,
        engine: Engine,
        hello: worker_pb2.WorkerHello,
        routers: Routers,
        prefill: PrefillRole,
        decode: DecodeRole,
    ) -> None:
        self._engine = engine
        self._hello = hello
        self._routers = routers
        self._prefill = prefill
        self._decode = decode

    async def Connect(  # noqa: N802 (the name is the contract's)
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello") or not first.hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be RouterHello")
            return
        stream = RouterStream(first.hello.router_id, self.load)
        yield worker_pb2.WorkerMessage(hello=self._hello)
        self._routers.add(stream)
        log.info("router %s connected", stream.router_id)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while (frame := await stream.frames.get()) is not None:
                yield frame
        finally:
            reader.cancel()
            if self._routers.remove(stream):
                self._cancel_all_of(stream.router_id)
            log.info("router %s disconnected", stream.router_id)

    async def _read(self, stream: RouterStream, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        try:
            async for message in messages:
                self._take(stream.router_id, message)
        finally:
            stream.frames.put_nowait(None)

    def _take(self, router_id: str, message: worker_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(router_id, message.submit)
            case "cancel":
                self._cancel(Name(message.cancel.request_id, message.cancel.attempt))
            case other:
                log.warning("router %s sent %s: ignored", router_id, other)

    # --- requests

    def _submit(self, router_id: str, submit: worker_pb2.Submit) -> None:
        sequence = Sequence(
            request_id=submit.request_id,
            attempt=submit.attempt,
            prompt_ids=tuple(submit.prompt_ids),
            output_ids=list(submit.output_ids),
            params=SamplingParams.from_proto(submit.params),
            owner=router_id,
        )
        # A request of one token has nothing to hand on.
        handed_on = submit.HasField("decode") and sequence.params.max_tokens - sequence.num_outputs > 1
        try:
            self._engine.check(sequence)
            if handed_on:
                self._prefill.submit(sequence, submit.decode)
            else:
                self._engine.add(sequence)
        except ValueError as error:
            self._routers.fail(router_id, submit.request_id, submit.attempt, str(error))

    def _cancel(self, name: Name) -> None:
        self._prefill.cancel(name)
        self._decode.cancel(name)
        self._engine.cancel(*name)

    def _cancel_all_of(self, router_id: str) -> None:
        self._prefill.cancel_all_of(router_id)
        self._decode.cancel_all_of(router_id)
        self._engine.cancel_all_of(router_id)

    # --- what comes out

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Publish one step: a frame per router, and finished blocks to the handoffs."""
        for output in outputs:
            if output.new_token is not None:
                self._routers.deliver(output.seq.owner, _delta(output, output.new_token))
            self._prefill.on_output(output)
        self._decode.room_changed()

    async def report_loads(self) -> None:
        """Tell idle routers how the worker is, for as long as it lives."""
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            self._routers.send_loads()

    def stats(self) -> WorkerStats:
        """Everything the worker exports. Any thread: a scrape has one of its own."""
        load = self._engine.load()
        prefill, decode = self._prefill.counters, self._decode.counters
        return WorkerStats(
            running=load.running,
            waiting=load.waiting,
            waiting_prefill_tokens=load.waiting_prefill_tokens,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_held=load.blocks_held,
            open_handoffs=self._prefill.open_handoffs + self._decode.open_handoffs,
            preemptions=load.preemptions,
            generated_tokens=load.generated_tokens,
            prefix_queried_tokens=load.prefix_queried_tokens,
            prefix_hit_tokens=load.prefix_hit_tokens,
            handoffs_completed=prefill.completed + decode.committed,
            handoffs_aborted={
                reason.value: prefill.aborted[reason] + decode.aborted[reason] for reason in AbortReason
            },
            handoff_stale_messages=prefill.stale + decode.stale,
            handoff_fences=decode.fences,
            handoff_holds=(self._prefill.holds(), self._decode.holds()),
        )

    def load(self) -> worker_pb2.Load:
        load = self._engine.load()
        return worker_pb2.Load(
            running=load.running,
            waiting=load.waiting,
            waiting_prefill_tokens=load.waiting_prefill_tokens,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_held=load.blocks_held,
            preemptions=load.preemptions,
            open_handoffs=self._prefill.open_handoffs + self._decode.open_handoffs,
        )


def _delta(output: SequenceOutput, token: int) -> worker_pb2.TokenDelta:
    sequence = output.seq
    return worker_pb2.TokenDelta(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        # Not from len(output_ids): the engine may be a step ahead by now.
        first_seq=output.advanced_to - sequence.num_prompt,
        token_ids=[token],
        finish_reason=_FINISH[output.finish_reason],
        cached_tokens=sequence.num_cached,
    )
