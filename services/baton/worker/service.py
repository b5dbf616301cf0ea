"""Router ↔ worker: submits and cancels come up the stream, frames of tokens go down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass

import grpc

from baton.connector.liveness import TEMPO, TICK_S, Tempo
from baton.connector.messages import AbortReason, Name
from baton.decode.role import DecodeRole
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.phases import Clock
from baton.engine.scheduler import BeamsDoNotFitError
from baton.engine.sequence import FinishReason, Sequence
from baton.engine.wire import sequence_from
from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.greeting.entrance import CallerRefusedError, Entrance
from baton.names import is_name
from baton.prefill.peers import peers_of
from baton.prefill.role import PrefillRole
from baton.request.limits import MAX_ANSWERS
from baton.rpc_status import end_with
from baton.telemetry.stages import Stages
from baton.telemetry.worker import WorkerStats
from baton.v1 import inference_pb2, worker_pb2
from baton.v1 import worker_pb2_grpc as pb_grpc
from baton.v1.greeting_pb2 import Challenge
from baton.worker.block_feed import BlockFeed
from baton.worker.bond import Bond
from baton.worker.routers import MOST_ROUTERS, Routers, RouterStream
from baton.worker.switch_request import Switching, SwitchRefusedError

log = logging.getLogger(__name__)

MOST_SUBMITS = 16_384
"""Requests of one router that are open here."""

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class OpenWork:
    """What keeps a worker that drains from ending; false when nothing does."""

    sequences: int
    """In the engine: waiting, running, or held for a handoff."""
    requests: int
    """To be handed on, and not computed yet."""
    handoffs: int
    blocks: int
    """Held by a sequence or a transfer."""
    links: int
    """To this worker, over which prefill workers may still ask for room."""
    routers: int
    """Those that may still submit."""

    def __bool__(self) -> bool:
        return any(astuple(self))

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences, {self.requests} requests to hand on, {self.handoffs} handoffs, "
            f"{self.blocks} blocks held, {self.links} links from prefill, "
            f"{self.routers} routers that may submit"
        )


class WorkerService(pb_grpc.WorkerServicer):
    """Serves ``Worker``. Event loop's thread only."""

    def __init__(
        self,
        engine: Engine,
        hello: worker_pb2.WorkerHello,
        routers: Routers,
        prefill: PrefillRole,
        decode: DecodeRole,
        tempo: Tempo = TEMPO,
        stages: Stages | None = None,
        *,
        cluster_key: bytes,
    ) -> None:
        """``stages`` hears what they take here. ``cluster_key``: what routers prove to have."""
        self._engine = engine
        self._hello = hello
        self._routers = routers
        self._prefill = prefill
        self._decode = decode
        self._tempo = tempo
        self._stages = stages
        self._entrance = Entrance(cluster_key, "router")
        self._draining = False
        self._deadlines_exceeded = 0
        self.switching: Switching | None = None
        """None: its role stays."""

    async def SwitchRole(  # noqa: N802 (the name is the contract's)
        self,
        request: worker_pb2.SwitchRoleRequest,
        context: grpc.aio.ServicerContext[worker_pb2.SwitchRoleRequest, worker_pb2.SwitchRoleReply],
    ) -> worker_pb2.SwitchRoleReply:
        if self.switching is None:
            end_with(context, grpc.StatusCode.UNIMPLEMENTED, "the role of this worker stays")
            return worker_pb2.SwitchRoleReply()
        try:
            return await self.switching.switch(request)
        except SwitchRefusedError as error:
            end_with(context, error.status, str(error))
            return worker_pb2.SwitchRoleReply()

    async def Connect(  # noqa: N802 (the name is the contract's)
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        messages = aiter(request_iterator)
        try:
            hello = await self._admit(messages, context)
            bond = self._bond_of(hello)
        except CallerRefusedError as error:
            self._entrance.count(context.peer(), error)
            end_with(context, error.status, str(error))
            return
        stream = self._welcome(hello.router_id)
        stream.bond = bond
        reader = asyncio.create_task(self._read(stream, messages))
        try:
            yield worker_pb2.WorkerMessage(hello=self._hello)
            while (frame := await stream.frames.get()) is not None:
                yield frame
        finally:
            reader.cancel()
            self._part(stream)

    async def _admit(
        self,
        messages: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> worker_pb2.RouterHello:
        """What a router says of itself that has proved who it is. Raises CallerRefusedError."""

        async def say(challenge: Challenge) -> None:
            await context.write(worker_pb2.WorkerMessage(challenge=challenge))

        name = await self._entrance.admit(messages, context.peer(), self._hello.incarnation, say)
        first = await self._entrance.next_of(messages, "hello", "RouterHello")
        if first.hello.router_id != name:
            raise self._entrance.wrong_name("router_id")
        if self._routers.full and not self._routers.connected(name):
            reason = f"{MOST_ROUTERS} routers are connected, as many as are allowed"
            raise CallerRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        return first.hello

    def _bond_of(self, hello: worker_pb2.RouterHello) -> Bond | None:
        """Raises CallerRefusedError."""
        try:
            return Bond.of(hello, self._hello.incarnation)
        except ValueError as error:
            raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    def _welcome(self, router_id: str) -> RouterStream:
        """A router has connected. If it was connected before, it has given up what it had submitted then."""
        stream = RouterStream(router_id, self.load, self._tempo, self._feed(), self._part)
        previous = self._routers.add(stream)
        if previous is not None:
            previous.end()
            self._cancel_all_of(router_id)
        stream.flush()
        log.info("router %s connected", router_id)
        return stream

    def _feed(self) -> BlockFeed | None:
        return BlockFeed(self._engine) if self._engine.scheduler.limits.prefix_caching else None

    def _part(self, stream: RouterStream) -> None:
        """A router's stream has ended, or is given up: so are its requests. Once for each stream."""
        if self._routers.remove(stream):
            self._cancel_all_of(stream.router_id)
            log.info("router %s disconnected", stream.router_id)

    async def _read(self, stream: RouterStream, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        try:
            async for message in messages:
                stream.pulse.heard()
                if message.HasField("drain_noted"):
                    stream.drain_noted = True
                elif message.HasField("snapshot_wanted") and stream.blocks is not None:
                    stream.blocks.restart()
                elif self._routers.is_current(stream):
                    self._take(stream.router_id, message)
        finally:
            self._part(stream)
            stream.end()

    def _take(self, router_id: str, message: worker_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._routers.count_submit(router_id)
                self._submit(router_id, message.submit)
            case "cancel":
                if is_name(message.cancel.request_id):  # what is unknown is remembered as cancelled
                    self._cancel(Name(message.cancel.request_id, message.cancel.attempt))
                for request_id in message.cancel.fork_ids[:MAX_ANSWERS]:
                    self._engine.cancel(request_id, message.cancel.attempt)
            case "peers":
                self._prefill.know_peers(router_id, peers_of(message.peers))
            case "heartbeat":
                pass  # that it was heard is all there is to it
            case other:
                log.warning("router %s sent %s: ignored", router_id, other)

    # --- requests

    def _submit(self, router_id: str, submit: worker_pb2.Submit) -> None:
        if self._draining:
            self._routers.refuse(router_id, submit.request_id, submit.attempt, "this worker is draining")
            return
        named = (router_id, submit.request_id, submit.attempt)
        if self._has_too_many_of(router_id):
            reason = f"{MOST_SUBMITS} requests of this router are here, as many as are allowed"
            self._routers.refuse(*named, reason)
            return
        arrived = time.monotonic()
        try:
            sequence = sequence_from(submit)
            sequence.owner = router_id
            sequence.clock = Clock(arrived)
            self._engine.check(sequence)
            # A request of one token has nothing to hand on.
            handed_on = submit.HasField("decode") and sequence.params.max_tokens - sequence.num_outputs > 1
            if handed_on:
                self._prefill.submit(sequence, submit.decode)
            else:
                self._engine.add(sequence)
        except GrammarBusyError as error:
            self._routers.fail(*named, str(error))
        except (GrammarError, BeamsDoNotFitError) as error:
            self._routers.reject(*named, str(error))
        except ValueError as error:
            self._routers.fail(*named, str(error))

    def _has_too_many_of(self, router_id: str) -> bool:
        """Whether another request of this router would be one too many. They are counted only where there may
        be as many."""
        parts = (self._engine, self._prefill)
        if sum(part.open_requests for part in parts) < MOST_SUBMITS:
            return False
        return sum(part.count_of(router_id) for part in parts) >= MOST_SUBMITS

    def _cancel(self, name: Name) -> None:
        self._prefill.cancel(name)
        self._decode.cancel(name)
        self._engine.cancel(*name)

    def _end_overdue(self, now: float) -> None:
        """End what has outlived its deadline, wherever it is. Nothing is kept of deadlines but where the
        requests are, so all that are here are looked at: there are not many."""
        overdue = {
            (seq.owner, Name(seq.request_id, seq.attempt))
            for part in (self._engine, self._prefill, self._decode)
            for seq in part.overdue(now)
        }
        for owner, name in overdue:
            self._deadlines_exceeded += 1
            self._cancel(name)
            self._routers.expire(owner, *name)

    def _cancel_all_of(self, router_id: str) -> None:
        self._prefill.cancel_all_of(router_id)
        self._decode.cancel_all_of(router_id)
        self._engine.cancel_all_of(router_id)

    # --- what comes out

    def on_start(self, started: list[Sequence]) -> None:
        """Requests are about to be computed here for the first time."""
        for seq in started:
            delta = worker_pb2.TokenDelta(request_id=seq.request_id, attempt=seq.attempt, started=True)
            self._routers.deliver(seq.owner, delta)

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Publish one step: a frame per router, and finished blocks to the handoffs."""
        for output in outputs:
            if output.error is not None:
                end = self._routers.fail if output.blameless else self._routers.reject
                end(*_named(output.seq), output.error)
            elif output.new_tokens:
                self._routers.deliver(output.seq.owner, _delta(output))
            if output.seq.clock is not None:
                self._tell_phases(output, output.seq.clock)
            self._prefill.on_output(output)
            self._decode.on_output(output)
            if output.new_tokens and output.is_first:
                self._measure(output)
        self._decode.room_changed()

    def _tell_phases(self, output: SequenceOutput, clock: Clock) -> None:
        """Once its prompt is computed, and what was given of its answer with it."""
        sequence = output.seq
        if output.advanced_to < sequence.num_prompt + sequence.resumed_from:
            return
        sequence.clock = None
        compute = clock.phases(output.forward.ended, time.monotonic())
        compute.preemptions, compute.cached_tokens = sequence.preemptions, sequence.num_cached
        phases = worker_pb2.Phases(request_id=sequence.request_id, attempt=sequence.attempt, compute=compute)
        self._routers.tell_phases(sequence.owner, phases)

    async def run_timers(self) -> None:
        """Report to the routers, listen for their silence, and keep to the deadlines, for as long as the
        worker lives."""
        before = time.monotonic()
        since_report = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            since_report += now - before
            if since_report >= self._tempo.heartbeat_s:
                since_report = 0.0
                self._routers.report_loads()
            self._end_overdue(now)
            for stream in self._routers.silent(now - before, self._busy_for):
                log.warning("router %s is silent: its requests are cancelled", stream.router_id)
                self._part(stream)
                stream.end()
            before = now

    def _measure(self, output: SequenceOutput) -> None:
        """A prompt is computed, and its first token sampled."""
        seq, ended = output.seq, output.forward.ended
        if self._stages is not None and seq.began_at:
            self._stages.took(
                {"prefill_queue": seq.began_at - seq.accepted_at, "prefill": ended - seq.began_at}
            )

    def _busy_for(self, router_id: str) -> bool:
        """Whether requests of this router are here."""
        return any(part.has_any_of(router_id) for part in (self._engine, self._prefill, self._decode))

    # --- the end

    def drain(self) -> None:
        """Refuse what is submitted from now on, and say so to the routers at once.

        A request that was placed before may still arrive from a prefill worker: it is taken over as always.
        """
        self._draining = True
        self._routers.report_loads()

    def say_drained(self) -> None:
        """Tell the routers that the end of their streams ends no request."""
        self._routers.say_drained()

    @property
    def linked(self) -> bool:
        """Whether there are links from here to decode workers, or are about to be."""
        return self._prefill.linked

    async def unlink(self) -> None:
        """End the links to decode workers, until a router names some again."""
        await self._prefill.close()

    def cut_off(self) -> None:
        """End what is open, without a word that it is done: the routers have it go on elsewhere, and call
        again. Links from prefill workers are fenced."""
        for stream in self._routers.callers():
            self._part(stream)
            stream.end()
        self._decode.fence_all()

    def resume(self) -> None:
        """Go on as before the drain. Routers call again, as they look upon this worker as one that ends."""
        self._draining = False
        self.cut_off()

    def greet_anew(self, hello: worker_pb2.WorkerHello) -> None:
        """Be another worker to the routers: those that are here hear that nothing of theirs is open, and all
        that call from now on get this greeting. To be called while nothing is open."""
        self._hello = hello
        self._draining = False
        for stream in self._routers.callers():
            self._routers.remove(stream)
            stream.say_drained()
            stream.end()

    def open_work(self) -> OpenWork:
        """What has not ended yet. Once a worker that drains has none, it gets none."""
        load = self._engine.load()
        return OpenWork(
            sequences=load.running + load.waiting + load.held,
            requests=self._prefill.open_requests,
            handoffs=self._prefill.open_handoffs + self._decode.open_handoffs,
            blocks=load.blocks_held,
            links=self._decode.open_links,
            routers=self._routers.unaware_of_drain,
        )

    def stats(self) -> WorkerStats:
        """Everything the worker exports. Any thread: a scrape has one of its own."""
        load = self._engine.load()
        prefill, decode = self._prefill.counters, self._decode.counters
        return WorkerStats(
            running=load.running,
            waiting=load.waiting,
            waiting_prefill_tokens=load.waiting_prefill_tokens + self._prefill.waiting_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            step_base_s=load.step_base_s,
            step_row_s=load.step_row_s,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_held=load.blocks_held,
            blocks_reserved=load.blocks_reserved,
            open_handoffs=self._prefill.open_handoffs + self._decode.open_handoffs,
            preemptions=load.preemptions,
            deadlines_exceeded=self._deadlines_exceeded,
            copied_blocks=load.copied_blocks,
            generated_tokens=load.generated_tokens,
            work=load.work,
            prefix_queried_tokens=load.prefix_queried_tokens,
            prefix_hit_tokens=load.prefix_hit_tokens,
            handoffs_completed=prefill.completed + decode.committed,
            handoffs_aborted={
                reason.value: prefill.aborted[reason] + decode.aborted[reason] for reason in AbortReason
            },
            handoff_stale_messages=prefill.stale + decode.stale,
            handoff_fences=decode.fences,
            handoff_holds=(self._prefill.holds(), self._decode.holds()),
            host_tier=load.host_tier,
            speculation=load.speculation,
            refused_callers={"router": dict(self._entrance.refused), "prefill": dict(self._decode.refused)},
        )

    def load(self) -> worker_pb2.Load:
        load = self._engine.load()
        return worker_pb2.Load(
            running=load.running,
            waiting=load.waiting,
            waiting_prefill_tokens=load.waiting_prefill_tokens + self._prefill.waiting_tokens,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_held=load.blocks_held,
            blocks_reserved=load.blocks_reserved,
            preemptions=load.preemptions,
            open_handoffs=self._prefill.open_handoffs + self._decode.open_handoffs,
            draining=self._draining,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            step_base_ms=load.step_base_s * 1e3,
            step_row_ms=load.step_row_s * 1e3,
            handoff_bytes_per_s=self._prefill.bytes_per_s,
        )


def _named(sequence: Sequence) -> tuple[str, str, int]:
    """Whose it is, and its name."""
    return sequence.owner, sequence.request_id, sequence.attempt


def _delta(output: SequenceOutput) -> worker_pb2.TokenDelta:
    sequence = output.seq
    delta = worker_pb2.TokenDelta(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        # Not from len(output_ids): the engine may be a step ahead by now.
        first_seq=output.first_new - sequence.num_prompt,
        token_ids=output.new_tokens,
        finish_reason=_FINISH[output.finish_reason],
        cached_tokens=sequence.num_cached,
    )
    if output.details is not None:
        delta.details.CopyFrom(output.details.to_proto())
    return delta
