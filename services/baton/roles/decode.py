"""The decode role of a worker: takes requests over from prefill workers and decodes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import aclosing
from functools import partial

import grpc

from baton.core.attempt_failure import AttemptFailure
from baton.core.logprobs import Logprobs
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.kv.arriving import Arriving
from baton.engine.outlet import Outlet
from baton.engine.request_proto import sequence_from
from baton.engine.sampling.beams import Candidates
from baton.engine.sequence import Sequence, SequenceStatus
from baton.engine.stop import stops
from baton.greeting.entrance import CallerRefusedError, Entrance
from baton.handoff import wire
from baton.handoff.decode import DecodeCounters, DecodeHandoffs, DecodeHandoffState
from baton.handoff.identity import handle_is_valid, tokens_digest
from baton.handoff.messages import (
    Action,
    Ask,
    CancelReceive,
    Commit,
    Fail,
    Fence,
    First,
    LinkId,
    Name,
    PostReceive,
    Retire,
    Send,
    Stop,
)
from baton.handoff.timeline import STAGE_OF, Stage, Timeline
from baton.handoff.wiring import Terms, Wiring, agree, check_names
from baton.net.heartbeat import TEMPO, OwnTime, Pulse, Tempo, ticks
from baton.net.rpc_status import end_with
from baton.roles.decode_links import EarlierLinksError, PrefillPeer
from baton.roles.decode_phases import handoff_phases, join_phases
from baton.roles.decode_room import PoolRoom
from baton.roles.driver import MachineDriver, Timelines
from baton.roles.engine_pages import EnginePages, PagesOfEngine
from baton.telemetry.handoff import Holds, Pair
from baton.transport.base import TransferError
from baton.transport.ranks.endpoints import DataChannel
from baton.v1 import handoff_pb2 as pb
from baton.v1 import handoff_pb2_grpc as pb_grpc
from baton.v1 import inference_pb2, worker_pb2
from baton.v1.greeting_pb2 import Challenge

log = logging.getLogger(__name__)

IN_LINE = 10
"""Multiple of ``Wiring.patience_s`` without progress that is allowed before prefill begins to compute."""

FOR_PAGES = 2
"""Multiple of ``Wiring.patience_s`` that a handoff may wait for decode's pages. It is small: of two full
workers that wait for each other's pages, one has to yield."""

MAX_LINKS = 4096
MAX_FENCED_BEFORE = 16
"""Most times that one offer waits for earlier links of its prefill process to be fenced."""

_STAGES = (
    ("room", Stage.ASKED, Stage.CREDITED),
    ("prefill", Stage.CREDITED, Stage.READY),
    ("grant", Stage.READY, Stage.GRANTED),
    ("transfer", Stage.GRANTED, Stage.ARRIVED),
    ("commit", Stage.ARRIVED, Stage.COMMITTED),
    ("start", Stage.COMMITTED, Stage.STARTED),
    ("first_step", Stage.STARTED, Stage.STEPPED),
)


class DecodeRole(pb_grpc.HandoffServicer):
    """Serves ``Handoff.Link`` to prefill workers, and executes the actions of the state machine.

    Methods run on the event loop's thread unless they say otherwise. The machine and the pool are touched
    under the engine's lock, which the engine's thread holds only between forwards.
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
        self._entrance = Entrance(wiring.keys, "prefill")
        self._outlet = outlet
        self._on_retire = on_retire
        self._tempo = tempo
        self._pages: EnginePages = PagesOfEngine(engine)
        self._room = PoolRoom(self._pages, engine.scheduler.turn_of)
        self._machine = DecodeHandoffs(
            wiring.incarnation, self._room, drained_is_proof=wiring.ends.drained_is_proof
        )
        self._time = OwnTime(time.monotonic())
        """The machine's clock, which stops while this process is paused: events that come late for that
        reason are handled before anything counts as overdue."""
        self._driver = MachineDriver(
            engine.lock, self._execute, on_crash, lambda: self._time.at(time.monotonic())
        )
        self._timelines = Timelines()
        self._joined: dict[Sequence, Timeline] = {}
        """The timelines of committed requests for which no step has computed anything yet."""
        self._peers: dict[LinkId, PrefillPeer] = {}
        self.data_addresses: Mapping[str, Many[str]] = {}
        """Connector → the address at which each rank's endpoint listens."""
        self.takes_over = True
        """Whether the role accepts links."""
        self.control_channels = 0
        """The number of control streams that prefill workers hold here, greeted or not."""

    @property
    def counters(self) -> DecodeCounters:
        return self._machine.counters

    @property
    def open_handoffs(self) -> int:
        return self._machine.open_handoffs

    def holds(self) -> Holds:
        """Return the pages that transfers pin now, and since when. Any thread."""
        since = self._timelines.oldest(Stage.GRANTED)
        with self._engine.lock:
            pages = self._machine.pinned_pages()
        return Holds(len(pages), since)

    @property
    def refused(self) -> Mapping[str, int]:
        """The number of callers that did not prove to be prefill workers of this ring, by status."""
        return self._entrance.refused

    @property
    def open_links(self) -> int:
        """The number of links, including those that are being fenced."""
        return len(self._peers)

    def rename(self, wiring: Wiring) -> None:
        """Give the process another name. Called only while there are no links."""
        self._wiring = wiring
        self._machine.incarnation = wiring.incarnation

    def fence_all(self) -> None:
        """Fence every link, which ends the handoffs on it."""
        for link in list(self._peers):
            self._driver.do(partial(self._machine.link_lost, link))

    async def run_timers(self) -> None:
        """Detect silent links, repeat messages and escalate, for as long as the worker lives."""
        async for now, elapsed in ticks():
            for peer in list(self._peers.values()):
                self._check_pulse(peer, elapsed)
            missed = self._time.tick(now)
            for timeline in self._timelines.values():
                timeline.moved_at += missed
            self._driver.do(self._machine.tick)
            self._give_up_stalled(now)

    def _check_pulse(self, peer: PrefillPeer, elapsed: float) -> None:
        if peer.pulse.tick(elapsed):
            peer.outbound.put_nowait(pb.DecodeMessage(heartbeat=pb.Heartbeat()))
        if peer.pulse.lost(partial(self._machine.busy, peer.id)):
            log.warning("prefill %s is silent: its link is fenced", peer.id.prefill)
            self._driver.do(lambda now: self._machine.link_lost(peer.id, now))

    def _give_up_stalled(self, now: float) -> None:
        """Give up handoffs that made no progress for too long on a healthy link: prefill may have forgotten
        them. Before its first blocks a handoff may have to wait in prefill's queue, and has ``IN_LINE`` times
        as long.

        The wait for a promise of room is decode's own doing and does not count. Nor is it prefill's fault if
        running requests have grown into the promised room. But two full workers may wait for each other's
        blocks, so that wait ends as well: the handoff is refused, for the router to try another decode
        worker.
        """
        for name, timeline in list(self._timelines.items()):
            ready, granted = (timeline.reached(s) is not None for s in (Stage.READY, Stage.GRANTED))
            patience = self._wiring.patience_s * (1 if granted else FOR_PAGES if ready else IN_LINE)
            if timeline.reached(Stage.CREDITED) is None or now - timeline.moved_at < patience:
                continue
            if ready and not granted:
                reason, failure = f"no pages came free here for {patience:g} s", AttemptFailure.REFUSED
            else:
                last = timeline.last.value
                reason = f"nothing has come from prefill for {patience:g} s; the handoff is {last}"
                failure = AttemptFailure.HANDOFF_LOST
            self._driver.do(partial(self._machine.stalled, name, reason, failure=failure))

    def room_changed(self) -> None:
        """Promise and bind blocks that may have come free since the last step."""
        if self._machine.open_handoffs:
            self._driver.do(lambda now: self._machine.pump(now))

    def cancel(self, name: Name) -> None:
        self._driver.do(lambda now: self._machine.cancel(name, now))

    def overdue(self, now: float) -> list[Sequence]:
        """Return the requests being handed on to this worker whose deadline has passed, without those given
        up whose pages may still be written to."""
        return [
            seq
            for name, seq in self._room.expected()
            if seq.priority.overdue(now) and self._machine.state_of(name) is not DecodeHandoffState.DRAINING
        ]

    def owner_of(self, request_id: str) -> str | None:
        """Return the owner of a request that is being handed on to this worker, in any attempt."""
        return self._room.owner_of(request_id)

    def has_any_of(self, owner: str) -> bool:
        return bool(self._room.owned_by(owner))

    def cancel_all_of(self, owner: str) -> None:
        """Cancel all handoffs of ``owner``, a router that is gone."""
        for name in self._room.owned_by(owner):
            self.cancel(name)

    # --- the control stream

    async def Link(  # noqa: N802 (the name is given by the proto)
        self,
        request_iterator: AsyncIterator[pb.PrefillMessage],
        context: grpc.aio.ServicerContext[pb.PrefillMessage, pb.DecodeMessage],
    ) -> AsyncIterator[pb.DecodeMessage]:
        self.control_channels += 1
        try:
            async with aclosing(self._serve(aiter(request_iterator), context)) as told:
                async for message in told:
                    yield message
        finally:
            self.control_channels -= 1

    async def _serve(
        self,
        messages: AsyncIterator[pb.PrefillMessage],
        context: grpc.aio.ServicerContext[pb.PrefillMessage, pb.DecodeMessage],
    ) -> AsyncGenerator[pb.DecodeMessage]:
        try:
            opened = await self._admit(messages, context)
        except CallerRefusedError as error:
            self._entrance.count(context.peer(), error)
            end_with(context, error.status, str(error))
            return
        try:
            peer = await self._accept(opened)
        except EarlierLinksError as error:
            end_with(context, grpc.StatusCode.UNAVAILABLE, str(error))
            return
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
            self._driver.do(lambda now: self._machine.link_lost(peer.id, now))

    async def _admit(
        self,
        messages: AsyncIterator[pb.PrefillMessage],
        context: grpc.aio.ServicerContext[pb.PrefillMessage, pb.DecodeMessage],
    ) -> pb.LinkOpen:
        """Authenticate a prefill worker and return its offer. Raises CallerRefusedError."""

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
        if len(self._peers) >= MAX_LINKS:
            reason = f"there are {MAX_LINKS} links, as many as are allowed"
            raise CallerRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        return opened.open

    async def _read(self, peer: PrefillPeer, messages: AsyncIterator[pb.PrefillMessage]) -> None:
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

    async def _accept(self, opened: pb.LinkOpen) -> PrefillPeer | pb.LinkRefuse:
        """Open a link for an offer, once the earlier links of that prefill process are fenced. Raises
        EarlierLinksError if the process dials all the time."""
        prefill = opened.prefill_incarnation
        for _ in range(MAX_FENCED_BEFORE):
            terms = self._terms(opened)
            if isinstance(terms, pb.LinkRefuse):
                return terms
            earlier = [peer for peer in self._peers.values() if peer.id.prefill == prefill]
            if not earlier and (peer := self._open(opened, terms)) is not None:
                return peer
            for old in earlier:  # the role of this worker may change meanwhile, and prefill may dial again
                self._driver.do(partial(self._machine.link_lost, old.id))
                await old.fenced.wait()
        raise EarlierLinksError

    def _open(self, opened: pb.LinkOpen, terms: Terms) -> PrefillPeer | None:
        """Make decode's end of a link, and say so to prefill. None: an earlier link must be fenced first."""
        prefill = opened.prefill_incarnation
        per_page = self._wiring.compatibility.block_size // terms.block_size
        with self._engine.lock:
            link = self._machine.open_link(prefill, per_page, verify=terms.verify)
        if link is None:
            return None
        try:
            peer, channels = self._expect(link, opened.prefill_address, terms)
        except BaseException:  # prefill was told of no channel, so no byte can come through the link
            self._driver.do(lambda now: self._machine.link_fenced(link, now))
            raise
        self._peers[link] = peer
        accept = pb.LinkAccept(
            decode_incarnation=self._wiring.incarnation,
            epoch=link.epoch,
            connector=terms.connector,
            block_size=terms.block_size,
            verify=terms.verify,
        )
        wire.accept_channels(accept, channels)
        peer.say(pb.DecodeMessage(accept=accept))
        self._wiring.metrics.linked(peer.pair)
        log.info("prefill %s linked, epoch %d, connector %s", prefill, link.epoch, terms.connector)
        if terms.arrives_as:
            kept = self._wiring.compatibility.kv_dtype
            log.info("KV of prefill %s is converted on arrival, %s to %s", prefill, terms.arrives_as, kept)
        return peer

    def _expect(self, link: LinkId, address: str, terms: Terms) -> tuple[PrefillPeer, Many[DataChannel]]:
        """Return decode's end of a link, and the data channels that prefill connects to."""
        ends = self._wiring.ends
        channels = ends.channels(terms.slices, self.data_addresses[terms.connector])

        def lost() -> None:
            self._driver.do(lambda now: self._machine.link_lost(link, now))

        data = ends.expect(terms.connector, terms.block_size, channels, lost, terms.arrives_as)
        return PrefillPeer(link, Pair(address, terms.connector), terms, data, Pulse(self._tempo)), channels

    def _take(self, link: LinkId, message: pb.PrefillMessage) -> None:
        if message.HasField("ask"):
            self._on_ask(link, message.ask)
            return
        known = wire.from_prefill(message, link)
        if known is not None:
            timeline = self._timelines.get(known.name)
            if timeline is not None and message.HasField("send_complete"):
                timeline.flush_us = message.send_complete.flush_us
            self._timelines.reach(known.name, STAGE_OF.get(type(known)))
            self._driver.do(lambda now: self._machine.receive(link, known, now))

    def _on_ask(self, link: LinkId, ask: pb.Ask) -> None:
        peer = self._peers.get(link)
        if peer is None:  # fenced meanwhile
            return
        name = wire.name_of(ask.name)
        if self._machine.state_of(name) is not None:  # a repeated Ask, whose request is known
            self._driver.do(lambda now: self._machine.receive(link, Ask(name, 0), now))
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
        # Not the tokens of the message: with forks, an earlier first token is replayed and not computed.
        num_tokens = sequence.num_tokens
        # Hash here: that takes a while for a long prompt, and the machine runs under the engine's lock.
        manifest = (num_tokens, tokens_digest(sequence.token_ids), 1 + len(sequence.forks))
        if self._engine.scheduler.limits.shares(sequence):
            sequence.extend_hashes(self._engine.pool.block_size, self._engine.pool.kv_dtype)

        def receive(now: float) -> list[Action]:
            self._room.expect(name, sequence, manifest)
            self._timelines[name] = Timeline(time.monotonic(), peer.pair.connector)
            turn = self._engine.scheduler.turn_of(sequence)
            actions = self._machine.receive(link, Ask(name, num_tokens, turn), now)
            if self._machine.state_of(name) is None:
                self._forget(name)
            return actions

        self._driver.do(receive)

    def _check(self, name: Name, sequence: Sequence, handle: bytes) -> None:
        """Raises ValueError, with the reason, if a request must not be admitted."""
        wiring = self._wiring
        if not handle_is_valid(handle, wiring.keys, name, wiring.incarnation, sequence.num_tokens):
            raise ValueError("invalid handle: do router and workers share one cluster key?")
        self._engine.check(sequence)

    # --- executing actions

    def _execute(self, action: Action) -> None:
        match action:
            case Send(link=link, message=message):
                self._timelines.reach(message.name, STAGE_OF.get(type(message)))
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
                self._driver.spawn(self._fence(link))
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
        if peer is None:  # fenced meanwhile; the machine knows, or will know soon
            return
        arrival = peer.data.post_receive(action.tag, action.blocks)
        self._driver.spawn(self._arrive(peer, action, arrival))

    async def _arrive(self, peer: PrefillPeer, action: PostReceive, arrival: Awaitable[None]) -> None:
        """Tell the machine the result of a receive, with the blocks' checksum on a link that verifies."""
        crc: int | None = None
        try:
            await arrival
            if peer.terms.verify:
                crc = await peer.data.checksum(action.blocks)
            ok = True
        except TransferError:
            ok = False
        else:
            num_bytes = peer.data.size_of(action.blocks)
            self._wiring.metrics.received(peer.pair, num_bytes)
            name = self._machine.name_of(action.link, action.tag)
            timeline = None if name is None else self._timelines.get(name)
            if timeline is not None:
                timeline.reach(Stage.ARRIVED, time.monotonic())
                timeline.received_bytes += num_bytes
        self._driver.do(lambda now: self._machine.received(action.link, action.tag, ok, now, crc))

    # --- stages

    def _forget(self, name: Name) -> None:
        self._room.take(name)
        self._timelines.pop(name, None)

    def on_output(self, output: SequenceOutput) -> None:
        """Take the output of a step. With the first step of a request that was taken over, its handoff is
        complete: measure its stages."""
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
        """Note that the engine has a request that was taken over. Forget requests that ended before a step
        computed anything for them."""
        timeline.reach(Stage.COMMITTED, time.monotonic())
        self._joined = {s: t for s, t in self._joined.items() if s.status is not SequenceStatus.FINISHED}
        self._joined[sequence] = timeline
        name = Name(sequence.request_id, sequence.attempt)
        self._outlet.tell_phases(sequence.owner, handoff_phases(name, timeline))

    def _commit(self, commit: Commit) -> None:
        timeline = self._timelines.pop(commit.name)
        with self._engine.lock:
            arriving = self._room.bound(commit.name)
            sequence = self._room.take(commit.name)
            if sequence is None:
                raise AssertionError(f"committed a request that was never asked for: {commit.name}")
            first_seq = sequence.num_outputs
            sequence.num_cached = commit.cached_tokens
            if sequence.params.beam_search is not None:
                self._admit_beams(sequence, commit, arriving, timeline)
                return
            answers = [sequence, *(sequence.fork(number) for number in range(len(sequence.forks)))]
            for answer, first in zip(answers, commit.firsts, strict=True):
                answer.append(first.token)
            refused = self._pages.admit_forked(answers, arriving)
        for answer, reason in refused.items():  # a newer attempt is here, or the token id is invalid
            log.warning("a committed handoff was refused: %s", reason)
            self._outlet.fail(
                answer.owner, answer.request_id, answer.attempt, AttemptFailure.WORKER_ERROR, reason
            )
        joined = [answer for answer in answers if answer.block_ids]
        if joined:
            self._join(joined[0], timeline)
        for answer, first in zip(answers, commit.firsts, strict=True):
            if answer not in refused:
                self._repeat_first(answer, first_seq, first)

    def _admit_beams(
        self, sequence: Sequence, commit: Commit, arriving: Arriving, timeline: Timeline
    ) -> None:
        """Begin a beam search from the candidates for its first tokens, none of which the router has seen."""
        details = worker_pb2.TokenDetails.FromString(commit.firsts[0].details)
        if details.HasField("prompt_logprobs"):
            sequence.add_prompt_logprobs(Logprobs.from_proto(details.prompt_logprobs))
        candidates = Candidates.of(Logprobs.from_proto(details.logprobs))
        try:
            self._pages.admit_beams(sequence, candidates, arriving)
        except ValueError as error:  # a newer attempt is here already, or the candidates are invalid
            log.warning("a committed handoff was refused: %s", error)
            self._outlet.fail(
                sequence.owner, sequence.request_id, sequence.attempt, AttemptFailure.WORKER_ERROR, str(error)
            )
        else:
            self._join(sequence, timeline)

    def _repeat_first(self, answer: Sequence, first_seq: int, first: First) -> None:
        """Send the first token of an answer to the router, with its details. Prefill has sent both as well:
        should prefill die now, or its frame come late, neither is lost."""
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
            self._outlet.fail(owner, *fail.name, fail.failure, fail.reason)

    async def _fence(self, link: LinkId) -> None:
        peer = self._peers.get(link)
        if peer is not None:
            await peer.data.close()
            peer.outbound.put_nowait(None)
        self._driver.do(lambda now: self._machine.link_fenced(link, now))
        if peer is not None:
            del self._peers[link]
            peer.fenced.set()
        log.info("the link of prefill %s, epoch %d, is fenced", link.prefill, link.epoch)
