"""The service that routers call: submits and cancels come in on a stream, frames of tokens go out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass

import grpc

from baton.core.attempt_failure import AttemptFailure
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.phases import Clock
from baton.engine.request_proto import sequence_from
from baton.engine.scheduler import BeamsDoNotFitError
from baton.engine.sequence import FinishReason, Sequence
from baton.engine.stats import EngineStats
from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.entrance import CallerRefusedError, Entrance
from baton.greeting.names import is_name
from baton.handoff.messages import AbortReason, Name
from baton.net.heartbeat import TEMPO, Tempo, ticks
from baton.net.rpc_status import end_with
from baton.request.limits import MAX_ANSWERS
from baton.roles.decode import DecodeRole
from baton.roles.prefill import PrefillRole
from baton.roles.prefill_peers import peers_of
from baton.telemetry.stages import Stages
from baton.v1 import inference_pb2, worker_pb2
from baton.v1 import worker_pb2_grpc as pb_grpc
from baton.v1.greeting_pb2 import Challenge
from baton.worker.block_feed import BlockFeed
from baton.worker.bond import Bond
from baton.worker.metrics import WorkerStats
from baton.worker.routers import MAX_ROUTERS, Routers, RouterStream
from baton.worker.switch_request import Switching, SwitchRefusedError

log = logging.getLogger(__name__)

MAX_SUBMITS = 16_384
"""Most open requests of one router."""

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class OpenWork:
    """The open work that keeps a draining worker from ending. False when there is none."""

    sequences: int
    """Sequences in the engine: waiting, running, or held for a handoff."""
    requests: int
    """Requests to be handed off and not computed yet."""
    handoffs: int
    blocks: int
    """KV blocks held by a sequence or a transfer."""
    links: int
    """Links to this worker, over which prefill workers may still ask for room."""
    routers: int
    """Routers that may still submit."""

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
        keys: ClusterKeys,
    ) -> None:
        """``stages`` observes the durations of stages. ``keys``: the cluster key that routers must prove to
        have."""
        self._engine = engine
        self._hello = hello
        self._routers = routers
        self._prefill = prefill
        self._decode = decode
        self._tempo = tempo
        self._stages = stages
        self._entrance = Entrance(keys, "router")
        self._draining = False
        self._deadlines_exceeded = 0
        self.switching: Switching | None = None
        """Switches the worker's role. None: the role cannot change."""

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
        """Return the hello of a router that has proved to have the cluster key. Raises CallerRefusedError."""

        async def say(challenge: Challenge) -> None:
            await context.write(worker_pb2.WorkerMessage(challenge=challenge))

        name = await self._entrance.admit(messages, context.peer(), self._hello.incarnation, say)
        first = await self._entrance.next_of(messages, "hello", "RouterHello")
        if first.hello.router_id != name:
            raise self._entrance.wrong_name("router_id")
        if self._routers.full and not self._routers.connected(name):
            reason = f"{MAX_ROUTERS} routers are connected, as many as are allowed"
            raise CallerRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        return first.hello

    def _bond_of(self, hello: worker_pb2.RouterHello) -> Bond | None:
        """Raises CallerRefusedError."""
        try:
            return Bond.of(hello, self._hello.incarnation)
        except ValueError as error:
            raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    def _welcome(self, router_id: str) -> RouterStream:
        """Add the stream of a router that has connected. If it was connected before, it has given up its
        earlier requests: they are cancelled."""
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
        """Remove a stream that has ended or is given up, and cancel the router's requests. Does nothing for a
        stream removed before."""
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
                self._cancel_for(router_id, message.cancel)
            case "peers":
                self._prefill.links.know(router_id, peers_of(message.peers))
            case "heartbeat":
                pass  # the pulse has heard it
            case other:
                log.warning("router %s sent %s: ignored", router_id, other)

    # --- requests

    def _submit(self, router_id: str, submit: worker_pb2.Submit) -> None:
        named = (router_id, submit.request_id, submit.attempt)
        if self._draining:
            self._routers.fail(*named, AttemptFailure.REFUSED, "this worker is draining")
            return
        if self._has_too_many_of(router_id):
            reason = f"{MAX_SUBMITS} requests of this router are here, as many as are allowed"
            self._routers.fail(*named, AttemptFailure.REFUSED, reason)
            return
        arrived = time.monotonic()
        try:
            sequence = sequence_from(submit)
            sequence.owner = router_id
            sequence.clock = Clock(arrived)
            self._engine.check(sequence)
            # A request of one token has nothing to hand off.
            handed_on = submit.HasField("decode") and sequence.params.max_tokens - sequence.num_outputs > 1
            if handed_on:
                self._prefill.submit(sequence, submit.decode)
            else:
                self._engine.add(sequence)
        except GrammarBusyError as error:
            self._routers.fail(*named, AttemptFailure.WORKER_ERROR, str(error))
        except (GrammarError, BeamsDoNotFitError) as error:
            self._routers.fail(*named, AttemptFailure.INVALID, str(error))
        except ValueError as error:
            self._routers.fail(*named, AttemptFailure.WORKER_ERROR, str(error))

    def _has_too_many_of(self, router_id: str) -> bool:
        """Whether another request of this router would be too many. The router's requests are counted only if
        all routers together have as many."""
        parts = (self._engine, self._prefill)
        if sum(part.open_requests for part in parts) < MAX_SUBMITS:
            return False
        return sum(part.count_of(router_id) for part in parts) >= MAX_SUBMITS

    def _cancel_for(self, router_id: str, cancel: worker_pb2.Cancel) -> None:
        """Cancel what this router has submitted, here or by way of a prefill worker. A request that is not
        here is remembered as cancelled."""
        name = Name(cancel.request_id, cancel.attempt)
        if is_name(name.request_id) and self._belongs(name, router_id):
            self._cancel(name)
        for request_id in cancel.fork_ids[:MAX_ANSWERS]:
            if self._engine.owner_of(request_id) in (router_id, None):
                self._engine.cancel(request_id, cancel.attempt)

    def _belongs(self, name: Name, router_id: str) -> bool:
        """Return whether no other router has a request of this name here."""
        owners = {
            self._engine.owner_of(name.request_id),
            self._prefill.owner_of(name),
            self._decode.owner_of(name.request_id),
        }
        if owners <= {router_id, None}:
            return True
        log.warning("router %s cancels a request of another router: ignored", router_id)
        return False

    def _cancel(self, name: Name) -> None:
        self._prefill.cancel(name)
        self._decode.cancel(name)
        self._engine.cancel(*name)

    def _end_overdue(self, now: float) -> None:
        """End the requests whose deadline has passed, wherever they are. There is no index of deadlines: all
        requests here are checked, as they are not many."""
        overdue = {
            (seq.owner, Name(seq.request_id, seq.attempt))
            for part in (self._engine, self._prefill, self._decode)
            for seq in part.overdue(now)
        }
        for owner, name in overdue:
            self._deadlines_exceeded += 1
            self._cancel(name)
            self._routers.fail(owner, *name, AttemptFailure.EXPIRED, "the request's deadline has passed")

    def _cancel_all_of(self, router_id: str) -> None:
        self._prefill.cancel_all_of(router_id)
        self._decode.cancel_all_of(router_id)
        self._engine.cancel_all_of(router_id)

    # --- what comes out

    def on_start(self, started: list[Sequence]) -> None:
        """Tell routers of requests that are about to be computed here for the first time."""
        for seq in started:
            delta = worker_pb2.TokenDelta(request_id=seq.request_id, attempt=seq.attempt, started=True)
            self._routers.deliver(seq.owner, delta)

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Publish one step: a frame for each router, and finished blocks for the handoffs."""
        for output in outputs:
            if output.error is not None:
                failure = AttemptFailure.WORKER_ERROR if output.blameless else AttemptFailure.INVALID
                self._routers.fail(*_named(output.seq), failure, output.error)
            elif output.new_tokens:
                self._routers.deliver(output.seq.owner, delta_of(output))
            if output.seq.clock is not None:
                self._tell_phases(output, output.seq.clock)
            self._prefill.on_output(output)
            self._decode.on_output(output)
            if output.new_tokens and output.is_first:
                self._measure(output)
        self._decode.room_changed()

    def _tell_phases(self, output: SequenceOutput, clock: Clock) -> None:
        """Send a request's phases once its prompt, and the resumed part of its answer, are computed."""
        sequence = output.seq
        if output.advanced_to < sequence.num_prompt + sequence.resumed_from:
            return
        sequence.clock = None
        compute = clock.phases(output.forward.ended, time.monotonic())
        compute.preemptions, compute.cached_tokens = sequence.preemptions, sequence.num_cached
        phases = worker_pb2.Phases(request_id=sequence.request_id, attempt=sequence.attempt, compute=compute)
        self._routers.tell_phases(sequence.owner, phases)

    async def run_timers(self) -> None:
        """Report to the routers, detect their silence, and enforce deadlines, for as long as the worker
        lives."""
        since_report = 0.0
        async for now, elapsed in ticks():
            since_report += elapsed
            if since_report >= self._tempo.heartbeat_s:
                since_report = 0.0
                self._routers.report_loads()
            self._end_overdue(now)
            for stream in self._routers.silent(elapsed, self._busy_for):
                log.warning("router %s is silent: its requests are cancelled", stream.router_id)
                self._part(stream)
                stream.end()

    def _measure(self, output: SequenceOutput) -> None:
        """Observe the stages of a prompt that is computed and whose first token is sampled."""
        seq, ended = output.seq, output.forward.ended
        if self._stages is not None and seq.began_at:
            self._stages.observe(
                {"prefill_queue": seq.began_at - seq.accepted_at, "prefill": ended - seq.began_at}
            )

    def _busy_for(self, router_id: str) -> bool:
        """Whether requests of this router are here."""
        return any(part.has_any_of(router_id) for part in (self._engine, self._prefill, self._decode))

    # --- the end

    def drain(self) -> None:
        """Refuse submits from now on, and tell the routers at once.

        A request placed before may still arrive from a prefill worker: it is taken over as always.
        """
        self._draining = True
        self._routers.report_loads()

    def cut_off(self) -> None:
        """End what is open without reporting its end: routers resume it elsewhere, and call again. Links from
        prefill workers are fenced."""
        for stream in self._routers.callers():
            self._part(stream)
            stream.end()
        self._decode.fence_all()

    def resume(self) -> None:
        """Go on as before the drain. Routers are cut off and call again: they take this worker for one that
        ends."""
        self._draining = False
        self.cut_off()

    def greet_anew(self, hello: worker_pb2.WorkerHello) -> None:
        """Appear to routers as another worker. Connected routers are told that the worker has drained, and
        routers that call from now on get ``hello``. Call it while nothing is open."""
        self._hello = hello
        self._draining = False
        for stream in self._routers.callers():
            self._routers.remove(stream)
            stream.say_drained()
            stream.end()

    def open_work(self) -> OpenWork:
        """Return the open work. A draining worker that has none gets no more."""
        engine = self._engine.stats()
        return OpenWork(
            sequences=engine.running + engine.waiting + engine.held,
            requests=self._prefill.open_requests,
            handoffs=self._open_handoffs,
            blocks=engine.blocks.held,
            links=self._decode.open_links,
            routers=self._routers.unaware_of_drain,
        )

    def stats(self) -> WorkerStats:
        """Return everything that the worker exports. May be called from any thread: a scrape has its own."""
        engine = self._engine.stats()
        prefill, decode = self._prefill.counters, self._decode.counters
        return WorkerStats(
            engine=engine,
            waiting_prefill_tokens=self._waiting_prefill_tokens(engine),
            open_handoffs=self._open_handoffs,
            deadlines_exceeded=self._deadlines_exceeded,
            handoff_links=self._prefill.links.open_links + self._decode.open_links,
            handoff_control_channels=self._prefill.links.control_channels + self._decode.control_channels,
            handoffs_completed=prefill.completed + decode.committed,
            handoff_stale_messages=prefill.stale + decode.stale,
            handoff_fences=decode.fences,
            handoffs_aborted={
                reason.value: prefill.aborted[reason] + decode.aborted[reason] for reason in AbortReason
            },
            handoff_holds=(self._prefill.holds(), self._decode.holds()),
            refused_callers={"router": dict(self._entrance.refused), "prefill": dict(self._decode.refused)},
        )

    def load(self) -> worker_pb2.Load:
        """Return the load report for routers."""
        engine = self._engine.stats()
        blocks, pace = engine.blocks, engine.pace
        pages = self._engine.layout.num_tables  # of a block of all layers: routers count blocks
        return worker_pb2.Load(
            running=engine.running,
            waiting=engine.waiting,
            waiting_prefill_tokens=self._waiting_prefill_tokens(engine),
            blocks_free=blocks.free // pages,
            blocks_cached=blocks.cached // pages,
            blocks_held=blocks.held // pages,
            blocks_reserved=-(-engine.blocks_reserved // pages),
            preemptions=engine.scheduler.preemptions,
            open_handoffs=self._open_handoffs,
            draining=self._draining,
            prefill_tokens_per_s=pace.prefill_tokens_per_s,
            step_base_ms=pace.step_base_s * 1e3,
            step_row_ms=pace.step_row_s * 1e3,
            handoff_bytes_per_s=self._prefill.bytes_per_s,
            prompt_tokens=engine.work.prompt_tokens,
            generated_tokens=engine.generated_tokens,
        )

    def _waiting_prefill_tokens(self, engine: EngineStats) -> int:
        return engine.waiting_prefill_tokens + self._prefill.waiting_tokens

    @property
    def _open_handoffs(self) -> int:
        return self._prefill.open_handoffs + self._decode.open_handoffs


def _named(sequence: Sequence) -> tuple[str, str, int]:
    """Return the owner of a sequence and its name: request id and attempt."""
    return sequence.owner, sequence.request_id, sequence.attempt


def delta_of(output: SequenceOutput) -> worker_pb2.TokenDelta:
    """Return what a router is told of a step's tokens of one sequence."""
    sequence = output.seq
    delta = worker_pb2.TokenDelta(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        # len(output_ids) would be wrong: the engine may be a step ahead by now.
        first_seq=output.first_new - sequence.num_prompt,
        token_ids=output.new_tokens,
        finish_reason=_FINISH[output.finish_reason],
        cached_tokens=sequence.num_cached,
    )
    if output.details is not None:
        delta.details.CopyFrom(output.details.to_proto())
    return delta
