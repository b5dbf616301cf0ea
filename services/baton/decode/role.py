"""What makes a worker decode: it takes requests over from prefill workers and runs them on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial

import grpc

from baton.connector import wire
from baton.connector.decode import Counters, DecodeHandoffs, State
from baton.connector.identity import handle_is_valid, tokens_digest
from baton.connector.liveness import TEMPO, TICK_S, OwnTime, Pulse, Tempo
from baton.connector.messages import (
    Action,
    Ask,
    CancelReceive,
    Commit,
    Fail,
    Failure,
    Fence,
    First,
    LinkId,
    Name,
    PostReceive,
    Retire,
    Send,
    Stop,
)
from baton.connector.ranks.end import DataLink
from baton.connector.ranks.ends import Strand
from baton.connector.timeline import STAGE_OF, Stage, Timeline
from baton.connector.transport import TransferError
from baton.connector.wiring import Terms, Wiring, agree, check_names
from baton.decode.phases import handoff_phases, join_phases
from baton.decode.room import PoolRoom
from baton.engine.beams import Candidates
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.outlet import Outlet
from baton.engine.sequence import Sequence, Status
from baton.engine.stop import stops
from baton.engine.wire import sequence_from
from baton.greeting.entrance import CallerRefusedError, Entrance
from baton.logprobs import Logprobs
from baton.rpc_status import end_with
from baton.telemetry.handoff import Holds, Pair
from baton.v1 import handoff_pb2 as pb
from baton.v1 import handoff_pb2_grpc as pb_grpc
from baton.v1 import inference_pb2, worker_pb2
from baton.v1.greeting_pb2 import Challenge

log = logging.getLogger(__name__)

IN_LINE = 10
"""Times as long a handoff may show no life before prefill has begun to compute it."""

FOR_PAGES = 2
"""Times as long it may wait for pages of decode's. Not much longer: of two full workers that wait for each
other's, one has to give in."""

MOST_LINKS = 4096

_STAGES = (
    ("room", Stage.ASKED, Stage.CREDITED),
    ("prefill", Stage.CREDITED, Stage.READY),
    ("grant", Stage.READY, Stage.GRANTED),
    ("transfer", Stage.GRANTED, Stage.ARRIVED),
    ("commit", Stage.ARRIVED, Stage.COMMITTED),
    ("start", Stage.COMMITTED, Stage.STARTED),
    ("first_step", Stage.STARTED, Stage.STEPPED),
)


@dataclass(slots=True)
class _Peer:
    """One prefill worker's link: its control stream and its data connection, or those of each rank."""

    id: LinkId
    pair: Pair
    terms: Terms
    data: DataLink
    pulse: Pulse
    outbound: asyncio.Queue[pb.DecodeMessage | Awaitable[None] | None] = field(default_factory=asyncio.Queue)
    """What is only to be waited for holds back what is behind it."""
    fenced: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, message: pb.DecodeMessage) -> None:
        """Once all is in place that prefill may act upon (rule 1): receives may be posted in other
        processes."""
        waiting = self.data.in_place()
        if waiting is not None:
            self.outbound.put_nowait(waiting)
        self.outbound.put_nowait(message)


class DecodeRole(pb_grpc.HandoffServicer):
    """Serves ``Handoff.Link`` to prefill workers and carries out what the state machine decides.

    Everything here runs on the event loop's thread. The machine and the pool are touched under the engine's
    lock, which the engine's thread holds only between forwards.
    """

    def __init__(
        self,
        engine: Engine,
        wiring: Wiring,
        outlet: Outlet,
        on_retire: Callable[[], None],
        on_crash: Callable[[], None],
        tempo: Tempo = TEMPO,
    ) -> None:
        self._engine = engine
        self._wiring = wiring
        self._entrance = Entrance(wiring.cluster_key, "prefill")
        self._outlet = outlet
        self._on_retire = on_retire
        self._on_crash = on_crash
        self._tempo = tempo
        self._room = PoolRoom(engine)
        self._machine = DecodeHandoffs(
            wiring.incarnation, self._room, drained_is_proof=wiring.ends.drained_is_proof
        )
        self._time = OwnTime(time.monotonic())
        """The machine's: whatever is overdue after a pause of this process gets its turn before it is."""
        self._timelines: dict[Name, Timeline] = {}
        self._joined: dict[Sequence, Timeline] = {}
        """Of requests that no step has computed anything for since they were committed."""
        self._peers: dict[LinkId, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.data_addresses: Mapping[str, Many[str]] = {}
        """Connector → where each rank's listens."""
        self.takes_over = True
        """Whether it accepts links."""

    @property
    def counters(self) -> Counters:
        return self._machine.counters

    @property
    def open_handoffs(self) -> int:
        return self._machine.open_handoffs

    def holds(self) -> Holds:
        """What transfers pin at this moment. Any thread."""
        granted = (t.reached(Stage.GRANTED) for t in list(self._timelines.values()))
        since = min((at for at in granted if at is not None), default=None)
        with self._engine.lock:
            pages = self._machine.pinned_pages()
        return Holds(len(pages), since)

    @property
    def refused(self) -> Mapping[str, int]:
        """Callers that did not prove to be prefill workers of this ring, by status."""
        return self._entrance.refused

    @property
    def open_links(self) -> int:
        """Links over which prefill workers may still ask, and those being fenced."""
        return len(self._peers)

    def rename(self, wiring: Wiring) -> None:
        """The process has another name from now on. To be called while there are no links."""
        self._wiring = wiring
        self._machine.incarnation = wiring.incarnation

    def fence_all(self) -> None:
        """End every link, and with it what is being handed on over it."""
        for link in list(self._peers):
            self._do(partial(self._machine.link_lost, link))

    async def run_timers(self) -> None:
        """Listen for silence, resend and escalate, for as long as the worker lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for peer in list(self._peers.values()):
                self._check_pulse(peer, now - before)
            before = now
            missed = self._time.tick(now)
            for timeline in self._timelines.values():
                timeline.moved_at += missed
            self._do(self._machine.tick)
            self._give_up_stalled(now)

    def _check_pulse(self, peer: _Peer, elapsed: float) -> None:
        if peer.pulse.tick(elapsed):
            peer.outbound.put_nowait(pb.DecodeMessage(heartbeat=pb.Heartbeat()))
        if peer.pulse.lost(partial(self._machine.busy, peer.id)):
            log.warning("prefill %s is silent: its link is fenced", peer.id.prefill)
            self._do(lambda now: self._machine.link_lost(peer.id, now))

    def _give_up_stalled(self, now: float) -> None:
        """A handoff of which nothing has come for too long, though its link is healthy: prefill may have
        forgotten it. Before its first blocks it may have to stand in prefill's line, and has ten times as
        long.

        Waiting for a promise of room is decode's own affair and does not count. Nor is it prefill's fault if
        running requests have grown into what was promised. But two full workers may wait for each other's
        blocks, so that ends as well: refused here, for the router to try another decode worker.
        """
        for name, timeline in list(self._timelines.items()):
            ready, granted = (timeline.reached(s) is not None for s in (Stage.READY, Stage.GRANTED))
            patience = self._wiring.patience_s * (1 if granted else FOR_PAGES if ready else IN_LINE)
            if timeline.reached(Stage.CREDITED) is None or now - timeline.moved_at < patience:
                continue
            if ready and not granted:
                reason, failure = f"no pages came free here for {patience:g} s", Failure.REFUSED
            else:
                last = timeline.last.value
                reason = f"nothing has come from prefill for {patience:g} s; the handoff is {last}"
                failure = Failure.LOST
            self._do(partial(self._machine.stalled, name, reason, failure=failure))

    def room_changed(self) -> None:
        """Blocks may have come free since the last step."""
        if self._machine.open_handoffs:
            self._do(lambda now: self._machine.pump(now))

    def cancel(self, name: Name) -> None:
        self._do(lambda now: self._machine.cancel(name, now))

    def overdue(self, now: float) -> list[Sequence]:
        """Requests under way here whose deadline has passed. Those given up whose pages are still written to
        are over."""
        return [
            seq
            for name, seq in self._room.expected()
            if seq.urgency.overdue(now) and self._machine.state_of(name) is not State.DRAINING
        ]

    def has_any_of(self, owner: str) -> bool:
        return bool(self._room.owned_by(owner))

    def cancel_all_of(self, owner: str) -> None:
        """The router ``owner`` is gone."""
        for name in self._room.owned_by(owner):
            self.cancel(name)

    # --- the control stream

    async def Link(  # noqa: N802 (the name is the contract's)
        self,
        request_iterator: AsyncIterator[pb.PrefillMessage],
        context: grpc.aio.ServicerContext[pb.PrefillMessage, pb.DecodeMessage],
    ) -> AsyncIterator[pb.DecodeMessage]:
        messages = aiter(request_iterator)
        try:
            opened = await self._admit(messages, context)
        except CallerRefusedError as error:
            self._entrance.count(context.peer(), error)
            end_with(context, error.status, str(error))
            return
        peer = await self._accept(opened)
        if isinstance(peer, pb.LinkRefuse):
            log.warning("refused prefill at %s: %s", opened.prefill_address, peer.reason)
            yield pb.DecodeMessage(refuse=peer)
            return
        reader = asyncio.create_task(self._read(peer, messages))
        try:
            while (message := await peer.outbound.get()) is not None:
                if isinstance(message, pb.DecodeMessage):
                    yield message
                else:
                    await asyncio.shield(message)
        finally:
            reader.cancel()
            self._do(lambda now: self._machine.link_lost(peer.id, now))

    async def _admit(
        self,
        messages: AsyncIterator[pb.PrefillMessage],
        context: grpc.aio.ServicerContext[pb.PrefillMessage, pb.DecodeMessage],
    ) -> pb.LinkOpen:
        """What a prefill worker asks for, that has proved who it is. Raises CallerRefusedError."""

        async def say(challenge: Challenge) -> None:
            await context.write(pb.DecodeMessage(challenge=challenge))

        name = await self._entrance.admit(messages, context.peer(), self._wiring.incarnation, say)
        opened = await self._entrance.next_of(messages, "open", "LinkOpen")
        if opened.open.prefill_incarnation != name:
            raise self._entrance.wrong_name("prefill_incarnation")
        try:
            check_names(opened.open)
        except ValueError as error:
            raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        if len(self._peers) >= MOST_LINKS:
            reason = f"there are {MOST_LINKS} links, as many as are allowed"
            raise CallerRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        return opened.open

    async def _read(self, peer: _Peer, messages: AsyncIterator[pb.PrefillMessage]) -> None:
        try:
            async for message in messages:
                peer.pulse.heard()
                self._take(peer.id, message)
        finally:
            peer.outbound.put_nowait(None)

    def _terms(self, opened: pb.LinkOpen) -> Terms | pb.LinkRefuse:
        if not self.takes_over:
            return pb.LinkRefuse(reason="this worker takes no handoffs")
        return agree(self._wiring, opened)

    async def _accept(self, opened: pb.LinkOpen) -> _Peer | pb.LinkRefuse:
        terms = self._terms(opened)
        if isinstance(terms, pb.LinkRefuse):
            return terms
        prefill = opened.prefill_incarnation
        before = [peer for peer in self._peers.values() if peer.id.prefill == prefill]
        for old in before:
            self._do(partial(self._machine.link_lost, old.id))
            await old.fenced.wait()
        if before:  # this worker may have changed its role meanwhile
            return await self._accept(opened)
        per_page = self._wiring.compatibility.block_size // terms.block_size
        with self._engine.lock:
            link = self._machine.open_link(prefill, per_page, verify=terms.verify)
        if link is None:  # it has dialled twice, and the other call was first
            return await self._accept(opened)
        peer, strands = self._expect(link, opened.prefill_address, terms)
        accept = pb.LinkAccept(
            decode_incarnation=self._wiring.incarnation,
            epoch=link.epoch,
            connector=terms.connector,
            block_size=terms.block_size,
            verify=terms.verify,
        )
        wire.accept_strands(accept, strands)
        peer.say(pb.DecodeMessage(accept=accept))
        self._wiring.metrics.linked(peer.pair)
        log.info("prefill %s linked, epoch %d, connector %s", prefill, link.epoch, terms.connector)
        return peer

    def _expect(self, link: LinkId, address: str, terms: Terms) -> tuple[_Peer, Many[Strand]]:
        """Our end of the link, and how prefill gets to it."""
        ends = self._wiring.ends
        strands = ends.strands(terms.ties, self.data_addresses[terms.connector])

        def lost() -> None:
            self._do(lambda now: self._machine.link_lost(link, now))

        data = ends.expect(terms.connector, terms.block_size, strands, lost)
        peer = _Peer(link, Pair(address, terms.connector), terms, data, Pulse(self._tempo))
        self._peers[link] = peer
        return peer, strands

    def _take(self, link: LinkId, message: pb.PrefillMessage) -> None:
        if message.HasField("ask"):
            self._on_ask(link, message.ask)
            return
        known = wire.from_prefill(message, link)
        if known is not None:
            timeline = self._timelines.get(known.name)
            if timeline is not None and message.HasField("send_complete"):
                timeline.flush_us = message.send_complete.flush_us
            self._reach(known.name, STAGE_OF.get(type(known)))
            self._do(lambda now: self._machine.receive(link, known, now))

    def _on_ask(self, link: LinkId, ask: pb.Ask) -> None:
        peer = self._peers.get(link)
        if peer is None:  # fenced meanwhile
            return
        name = wire.name_of(ask.name)
        if self._machine.state_of(name) is not None:  # asked again: what it carries is here
            self._do(lambda now: self._machine.receive(link, Ask(name, 0), now))
            return
        try:
            sequence = sequence_from(ask)
            self._check(name, sequence, ask.handle)
        except ValueError as error:
            self._send(link, pb.DecodeMessage(decline=pb.Decline(name=ask.name, reason=str(error))))
            return
        if not self._outlet.connected(sequence.owner):
            reason = "its router is not connected to decode"
            decline = pb.Decline(name=ask.name, reason=reason, elsewhere=True)
            self._send(link, pb.DecodeMessage(decline=decline))
            return
        # Not what the message brings: of a request with forks, a first token is given back, not computed.
        num_blocks = -(-sequence.num_tokens // peer.terms.block_size)
        # Hashed here, as it takes a while for a long prompt and the machine runs under the engine's lock.
        manifest = (sequence.num_tokens, tokens_digest(sequence.token_ids), 1 + len(sequence.forks))
        if self._engine.scheduler.limits.shares(sequence):
            sequence.extend_hashes(self._engine.pool.block_size)

        def receive(now: float) -> list[Action]:
            self._room.expect(name, sequence, manifest)
            self._timelines[name] = Timeline(time.monotonic(), peer.pair.connector)
            turn = self._engine.scheduler.turn_of(sequence)
            actions = self._machine.receive(link, Ask(name, num_blocks, turn), now)
            if self._machine.state_of(name) is None:
                self._forget(name)
            return actions

        self._do(receive)

    def _check(self, name: Name, sequence: Sequence, handle: bytes) -> None:
        """ValueError, saying why, if this request must not come in."""
        if not handle_is_valid(
            handle, self._wiring.cluster_key, name, self._wiring.incarnation, sequence.num_tokens
        ):
            raise ValueError("invalid handle: do router and workers share one cluster key?")
        self._engine.check(sequence)

    # --- carrying out

    def _do(self, step: Callable[[float], list[Action]]) -> None:
        """Let the machine decide, and carry it out. A decision half carried out would leave pages pinned for
        ever, so an unexpected exception ends the worker."""
        try:
            with self._engine.lock:
                actions = step(self._time.at(time.monotonic()))
            for action in actions:
                self._execute(action)
        except Exception:
            log.exception("a decision of the handoff could not be carried out; the worker cannot go on")
            self._on_crash()
            raise

    def _execute(self, action: Action) -> None:
        match action:
            case Send(link=link, message=message):
                self._reach(message.name, STAGE_OF.get(type(message)))
                self._send(link, wire.to_prefill(message))  # type: ignore[arg-type]
            case PostReceive():
                self._post_receive(action)
            case CancelReceive(link=link, tag=tag):
                peer = self._peers.get(link)
                if peer is not None:
                    peer.data.cancel_receive(tag)
            case Commit():
                self._commit(action)
            case Stop(name=name):
                self._forget(name)
            case Fail():
                self._fail(action)
            case Fence(link=link):
                self._spawn(self._fence(link))
            case Retire(link=link):
                log.critical("the fence of %s did not complete: this worker must end", link)
                self._on_retire()
            case _:
                raise AssertionError(f"not an action of decode: {action}")

    def _send(self, link: LinkId, message: pb.DecodeMessage) -> None:
        peer = self._peers.get(link)
        if peer is not None:
            peer.say(message)

    def _post_receive(self, action: PostReceive) -> None:
        peer = self._peers.get(action.link)
        if peer is None:  # fenced meanwhile; the machine has been told, or is about to be
            return
        arrival = peer.data.post_receive(action.tag, action.blocks)
        self._spawn(self._arrive(peer, action, arrival))

    async def _arrive(self, peer: _Peer, action: PostReceive, arrival: Awaitable[None]) -> None:
        """Tell the machine how a receive ended, with the checksum of what lies here now."""
        crc: int | None = None
        try:
            await arrival
            if peer.terms.verify:
                crc = await peer.data.checksum(action.blocks)
            ok = True
        except TransferError:
            ok = False
        else:
            self._wiring.metrics.received(peer.pair, len(action.blocks) * peer.data.block_bytes)
            name = self._machine.name_of(action.link, action.tag)
            if name is not None:
                self._reach(name, Stage.ARRIVED)
        self._do(lambda now: self._machine.received(action.link, action.tag, ok, now, crc))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run ``work`` beside everything else. It must not fail: pages may hang on it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a transfer could not be followed to its end", exc_info=task.exception())
            self._on_crash()

    # --- stages

    def _reach(self, name: Name, stage: Stage | None) -> None:
        """``stage``: None for what marks none."""
        timeline = self._timelines.get(name)
        if timeline is not None and stage is not None:
            timeline.reach(stage, time.monotonic())

    def _forget(self, name: Name) -> None:
        self._room.take(name)
        self._timelines.pop(name, None)

    def on_output(self, output: SequenceOutput) -> None:
        """A step computed something. With the first one of a request that was taken over its handoff is
        through: measure its stages."""
        timeline = self._joined.pop(output.seq, None)
        if timeline is None:
            return
        timeline.reach(Stage.STARTED, output.forward.began)
        timeline.reach(Stage.STEPPED, output.forward.ended)
        for stage, start, end in _STAGES:
            self._wiring.metrics.stage(timeline.connector, stage, timeline.between(start, end))
        name = Name(output.seq.request_id, output.seq.attempt)
        phases = join_phases(name, timeline, output.forward.ended, time.monotonic())
        self._outlet.tell_phases(output.seq.owner, phases)
        log.debug("handoff %s", timeline.line(name))

    def _join(self, sequence: Sequence, timeline: Timeline) -> None:
        """The engine has a request that was taken over. Those that ended before a step computed anything for
        them are forgotten."""
        timeline.reach(Stage.COMMITTED, time.monotonic())
        self._joined = {s: t for s, t in self._joined.items() if s.status is not Status.FINISHED}
        self._joined[sequence] = timeline
        name = Name(sequence.request_id, sequence.attempt)
        self._outlet.tell_phases(sequence.owner, handoff_phases(name, timeline))

    def _commit(self, commit: Commit) -> None:
        timeline = self._timelines.pop(commit.name)
        with self._engine.lock:
            sequence = self._room.take(commit.name)
            if sequence is None:
                raise AssertionError(f"committed a request that was never asked for: {commit.name}")
            first_seq = sequence.num_outputs
            sequence.num_cached = commit.cached_tokens
            if sequence.params.beam_search is not None:
                self._admit_beams(sequence, commit, timeline)
                return
            answers = [sequence, *(sequence.fork(number) for number in range(len(sequence.forks)))]
            for answer, first in zip(answers, commit.firsts, strict=True):
                answer.append(first.token)
            refused = self._engine.admit_forked(answers, commit.pages)
        for answer, reason in refused.items():  # a newer attempt of the request is here, or the token is none
            log.warning("a committed handoff was refused: %s", reason)
            self._outlet.fail(answer.owner, answer.request_id, answer.attempt, reason)
        joined = [answer for answer in answers if answer.block_ids]
        if joined:
            self._join(joined[0], timeline)
        for answer, first in zip(answers, commit.firsts, strict=True):
            if answer not in refused:
                self._repeat_first(answer, first_seq, first)

    def _admit_beams(self, sequence: Sequence, commit: Commit, timeline: Timeline) -> None:
        """A beam search begins here, from what may come first: nothing of it has been told."""
        details = worker_pb2.TokenDetails.FromString(commit.firsts[0].details)
        if details.HasField("prompt_logprobs"):
            sequence.add_prompt_logprobs(Logprobs.from_proto(details.prompt_logprobs))
        candidates = Candidates.of(Logprobs.from_proto(details.logprobs))
        try:
            self._engine.admit_beams(sequence, candidates, commit.pages)
        except ValueError as error:  # a newer attempt is here already, or these candidates cannot be
            log.warning("a committed handoff was refused: %s", error)
            self._outlet.fail(sequence.owner, sequence.request_id, sequence.attempt, str(error))
        else:
            self._join(sequence, timeline)

    def _repeat_first(self, answer: Sequence, first_seq: int, first: First) -> None:
        """Prefill has sent this token to the router as well, and what goes with it: should prefill die now,
        or its frame come late, nothing of it is lost."""
        delta = worker_pb2.TokenDelta(
            request_id=answer.request_id,
            attempt=answer.attempt,
            first_seq=first_seq,
            token_ids=[first.token],
            cached_tokens=answer.num_cached,
            finish_reason=(
                inference_pb2.FINISH_REASON_STOP
                if stops(answer, self._engine.eos_token_ids)
                else inference_pb2.FINISH_REASON_UNSPECIFIED
            ),
        )
        if first.details:
            delta.details.ParseFromString(first.details)
        self._outlet.deliver(answer.owner, delta)

    def _fail(self, fail: Fail) -> None:
        log.warning("handoff of %s (attempt %d) failed: %s", *fail.name, fail.reason)
        owner = self._room.owner(fail.name)
        if owner is not None:
            tell = self._outlet.refuse if fail.failure is Failure.REFUSED else self._outlet.lose
            tell(owner, *fail.name, fail.reason)

    async def _fence(self, link: LinkId) -> None:
        peer = self._peers.get(link)
        if peer is not None:
            await peer.data.close()
            peer.outbound.put_nowait(None)
        self._do(lambda now: self._machine.link_fenced(link, now))
        if peer is not None:
            del self._peers[link]
            peer.fenced.set()
        log.info("the link of prefill %s, epoch %d, is fenced", link.prefill, link.epoch)
