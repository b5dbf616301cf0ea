"""The prefill role of a worker: computes prompts and hands them on, block by block, to decode workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.core.attempt_failure import AttemptFailure
from baton.core.logprobs import Logprobs, TokenDetails
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.outlet import Outlet
from baton.engine.phases import microseconds
from baton.engine.request_proto import delivered_tokens, forks_to_proto
from baton.engine.sequence import Sequence, SequenceStatus
from baton.handoff import wire
from baton.handoff.blocks import GroupBlocks
from baton.handoff.identity import tokens_digest
from baton.handoff.messages import (
    Action,
    Ask,
    Compute,
    Fail,
    First,
    LinkId,
    Name,
    Send,
    SendBlocks,
    Stop,
)
from baton.handoff.prefill import Computed, PrefillCounters, PrefillHandoffs
from baton.handoff.timeline import STAGE_OF, Stage, Timeline
from baton.handoff.wiring import Wiring
from baton.net.heartbeat import TEMPO, Tempo, ticks
from baton.roles.driver import MachineDriver, Timelines
from baton.roles.engine_pages import EnginePages, PagesOfEngine
from baton.roles.group_blocks import finished_blocks, wanted_blocks
from baton.roles.prefill_links import DecodeLinks, DecodePeer, LinkRefusedError, UnreachableError
from baton.roles.prefill_peers import Peer
from baton.telemetry.handoff import Holds
from baton.transport.base import TransferError
from baton.transport.ranks.endpoint import DataLink
from baton.v1 import handoff_pb2 as pb
from baton.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    sequence: Sequence
    handle: bytes
    since: float = field(default_factory=time.monotonic)
    """The time of the request's arrival, in seconds of ``time.monotonic``."""


def _first(answer: Sequence) -> First:
    details = answer.details
    return First(answer.output_ids[-1], b"" if details is None else details.to_proto().SerializeToString())


def _firsts(sequence: Sequence) -> tuple[First, ...]:
    """Return the first tokens that decode continues from, one for each answer. In a beam search all are the
    likeliest token, and the first carries the candidates."""
    if sequence.candidates is None:
        return tuple(_first(answer) for answer in (sequence, *sequence.forked))
    asked = sequence.params.prompt_logprobs is not None
    prompt_logprobs = Logprobs.join(sequence.prompt_logprobs) if asked else None
    details = TokenDetails(sequence.candidates.told(), prompt_logprobs).to_proto().SerializeToString()
    likeliest = sequence.candidates.token_ids[0]
    return (First(likeliest, details), *(First(likeliest) for _ in sequence.forks))


class _SequencePages:
    """``baton.handoff.prefill.SourcePages`` over the pages of the engine's sequences."""

    def __init__(self, pages: EnginePages, requests: dict[Name, _Request]) -> None:
        self._pages = pages
        self._requests = requests

    def finished(self, name: Name, blocks_per_page: int) -> tuple[GroupBlocks, ...]:
        request = self._requests.get(name)
        if request is None:
            return ()
        layout = self._pages.layout
        sequence, block_size = request.sequence, layout.block_size // blocks_per_page
        held = sequence.status is SequenceStatus.HELD
        match sequence.status:
            case SequenceStatus.HELD:  # the last block goes too, full or not, and the state
                count = -(-sequence.num_computed // block_size)
            case SequenceStatus.RUNNING:
                count = sequence.num_computed // block_size
            case _:
                return ()
        kept = self._pages.kept(sequence)
        return finished_blocks(
            layout.groups, kept.tables, kept.state_pages, kept.num_gone, count, blocks_per_page, whole=held
        )

    def pin(self, pages: tuple[int, ...]) -> None:
        self._pages.pin(pages)

    def unpin(self, pages: tuple[int, ...]) -> None:
        self._pages.unpin(pages)


class PrefillRole:
    """Hands requests on over links to decode workers, and executes the actions of the state machine.

    Methods run on the event loop's thread unless they say otherwise. The machine and the pool are touched
    under the engine's lock, which the engine's thread holds only between forwards.
    """

    def __init__(
        self,
        engine: Engine,
        wiring: Wiring,
        outlet: Outlet,
        on_crash: Callable[[], None],
        tempo: Tempo = TEMPO,
    ) -> None:
        self._engine = engine
        self._wiring = wiring
        self._outlet = outlet
        self._requests: dict[Name, _Request] = {}
        self._pages: EnginePages = PagesOfEngine(engine)
        self._machine = PrefillHandoffs(_SequencePages(self._pages, self._requests))
        self._driver = MachineDriver(engine.lock, self._execute, on_crash)
        self._timelines = Timelines()
        self._tempo = tempo
        self.links = DecodeLinks(self._dial, self._on_opened, self._on_lost, self._machine.busy, wiring.tasks)
        """The links to decode workers, closed before the connectors are and before ``rename``."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> PrefillCounters:
        return self._machine.counters

    @property
    def open_handoffs(self) -> int:
        return self._machine.open_handoffs

    def holds(self) -> Holds:
        """Return the pages that transfers pin now, and since when. Any thread."""
        since = self._timelines.oldest(Stage.READY)
        with self._engine.lock:
            pages = set(self._machine.pinned_pages())
        return Holds(len(pages), since)

    @property
    def open_requests(self) -> int:
        """Requests that wait for a link or room, or are being computed, to be handed on."""
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of requests that wait for a link or room, and that the engine does not know of yet."""
        requests = list(self._requests.values())  # copied, as scrapes run on another thread
        return sum(r.sequence.num_tokens for r in requests if r.sequence.arrival < 0)

    @property
    def bytes_per_s(self) -> float:
        """The recent rate at which one link sends blocks, in bytes per second; 0.0 before the first send."""
        return self._wiring.metrics.bytes_per_s

    async def run_timers(self) -> None:
        """Detect silent links and repeat messages, for as long as the worker lives."""
        async for _, elapsed in ticks():
            self.links.tick(elapsed)
            self._driver.do(self._machine.tick)

    def rename(self, wiring: Wiring) -> None:
        """Give the process another name. Called only while there are no links."""
        self._wiring = wiring

    def submit(self, sequence: Sequence, target: worker_pb2.DecodeTarget) -> None:
        """Take a request to prefill here and decode at ``target``. Failures are sent to the outlet."""
        name = Name(sequence.request_id, sequence.attempt)
        if name in self._requests:
            return
        sequence.hold_after_prefill = True
        self._requests[name] = _Request(sequence, target.handle)
        task = asyncio.create_task(self._ask(name, Peer(target.handoff_address, target.incarnation)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, name: Name) -> None:
        self._driver.do(lambda now: self._machine.cancel(name, now))
        self._requests.pop(name, None)

    def owner_of(self, name: Name) -> str | None:
        """Return the owner of a request that is here to be handed on."""
        request = self._requests.get(name)
        return None if request is None else request.sequence.owner

    def overdue(self, now: float) -> list[Sequence]:
        """Return the requests to be handed on whose deadline has passed."""
        return [r.sequence for r in self._requests.values() if r.sequence.priority.overdue(now)]

    def has_any_of(self, owner: str) -> bool:
        return any(request.sequence.owner == owner for request in self._requests.values())

    def count_of(self, owner: str) -> int:
        """Count the requests of this owner that are here to be handed on, waiting or being computed."""
        return sum(request.sequence.owner == owner for request in self._requests.values())

    def cancel_all_of(self, owner: str) -> None:
        """Cancel all requests of ``owner``, a router that is gone, and forget the peers that it named."""
        self.links.forget(owner)
        for name in [n for n, request in self._requests.items() if request.sequence.owner == owner]:
            self.cancel(name)

    def on_output(self, output: SequenceOutput) -> None:
        """Take the output of a step that computed part of a request's prompt, or sampled its first token."""
        sequence = output.seq
        if not sequence.hold_after_prefill:  # so for every decoded token: return before a Name is made
            return
        name = Name(sequence.request_id, sequence.attempt)
        if name not in self._requests:
            return
        # The first token of each answer was its last: nothing to hand on.
        if output.finish_reason is not None and sequence.status is not SequenceStatus.HELD:
            self._driver.do(lambda now: self._machine.withdraw(name, "finished", now))
            self._requests.pop(name, None)
            return
        self._driver.do(lambda _: self._progress(name, output))

    def _progress(self, name: Name, output: SequenceOutput) -> list[Action]:
        sequence = output.seq
        # The sequence may have been preempted since the step: its status now, under the lock, counts.
        if sequence.status is not SequenceStatus.HELD:
            return self._machine.progress(name)
        self._timelines.reach(name, Stage.COMPUTED, output.forward.ended)
        token_ids = sequence.token_ids[: sequence.num_computed]
        computed = Computed(
            num_tokens=len(token_ids),
            tokens_digest=tokens_digest(token_ids),
            firsts=_firsts(sequence),
            cached_tokens=sequence.num_cached,
        )
        return self._machine.computed(name, computed)

    # --- links

    async def _ask(self, name: Name, peer: Peer) -> None:
        try:
            link = await self.links.to(peer)
        except LinkRefusedError as error:
            self._fail(name, f"decode refused the link: {error}", AttemptFailure.REFUSED, error.field)
            return
        except UnreachableError as error:
            log.warning("no link to decode at %s: %s", peer.address, error)
            self._fail(name, "decode cannot be reached", AttemptFailure.REFUSED)
            return
        request = self._requests.get(name)
        if request is None:  # cancelled meanwhile
            return
        connection = self.links.at(link)
        if connection is None:
            self._fail(name, "the link to decode was lost", AttemptFailure.REFUSED)
            return
        num_tokens = request.sequence.num_tokens
        wanted = wanted_blocks(self._pages.layout.groups, num_tokens, connection.block_size)
        now = time.monotonic()
        self._timelines[name] = Timeline(now, connection.connector)
        if request.sequence.clock is not None:
            request.sequence.clock.asked = now
        self._driver.do(lambda now: self._machine.ask(name, link, num_tokens, wanted, now))

    async def _dial(self, peer: Peer, on_lost: Callable[[DecodePeer], None]) -> DecodePeer:
        greeting = pb.LinkOpen(
            prefill_incarnation=self._wiring.incarnation,
            decode_incarnation=peer.incarnation,
            compatibility=self._wiring.compatibility,
            connectors=self._wiring.ends.connectors,
            prefill_address=self._wiring.address,
            verify=self._wiring.verify,
            ranks=[wire.shard_to_proto(share) for share in self._wiring.ends.shares],
        )
        connection = DecodePeer(
            peer.address, self._wiring, self._on_message, on_lost, self._tempo, self.links.calls
        )
        await connection.open(greeting)
        self._driver.follow(connection.living)
        return connection

    def _on_opened(self, connection: DecodePeer) -> None:
        assert connection.link is not None
        per_page = self._engine.pool.block_size // connection.block_size
        with self._engine.lock:
            self._machine.link_opened(connection.link, per_page)
        self._wiring.metrics.linked(connection.pair)

    def _on_lost(self, link: LinkId) -> None:
        self._driver.do(lambda now: self._machine.link_lost(link, now))

    def _on_message(self, link: LinkId, message: pb.DecodeMessage) -> None:
        known = wire.from_decode(message)
        if known is not None:
            self._driver.do(lambda now: self._machine.receive(link, known, now))

    # --- executing actions

    def _execute(self, action: Action) -> None:
        match action:
            case Send(link=link, message=message):
                self._send(link, message)  # type: ignore[arg-type]
            case SendBlocks():
                self._send_blocks(action)
            case Compute(name=name):
                self._timelines.reach(name, Stage.CREDITED)
                self._promised(name)
                self._compute(name)
            case Stop(name=name):
                self._engine.cancel(*name)
                self._requests.pop(name, None)
                self._record(name)
            case Fail(name=name, reason=reason, failure=failure):
                self._fail(name, reason, failure)
            case _:
                raise AssertionError(f"not an action of prefill: {action}")

    def _compute(self, name: Name) -> None:
        request = self._requests.get(name)
        if request is None:
            return
        if request.sequence.clock is not None:
            request.sequence.clock.credited = time.monotonic()
        try:
            self._engine.add(request.sequence)
        except ValueError as error:  # a newer attempt of the request is here already
            self._fail(name, str(error), AttemptFailure.WORKER_ERROR)
            self._driver.do(lambda now: self._machine.withdraw(name, "refused by the engine", now))

    def _send(self, link: LinkId, message: wire.FromPrefill | Ask) -> None:
        self._timelines.reach(message.name, STAGE_OF.get(type(message)))
        peer = self.links.at(link)
        if peer is None:
            return
        if isinstance(message, Ask):
            peer.send(partial(self._asking, message.name))
        else:
            peer.send(self._told(message))

    def _told(self, message: wire.FromPrefill) -> pb.PrefillMessage:
        told = wire.to_decode(message)
        timeline = self._timelines.get(message.name)
        if told.HasField("send_complete") and timeline is not None:
            flush = timeline.between(Stage.COMPUTED, Stage.COMPLETE)
            told.send_complete.flush_us = microseconds(flush or 0.0)
        return told

    def _asking(self, name: Name) -> pb.PrefillMessage | None:
        """Return ``Ask`` with the whole request; None if the request was given up meanwhile."""
        request = self._requests.get(name)
        if request is None:
            return None
        sequence = request.sequence
        ask = pb.Ask(
            name=pb.Name(request_id=sequence.request_id, attempt=sequence.attempt),
            router_id=sequence.owner,
            prompt_ids=sequence.prompt_ids,
            output_ids=delivered_tokens(sequence),
            params=sequence.params.to_proto(),
            handle=request.handle,
            priority=sequence.priority.to_proto(time.monotonic()),
            forks=forks_to_proto(sequence),
            cache_salt=sequence.cache_salt,
        )
        return pb.PrefillMessage(ask=ask)

    def _send_blocks(self, action: SendBlocks) -> None:
        peer = self.links.at(action.link)
        if peer is None or peer.data is None:
            self._driver.do(lambda now: self._machine.sent(action.link, action.tag, False, now))
            return
        self._driver.spawn(self._send_data(peer, peer.data, action))

    async def _send_data(self, peer: DecodePeer, data: DataLink, action: SendBlocks) -> None:
        """Send blocks, and tell the machine the result, with the blocks' checksum on a link that verifies."""
        crc: int | None = None
        name = self._machine.name_of(action.link, action.tag)
        try:
            if peer.verify:
                crc = await data.checksum(action.blocks)
            peer.busy.start(time.monotonic())
            self._timelines.reach(name, Stage.POSTED)
            try:
                await data.send(action.tag, action.blocks)
            finally:
                peer.busy.end(time.monotonic())
            ok = True
        except TransferError:
            ok = False
        else:
            self._wiring.metrics.sent(peer.pair, data.size_of(action.blocks))
            self._timelines.reach(name, Stage.SENT)
        self._driver.do(lambda now: self._machine.sent(action.link, action.tag, ok, now, crc))

    # --- stages

    def _record(self, name: Name) -> None:
        """Record the stages of a request that prefill is done with."""
        timeline = self._timelines.pop(name, None)
        if timeline is not None:
            flush = timeline.between(Stage.COMPUTED, Stage.SENT)
            self._wiring.metrics.stage(timeline.connector, "flush", flush)
            log.debug("handoff %s", timeline.line(name))

    def _promised(self, name: Name) -> None:
        """Record the wait of a request that decode has promised room."""
        request, timeline = self._requests.get(name), self._timelines.get(name)
        if request is not None and timeline is not None:
            self._wiring.metrics.stage(timeline.connector, "ask", time.monotonic() - request.since)

    def _fail(self, name: Name, reason: str, failure: AttemptFailure, link_field: str = "") -> None:
        log.warning("request %s (attempt %d) cannot be handed on (%s): %s", *name, failure.value, reason)
        self._timelines.pop(name, None)
        request = self._requests.pop(name, None)
        if request is not None:
            self._outlet.fail(request.sequence.owner, *name, failure, reason, link_field)
