"""The router's long-lived stream to one worker: dialled, greeted, read, and dialled again when it ends."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import grpc

from baton.core.attempt_failure import AttemptFailure, failure_from_proto
from baton.core.role import Role
from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import GREETING_S, Caller, GreetingError, NoChallengeError
from baton.net.channels import STREAM_OPTIONS, Dialer
from baton.net.heartbeat import NO_PROBES, TEMPO, Pulse, Tempo
from baton.net.message_parts import CONNECT, in_parts
from baton.router.fleet.compatibility import check_hello, group_of, role_of, taken_from
from baton.router.fleet.expected import ExpectedModel, WorkerRefusedError, check_worker
from baton.router.fleet.outliers import Outliers
from baton.router.fleet.step_times import StepTimes
from baton.router.fleet.unreported import UnreportedLoad
from baton.router.placement import WorkerReport
from baton.router.pulse.beats import Beats, new_nonce
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0
REFUSED_RETRY_S = 5.0
"""The time until a refused worker is dialled again, in seconds."""
CHANNEL_OPTIONS = (*STREAM_OPTIONS, *NO_PROBES)

Outbound = asyncio.Queue["pb.RouterMessage | None"]
Stream = grpc.aio.StreamStreamCall[bytes, pb.WorkerMessage]


class Watcher(Protocol):
    """The listener for the events of a worker."""

    def on_ready(self, worker: WorkerClient) -> None:
        """The worker's stream has begun; ``on_change`` follows."""

    def on_change(self, worker: WorkerClient) -> None:
        """The worker has become ready, or has begun to drain."""

    def on_frame(self, worker: WorkerClient, frame: pb.Frame) -> None: ...

    def on_blocks(self, worker: WorkerClient, events: pb.BlockEvents) -> bool:
        """The worker's prefix cache has stored and removed blocks. False: an event was missed."""

    def on_lost(self, worker: WorkerClient) -> None:
        """A stream that was ready has ended, and unless the worker was ``drained``, every request on it."""

    def busy(self, worker: WorkerClient) -> bool:
        """Whether a request is open on the worker."""


class Judge(Protocol):
    """The judge of whether a worker does its work well."""

    outliers: Outliers
    """The outlier detection, which gets the step times (see ``StepTimes``) and successes of workers by
    ``name``."""

    def failed(self, worker: WorkerClient) -> None:
        """A request ended by the worker's fault."""


class WorkerClient:
    """One worker as the router knows it."""

    def __init__(
        self,
        address: str,
        router_id: str,
        watcher: Watcher,
        tempo: Tempo = TEMPO,
        judge: Judge | None = None,
        dialer: Dialer | None = None,
        keys: ClusterKeys | None = None,
        beats: Beats | None = None,
        expected: ExpectedModel | None = None,
    ) -> None:
        """``beats``: the sender of heartbeats while the event loop is busy; None: no sender. ``expected``:
        the model that the worker must serve; None: any."""
        self.address = address
        self.name = address
        """A name that tells the worker from another one at the same address."""
        self.retired = False
        """Whether discovery no longer knows the worker: when its stream ends it is not dialled again."""
        self.load = pb.Load()
        self.drained = False
        """Whether the worker has said that all its requests are done: the end of its stream is no loss."""
        self.left_drained = False
        """Whether the worker's last stream ended as it had drained, and none has begun since."""
        self._router_id = router_id
        self._watcher = watcher
        self._tempo = tempo
        self._judge = judge
        self._dialer = dialer or Dialer()
        self._keys = keys or ClusterKeys()
        self.key = self._keys.current
        """The cluster key that the worker has proved last: what is signed for it is signed with this."""
        self._beats = beats
        self._expected = expected
        self.refused = False
        """Whether the worker's last greeting was not what is expected here."""
        self._refused_last = ""
        """The incarnation that was refused last."""
        self._pulse = Pulse(tempo)
        self._times = StepTimes()
        self._outbound: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._named: pb.DecodePeers | None = None
        """The decode workers named on this stream."""
        self._unreported = UnreportedLoad()
        self._coming = 0
        self._elsewhere = (0, 0)
        self._last_given_s = 0.0
        self._admits = True
        self._unlinked: frozenset[str] = frozenset()
        self._hello: pb.WorkerHello | None = None
        self.role: Role = "both"
        """The role in the worker's greeting; ``both`` while it is not ready."""
        self._report: WorkerReport | None = None

    @property
    def hello(self) -> pb.WorkerHello | None:
        """The worker's greeting; None while the worker is not ready."""
        return self._hello

    @hello.setter
    def hello(self, hello: pb.WorkerHello | None) -> None:
        self._hello = hello
        self.role = "both" if hello is None else role_of(hello)
        self._report = None

    @property
    def ready(self) -> bool:
        return self._hello is not None

    @property
    def draining(self) -> bool:
        return self.load.draining

    @property
    def usable(self) -> bool:
        """Whether the worker could take a request now, as far as it and discovery say."""
        return self.hello is not None and self._admits and not self.retired and not self.load.draining

    @property
    def idle(self) -> bool:
        """Whether none of this router's requests is open on the worker."""
        return not (self.ready and self._watcher.busy(self))

    def admit(self, new: bool) -> None:
        """Set whether discovery lets the worker have ``new`` requests, as it does at first."""
        if self._admits != new:
            self._admits = new
            self._report = None

    def retire(self, gone: bool = True) -> None:
        """Note that discovery no longer knows the worker, or does again. Its open requests go on."""
        self.retired = gone
        self._report = None

    def report(self) -> WorkerReport:
        """Return the last load report plus the load that it does not include yet; the same object while
        nothing is new."""
        if self._report is None:
            self._report = self._make_report()
        return self._report

    def _make_report(self) -> WorkerReport:
        hello, load = self.hello or pb.WorkerHello(), self.load
        sequences, tokens = self._elsewhere
        return WorkerReport(
            address=self.address,
            role=self.role,
            prefill_tokens=load.waiting_prefill_tokens + self._unreported.tokens + tokens,
            sequences=load.running + load.waiting + self._unreported.sequences + self._coming + sequences,
            group=" ".join(group_of(hello)),
            takes_from=tuple(" ".join(group) for group in taken_from(hello)),
            verifies=hello.verifies,
            unlinked=self._unlinked,
            last_given_s=self._last_given_s,
            accepts=self.usable,
            max_running=hello.max_running or 1 << 20,
            block_size=hello.block_size,
            blocks_held=load.blocks_held,
            blocks_spare=_blocks_spare(hello, load),
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            step_base_s=load.step_base_ms / 1e3,
            step_row_s=load.step_row_ms / 1e3,
            chunk_tokens=hello.chunk_tokens,
            mixed_prefill_tokens=hello.mixed_prefill_tokens,
            kv_bytes_per_token=hello.kv_bytes_per_token,
            link_bytes_per_s=load.handoff_bytes_per_s,
        )

    @property
    def unreported(self) -> tuple[int, int]:
        """Sequences and prompt tokens submitted since the worker's last report."""
        return self._unreported.sequences, self._unreported.tokens

    def note_elsewhere(self, sequences: int, prefill_tokens: int) -> None:
        """Set the load that other routers gave the worker and that it has not reported yet."""
        if self._elsewhere != (sequences, prefill_tokens):
            self._elsewhere = (sequences, prefill_tokens)
            self._report = None

    def note_unlinked(self, prefills: frozenset[str]) -> None:
        """Set the addresses of the prefill workers that can never be linked to this decode worker."""
        if self._unlinked != prefills:
            self._unlinked = prefills
            self._report = None

    def submit(self, submit: pb.Submit, uncached: int | None = None) -> None:
        """Send a request to the worker. ``uncached``: tokens that it is expected to compute; None: all."""
        num_tokens = len(submit.prompt_ids) + len(submit.output_ids) if uncached is None else uncached
        self._times.submitted(submit.request_id, num_tokens + self.report().prefill_tokens, time.monotonic())
        self._unreported.add(num_tokens, 1 + len(submit.forks))
        self.touch()
        self._outbound.put_nowait(pb.RouterMessage(submit=submit))

    def take_load(self, load: pb.Load) -> None:
        """Take in a load report of the worker."""
        self.load = load
        self._unreported.acknowledge(load)
        self._report = None

    def touch(self) -> None:
        """Note that the worker was given a request, directly or by way of a prefill worker."""
        self._last_given_s = time.monotonic()
        self._report = None

    def expect(self, sequences: int) -> None:
        """Set the number of sequences that are on their way to the worker from prefill workers."""
        if sequences != self._coming:
            self._coming = sequences
            self._report = None

    def cancel(self, request_id: str, attempt: int, fork_ids: Sequence[str] = ()) -> None:
        for each in (request_id, *fork_ids):
            self._times.cancelled(each)
        if self.ready:
            cancel = pb.Cancel(request_id=request_id, attempt=attempt, fork_ids=fork_ids)
            self._outbound.put_nowait(pb.RouterMessage(cancel=cancel))

    def name_peers(self, peers: pb.DecodePeers) -> None:
        """Tell a worker that may prefill of the decode workers, if the list has changed. ``peers`` is kept,
        and must not be changed."""
        if self.ready and peers != self._named:
            self._named = peers
            self._outbound.put_nowait(pb.RouterMessage(peers=peers))

    def tick(self, elapsed: float) -> bool:
        """Advance the timers by ``elapsed`` seconds, and close the stream of a worker that has been silent.
        True: it is time for ``beat``."""
        if self._reading is None:
            return False
        due = self._pulse.tick(elapsed)
        if self._pulse.lost(lambda: self._watcher.busy(self)):
            log.warning("worker %s is silent: its stream is closed", self.address)
            self._reading.cancel()
        return due

    def beat(self) -> None:
        """Send a heartbeat to the worker."""
        if self._reading is not None:
            self._outbound.put_nowait(pb.RouterMessage(heartbeat=pb.RouterHeartbeat()))

    async def run(self) -> None:
        """Keep a stream to the worker for as long as discovery knows it."""
        try:
            await self._keep_stream()
        finally:
            if self.ready and self.retired:  # no request was open on it
                self.drained = True
                self._lose()

    async def _keep_stream(self) -> None:
        pause = FIRST_RETRY_S
        distrust = ""
        while not self.retired:
            try:
                await self._stream_once()
                log.info("the stream of worker %s has ended", self.address)
            except (grpc.aio.AioRpcError, TimeoutError, GreetingError) as error:
                reason, stays = _why(error)
                news = self.ready or (reason != distrust and stays)
                log.log(logging.WARNING if news else logging.DEBUG, "%s: %s", self.address, reason)
                distrust, self.refused = reason, False
            except WorkerRefusedError as error:
                self._note_refusal(error)
                pause = REFUSED_RETRY_S
            except Exception:  # otherwise the worker would look ready for ever
                log.exception("what worker %s said could not be taken in: its stream is closed", self.address)
            finally:
                self._outbound.put_nowait(None)  # grpc waits for the next message even if the stream is over
            if self.ready:
                pause = FIRST_RETRY_S
                if self._judge is not None and not self.drained and self._watcher.busy(self):
                    self._judge.failed(self)
                self._lose()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_S)

    def _note_refusal(self, error: WorkerRefusedError) -> None:
        """Log a refusal, once for each process at the address."""
        self.refused = True
        if error.incarnation != self._refused_last:
            self._refused_last = error.incarnation
            log.error("worker %s is refused: %s", self.address, error)

    def _lose(self) -> None:
        self.hello = None
        self.left_drained = self.drained
        self._watcher.on_lost(self)  # may ask whether the worker drained, so before the load is reset
        self.load = pb.Load()
        self._report = None

    async def _stream_once(self) -> None:
        outbound = self._outbound = asyncio.Queue()
        self._unreported = UnreportedLoad()
        self._report = None
        self._named = None
        self._times = StepTimes()
        self.drained = False
        async with self._dialer.channel(self.address, CHANNEL_OPTIONS) as channel:
            connect = channel.stream_stream(CONNECT, None, pb.WorkerMessage.FromString)
            stream: Stream = connect(_outgoing(outbound))
            nonce = new_nonce()
            async with asyncio.timeout(GREETING_S):
                hello = await self._greet(stream, outbound, nonce)
            check_worker(hello, self._expected)
            self.hello, self.refused, self.left_drained = hello, False, False
            log.info("worker %s is ready: %s of %s", self.address, self.role, hello.model)
            self._watcher.on_ready(self)
            self._watcher.on_change(self)
            with self._heard_of(hello, nonce):
                await self._read_until_silent(stream)

    def _heard_of(self, hello: pb.WorkerHello, nonce: bytes) -> AbstractContextManager[None]:
        """Return a context during which the worker gets heartbeats even when the event loop is busy."""
        if self._beats is None:
            return nullcontext()
        return self._beats.to(self.address, hello.incarnation, nonce, self.key)

    async def _greet(self, stream: Stream, outbound: Outbound, beat_nonce: bytes) -> pb.WorkerHello:
        """Authenticate both sides and return the worker's greeting. ``beat_nonce``: the nonce that proves
        heartbeats sent beside the stream. Raises GreetingError, and what reading raises."""
        caller = Caller(self._keys, "router", self._router_id)
        outbound.put_nowait(pb.RouterMessage(greeting=caller.greeting))
        answer = await stream.read()
        if not isinstance(answer, pb.WorkerMessage) or not answer.HasField("challenge"):
            raise NoChallengeError
        outbound.put_nowait(pb.RouterMessage(proof=caller.prove(answer.challenge)))
        self.key = caller.agreed
        outbound.put_nowait(
            pb.RouterMessage(hello=pb.RouterHello(router_id=self._router_id, beat_nonce=beat_nonce))
        )
        first = await stream.read()
        if not isinstance(first, pb.WorkerMessage) or not first.HasField("hello"):
            raise GreetingError("it does not say what it is")
        if first.hello.incarnation != answer.challenge.incarnation:
            raise GreetingError("it says that it is another than it has proved to be")
        check_hello(first.hello)
        return first.hello

    async def _read_until_silent(self, stream: Stream) -> None:
        """Read in a task of its own, so that silence cancels the reading and not the caller."""
        self._pulse = Pulse(self._tempo, random.random())
        self._reading = asyncio.create_task(self._read(stream), name=f"read {self.address}")
        try:
            await asyncio.wait((self._reading,))
            with suppress(asyncio.CancelledError):  # of the reading task, not of this one
                self._reading.result()
        finally:
            self._reading.cancel()
            self._reading = None

    async def _read(self, stream: Stream) -> None:
        while isinstance(message := await stream.read(), pb.WorkerMessage):
            self._pulse.heard()
            match message.WhichOneof("message"):
                case "frame":
                    self._take(message.frame)
                case "drain_done":
                    self.drained = True
                case other:
                    log.warning("worker %s sent %s: ignored", self.address, other)

    def _take(self, frame: pb.Frame) -> None:
        begins_to_drain = frame.load.draining and not self.draining
        self.take_load(frame.load)
        if begins_to_drain:
            log.info("worker %s drains", self.address)
            self._outbound.put_nowait(pb.RouterMessage(drain_noted=pb.DrainNoted()))
            self._watcher.on_change(self)
        if frame.HasField("blocks") and not self._watcher.on_blocks(self, frame.blocks):
            log.info("block events of worker %s were missed: a snapshot is wanted", self.address)
            self._outbound.put_nowait(pb.RouterMessage(snapshot_wanted=pb.SnapshotWanted()))
        if self._judge is not None:
            self._judge_by(frame, self._judge)
        self._watcher.on_frame(self, frame)

    def _judge_by(self, frame: pb.Frame, judge: Judge) -> None:
        for seconds in self._times.take(frame, self.role, time.monotonic()):
            judge.outliers.observe(self.name, seconds)
        succeeded = False
        for delta in frame.deltas:
            if delta.finish_reason != inference_pb2.FINISH_REASON_ERROR:
                succeeded = succeeded or not delta.started
            elif failure_from_proto(delta) is AttemptFailure.WORKER_ERROR:
                # A handoff that is refused or lost may be the other worker's fault.
                judge.failed(self)
        if succeeded:
            judge.outliers.succeeded(self.name)


async def _outgoing(outbound: asyncio.Queue[pb.RouterMessage | None]) -> AsyncIterator[bytes]:
    while (message := await outbound.get()) is not None:
        for part in in_parts(message):
            yield part


def _why(error: grpc.aio.AioRpcError | TimeoutError | GreetingError) -> tuple[str, bool]:
    """Return why there is no stream, and whether the operator has to mend it: a worker that does not listen
    yet is no news, but one with another certificate or key stays that way."""
    if isinstance(error, GreetingError):
        return str(error), True
    if isinstance(error, TimeoutError):
        return "no answer in time", False
    reason = error.details() or ""
    denied = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    return reason, denied or "handshake failed" in reason.lower()


def _blocks_spare(hello: pb.WorkerHello, load: pb.Load) -> int | None:
    """Return the blocks that are free or reclaimable and not promised; None before the first load report, as
    a new worker must not pass for a full one."""
    spare = load.blocks_free + load.blocks_cached - load.blocks_reserved
    unknown = not hello.num_blocks or (spare == 0 and not load.ListFields())
    return None if unknown else spare
