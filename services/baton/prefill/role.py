"""What makes a worker prefill: it computes prompts and hands them on, block by block, to decode workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from baton.connector import wire
from baton.connector.identity import tokens_digest
from baton.connector.liveness import TEMPO, TICK_S, Tempo
from baton.connector.messages import (
    Action,
    Ask,
    Compute,
    Fail,
    Failure,
    First,
    LinkId,
    Name,
    Send,
    SendBlocks,
    Stop,
)
from baton.connector.prefill import Computed, Counters, PrefillHandoffs
from baton.connector.ranks.end import DataLink
from baton.connector.timeline import STAGE_OF, Stage, Timeline
from baton.connector.transport import TransferError
from baton.connector.wiring import Wiring
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.outlet import Outlet
from baton.engine.phases import microseconds
from baton.engine.sequence import Sequence, Status
from baton.engine.wire import forks_to_proto, given
from baton.logprobs import Logprobs, TokenDetails
from baton.prefill.links import UNREACHABLE, DecodeLinks, DecodePeer, LinkRefusedError
from baton.prefill.peers import Peer
from baton.telemetry.handoff import Holds
from baton.v1 import handoff_pb2 as pb
from baton.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    sequence: Sequence
    handle: bytes
    since: float = field(default_factory=time.monotonic)
    """When it came."""


def _first(answer: Sequence) -> First:
    details = answer.details
    return First(answer.output_ids[-1], b"" if details is None else details.to_proto().SerializeToString())


def _firsts(sequence: Sequence) -> tuple[First, ...]:
    """What decode goes on from: the first tokens of all answers or, with the first of them, what may come
    first in a beam search."""
    if sequence.candidates is None:
        return tuple(_first(answer) for answer in (sequence, *sequence.forked))
    asked = sequence.params.prompt_logprobs is not None
    prompt_logprobs = Logprobs.join(sequence.prompt_logprobs) if asked else None
    details = TokenDetails(sequence.candidates.told(), prompt_logprobs).to_proto().SerializeToString()
    likeliest = sequence.candidates.token_ids[0]
    return (First(likeliest, details), *(First(likeliest) for _ in sequence.forks))


class _SequencePages:
    """``baton.connector.prefill.SourcePages``: the blocks of the engine's sequences, as they are now."""

    def __init__(self, engine: Engine, requests: dict[Name, _Request]) -> None:
        self._pool = engine.pool
        self._requests = requests

    def finished(self, name: Name, blocks_per_page: int) -> tuple[int, ...]:
        request = self._requests.get(name)
        if request is None:
            return ()
        sequence, block_size = request.sequence, self._pool.block_size // blocks_per_page
        match sequence.status:
            case Status.HELD:  # the last block goes too, full or not
                count = -(-sequence.num_computed // block_size)
            case Status.RUNNING:
                count = sequence.num_computed // block_size
            case _:
                count = 0
        pages = sequence.block_ids[: -(-count // blocks_per_page)]
        return tuple(page * blocks_per_page + i for page in pages for i in range(blocks_per_page))[:count]

    def pin(self, pages: tuple[int, ...]) -> None:
        self._pool.pin(pages)

    def unpin(self, pages: tuple[int, ...]) -> None:
        self._pool.unpin(pages)


class PrefillRole:
    """Hands requests on over links to decode workers and carries out what the state machine decides.

    Everything here runs on the event loop's thread. The machine and the pool are touched under the engine's
    lock, which the engine's thread holds only between forwards.
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
        self._on_crash = on_crash
        self._requests: dict[Name, _Request] = {}
        self._machine = PrefillHandoffs(_SequencePages(engine, self._requests))
        self._timelines: dict[Name, Timeline] = {}
        self._tempo = tempo
        self._links = DecodeLinks(
            self._dial, self._on_opened, self._on_lost, self._machine.busy, wiring.tasks
        )
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> Counters:
        return self._machine.counters

    @property
    def open_handoffs(self) -> int:
        return self._machine.open_handoffs

    def holds(self) -> Holds:
        """What transfers pin at this moment. Any thread."""
        sends = (t.reached(Stage.READY) for t in list(self._timelines.values()))
        since = min((at for at in sends if at is not None), default=None)
        with self._engine.lock:
            pages = set(self._machine.pinned_pages())
        return Holds(len(pages), since)

    @property
    def open_requests(self) -> int:
        """Requests that wait for a link or room, or are being computed, to be handed on."""
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of requests that wait for a link or room, which the engine has not heard of."""
        requests = list(self._requests.values())  # a scrape asks on a thread of its own
        return sum(r.sequence.num_tokens for r in requests if r.sequence.arrival < 0)

    @property
    def bytes_per_s(self) -> float:
        """How fast blocks leave over one link, lately; 0.0 before the first did."""
        return self._wiring.metrics.bytes_per_s

    async def run_timers(self) -> None:
        """Listen for silence, for as long as the worker lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._links.tick(now - before)
            before = now
            self._do(self._machine.tick)

    @property
    def linked(self) -> bool:
        """Whether there is a link to a decode worker, or is about to be one."""
        return bool(self._links)

    async def close(self) -> None:
        """End every link; before the connectors are closed, or this process gets another name."""
        await self._links.close()

    def rename(self, wiring: Wiring) -> None:
        """The process has another name from now on. To be called while there are no links."""
        self._wiring = wiring

    def know_peers(self, router_id: str, peers: Iterable[Peer]) -> None:
        """Link to the decode workers that a router names, before it hands any request to them."""
        self._links.know(router_id, peers)

    def submit(self, sequence: Sequence, target: worker_pb2.DecodeTarget) -> None:
        """Take a request to prefill here and decode at ``target``. Failures go to the outlet."""
        name = Name(sequence.request_id, sequence.attempt)
        if name in self._requests:
            return
        sequence.hold_after_prefill = True
        self._requests[name] = _Request(sequence, target.handle)
        task = asyncio.create_task(self._ask(name, Peer(target.handoff_address, target.incarnation)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, name: Name) -> None:
        self._do(lambda now: self._machine.cancel(name, now))
        self._requests.pop(name, None)

    def overdue(self, now: float) -> list[Sequence]:
        """Requests to be handed on whose deadline has passed."""
        return [r.sequence for r in self._requests.values() if r.sequence.urgency.overdue(now)]

    def has_any_of(self, owner: str) -> bool:
        return any(request.sequence.owner == owner for request in self._requests.values())

    def cancel_all_of(self, owner: str) -> None:
        """The router ``owner`` is gone."""
        self._links.forget(owner)
        for name in [n for n, request in self._requests.items() if request.sequence.owner == owner]:
            self.cancel(name)

    def on_output(self, output: SequenceOutput) -> None:
        """A step computed some of a request's prompt, or sampled its first token."""
        sequence = output.seq
        if not sequence.hold_after_prefill:  # as for every token of decode: nothing to make a name for
            return
        name = Name(sequence.request_id, sequence.attempt)
        if name not in self._requests:
            return
        # Its first token was its last, and so were those of its forks: nothing to hand on.
        if output.finish_reason is not None and sequence.status is not Status.HELD:
            self._do(lambda now: self._machine.withdraw(name, "finished", now))
            self._requests.pop(name, None)
            return
        self._do(lambda _: self._progress(name, output))

    def _progress(self, name: Name, output: SequenceOutput) -> list[Action]:
        sequence = output.seq
        # Preempted since the step? Its state now, under the lock, is what counts.
        if sequence.status is not Status.HELD:
            return self._machine.progress(name)
        self._reach(name, Stage.COMPUTED, output.forward.ended)
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
            link = await self._links.to(peer)
        except LinkRefusedError as error:
            self._fail(name, f"decode refused the link: {error}", Failure.REFUSED)
            return
        except UNREACHABLE as error:
            log.warning("no link to decode at %s: %r", peer.address, error)
            self._fail(name, "decode cannot be reached", Failure.REFUSED)
            return
        request = self._requests.get(name)
        if request is None:  # cancelled meanwhile
            return
        connection = self._links.at(link)
        if connection is None:
            self._fail(name, "the link to decode was lost", Failure.REFUSED)
            return
        num_blocks = -(-request.sequence.num_tokens // connection.block_size)
        now = time.monotonic()
        self._timelines[name] = Timeline(now, connection.connector)
        if request.sequence.clock is not None:
            request.sequence.clock.asked = now
        self._do(lambda now: self._machine.ask(name, link, num_blocks, now))

    async def _dial(self, peer: Peer, on_lost: Callable[[DecodePeer], None]) -> DecodePeer:
        greeting = pb.LinkOpen(
            prefill_incarnation=self._wiring.incarnation,
            decode_incarnation=peer.incarnation,
            compatibility=self._wiring.compatibility,
            connectors=self._wiring.ends.connectors,
            prefill_address=self._wiring.address,
            verify=self._wiring.verify,
            ranks=[wire.share_to_proto(share) for share in self._wiring.ends.shares],
        )
        connection = DecodePeer(peer.address, self._wiring, self._on_message, on_lost, self._tempo)
        await connection.open(greeting)
        connection.living.add_done_callback(self._finished)
        return connection

    def _on_opened(self, connection: DecodePeer) -> None:
        assert connection.link is not None
        per_page = self._engine.pool.block_size // connection.block_size
        with self._engine.lock:
            self._machine.link_opened(connection.link, per_page)
        self._wiring.metrics.linked(connection.pair)

    def _on_lost(self, link: LinkId) -> None:
        self._do(lambda now: self._machine.link_lost(link, now))

    def _on_message(self, link: LinkId, message: pb.DecodeMessage) -> None:
        known = wire.from_decode(message)
        if known is not None:
            self._do(lambda now: self._machine.receive(link, known, now))

    # --- carrying out

    def _do(self, step: Callable[[float], list[Action]]) -> None:
        """Let the machine decide, and carry it out. A decision half carried out would leave pages pinned for
        ever, so an unexpected exception ends the worker."""
        try:
            with self._engine.lock:
                actions = step(time.monotonic())
            for action in actions:
                self._execute(action)
        except Exception:
            log.exception("a decision of the handoff could not be carried out; the worker cannot go on")
            self._on_crash()
            raise

    def _execute(self, action: Action) -> None:
        match action:
            case Send(link=link, message=message):
                self._send(link, message)  # type: ignore[arg-type]
            case SendBlocks():
                self._send_blocks(action)
            case Compute(name=name):
                self._reach(name, Stage.CREDITED)
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
            self._fail(name, str(error), Failure.FINAL)
            self._do(lambda now: self._machine.withdraw(name, "refused by the engine", now))

    def _send(self, link: LinkId, message: wire.FromPrefill | Ask) -> None:
        self._reach(message.name, STAGE_OF.get(type(message)))
        peer = self._links.at(link)
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
        """``Ask`` with the request whole; None if it was given up before this could be said."""
        request = self._requests.get(name)
        if request is None:
            return None
        sequence = request.sequence
        ask = pb.Ask(
            name=pb.Name(request_id=sequence.request_id, attempt=sequence.attempt),
            router_id=sequence.owner,
            prompt_ids=sequence.prompt_ids,
            output_ids=given(sequence),
            params=sequence.params.to_proto(),
            handle=request.handle,
            urgency=sequence.urgency.to_proto(time.monotonic()),
            forks=forks_to_proto(sequence),
            cache_salt=sequence.cache_salt,
        )
        return pb.PrefillMessage(ask=ask)

    def _send_blocks(self, action: SendBlocks) -> None:
        peer = self._links.at(action.link)
        if peer is None or peer.data is None:
            self._do(lambda now: self._machine.sent(action.link, action.tag, False, now))
            return
        task = asyncio.create_task(self._send_data(peer, peer.data, action))
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def _send_data(self, peer: DecodePeer, data: DataLink, action: SendBlocks) -> None:
        """Send blocks, and tell the machine how that ended, with the checksum of what was to be sent."""
        crc: int | None = None
        name = self._machine.name_of(action.link, action.tag)
        try:
            if peer.verify:
                crc = await data.checksum(action.blocks)
            peer.busy.start(time.monotonic())
            self._reach(name, Stage.POSTED)
            try:
                await data.send(action.tag, action.blocks)
            finally:
                peer.busy.end(time.monotonic())
            ok = True
        except TransferError:
            ok = False
        else:
            self._wiring.metrics.sent(peer.pair, len(action.blocks) * data.block_bytes)
            self._reach(name, Stage.SENT)
        self._do(lambda now: self._machine.sent(action.link, action.tag, ok, now, crc))

    def _finished(self, task: asyncio.Task[None]) -> None:
        """A send, and a link, must be followed to its end: pages hang on it."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a transfer or a link could not be followed to its end", exc_info=task.exception())
            self._on_crash()

    # --- stages

    def _reach(self, name: Name | None, stage: Stage | None, now: float | None = None) -> None:
        """``stage``: None for what marks none. ``now``: if it was earlier."""
        timeline = self._timelines.get(name) if name is not None else None
        if timeline is not None and stage is not None:
            timeline.reach(stage, time.monotonic() if now is None else now)

    def _record(self, name: Name) -> None:
        """Prefill has nothing more to do for the request."""
        timeline = self._timelines.pop(name, None)
        if timeline is not None:
            flush = timeline.between(Stage.COMPUTED, Stage.SENT)
            self._wiring.metrics.stage(timeline.connector, "flush", flush)
            log.debug("handoff %s", timeline.line(name))

    def _promised(self, name: Name) -> None:
        """Decode has room for the request."""
        request, timeline = self._requests.get(name), self._timelines.get(name)
        if request is not None and timeline is not None:
            self._wiring.metrics.stage(timeline.connector, "ask", time.monotonic() - request.since)

    def _fail(self, name: Name, reason: str, failure: Failure) -> None:
        log.warning("request %s (attempt %d) cannot be handed on (%s): %s", *name, failure.value, reason)
        self._timelines.pop(name, None)
        request = self._requests.pop(name, None)
        if request is None:
            return
        owner = request.sequence.owner
        match failure:
            case Failure.REFUSED:
                self._outlet.refuse(owner, *name, reason)
            case Failure.LOST:
                self._outlet.lose(owner, *name, reason)
            case Failure.FINAL:
                self._outlet.fail(owner, *name, reason)
