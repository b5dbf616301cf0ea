"""What makes a worker prefill: it computes prompts and hands them on, block by block, to decode workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from baton.connector import wire
from baton.connector.identity import tokens_digest
from baton.connector.liveness import TEMPO, TICK_S, Tempo
from baton.connector.messages import Action, Ask, Compute, Fail, LinkId, Name, Send, SendPages, Stop
from baton.connector.prefill import Computed, Counters, PrefillHandoffs
from baton.connector.transport import Connector, KVMemory
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.outlet import Outlet
from baton.engine.sequence import Sequence, Status
from baton.prefill.links import UNREACHABLE, DecodeLinks, DecodePeer, LinkRefusedError
from baton.prefill.peers import Peer
from baton.v1 import handoff_pb2 as pb
from baton.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    sequence: Sequence
    handle: bytes


class _SequencePages:
    """``baton.connector.prefill.SourcePages``: the blocks of the engine's sequences, as they are now."""

    def __init__(self, engine: Engine, requests: dict[Name, _Request]) -> None:
        self._pool = engine.pool
        self._requests = requests

    def finished(self, name: Name) -> tuple[int, ...]:
        request = self._requests.get(name)
        if request is None:
            return ()
        sequence = request.sequence
        match sequence.status:
            case Status.HELD:
                return tuple(sequence.block_ids)
            case Status.RUNNING:
                return tuple(sequence.block_ids[: sequence.num_computed // self._pool.block_size])
            case _:
                return ()

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
        connectors: Mapping[str, Connector],
        memory: KVMemory,
        compatibility: pb.Compatibility,
        incarnation: str,
        outlet: Outlet,
        on_crash: Callable[[], None],
        tempo: Tempo = TEMPO,
    ) -> None:
        self._engine = engine
        self._connectors = connectors
        self._memory = memory
        self._compatibility = compatibility
        self._incarnation = incarnation
        self._outlet = outlet
        self._on_crash = on_crash
        self._requests: dict[Name, _Request] = {}
        self._machine = PrefillHandoffs(_SequencePages(engine, self._requests))
        self._tempo = tempo
        self._links = DecodeLinks(self._dial, self._on_opened, self._on_lost, self._machine.busy)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> Counters:
        return self._machine.counters

    @property
    def open_handoffs(self) -> int:
        return self._machine.open_handoffs

    @property
    def open_requests(self) -> int:
        """Requests that wait for a link or room, or are being computed, to be handed on."""
        return len(self._requests)

    async def run_timers(self) -> None:
        """Listen for silence, for as long as the worker lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._links.tick(now - before)
            before = now
            self._do(self._machine.tick)

    async def close(self) -> None:
        """End every link; before the connectors are closed."""
        await self._links.close()

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
        name = Name(sequence.request_id, sequence.attempt)
        if name not in self._requests:
            return
        if output.finish_reason is not None:  # its first token was its last: nothing to hand on
            self._do(lambda now: self._machine.withdraw(name, "finished", now))
            self._requests.pop(name, None)
            return
        self._do(lambda _: self._progress(name, sequence))

    def _progress(self, name: Name, sequence: Sequence) -> list[Action]:
        # Preempted since the step? Its state now, under the lock, is what counts.
        if sequence.status is not Status.HELD:
            return self._machine.progress(name)
        token_ids = sequence.token_ids[:-1]
        computed = Computed(
            num_tokens=len(token_ids),
            tokens_digest=tokens_digest(token_ids),
            first_token=sequence.output_ids[-1],
            cached_tokens=sequence.num_cached,
        )
        return self._machine.computed(name, computed)

    # --- links

    async def _ask(self, name: Name, peer: Peer) -> None:
        try:
            link = await self._links.to(peer)
        except LinkRefusedError as error:
            self._refuse(name, f"decode refused the link: {error}")
            return
        except UNREACHABLE as error:
            log.warning("no link to decode at %s: %r", peer.address, error)
            self._refuse(name, "decode cannot be reached")
            return
        request = self._requests.get(name)
        if request is None:  # cancelled meanwhile
            return
        num_blocks = -(-request.sequence.num_tokens // self._engine.pool.block_size)
        self._do(lambda now: self._machine.ask(name, link, num_blocks, now))

    async def _dial(self, peer: Peer, on_lost: Callable[[DecodePeer], None]) -> DecodePeer:
        greeting = pb.LinkOpen(
            prefill_incarnation=self._incarnation,
            decode_incarnation=peer.incarnation,
            compatibility=self._compatibility,
            connectors=list(self._connectors),
        )
        connection = DecodePeer(
            peer.address, self._connectors, self._memory, self._on_message, on_lost, self._tempo
        )
        await connection.open(greeting)
        return connection

    def _on_opened(self, link: LinkId) -> None:
        with self._engine.lock:
            self._machine.link_opened(link)

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
            case SendPages():
                self._send_pages(action)
            case Compute(name=name):
                self._compute(name)
            case Stop(name=name):
                self._engine.cancel(*name)
                self._requests.pop(name, None)
            case Fail(name=name, reason=reason):
                self._fail(name, reason)
            case _:
                raise AssertionError(f"not an action of prefill: {action}")

    def _compute(self, name: Name) -> None:
        request = self._requests.get(name)
        if request is None:
            return
        try:
            self._engine.add(request.sequence)
        except ValueError as error:  # a newer attempt of the request is here already
            self._fail(name, str(error))
            self._do(lambda now: self._machine.withdraw(name, "refused by the engine", now))

    def _send(self, link: LinkId, message: wire.FromPrefill | Ask) -> None:
        peer = self._links.at(link)
        if peer is None:
            return
        if not isinstance(message, Ask):
            peer.send(wire.to_decode(message))
            return
        request = self._requests[message.name]
        sequence = request.sequence
        ask = pb.Ask(
            name=pb.Name(request_id=sequence.request_id, attempt=sequence.attempt),
            router_id=sequence.owner,
            prompt_ids=sequence.prompt_ids,
            output_ids=sequence.output_ids,
            params=sequence.params.to_proto(),
            handle=request.handle,
        )
        peer.send(pb.PrefillMessage(ask=ask))

    def _send_pages(self, action: SendPages) -> None:
        link, tag = action.link, action.tag

        def report(ok: bool) -> None:
            self._do(lambda now: self._machine.sent(link, tag, ok, now))

        peer = self._links.at(link)
        if peer is None or peer.data is None:
            report(False)
            return
        done = asyncio.ensure_future(peer.data.send(tag, action.pages))
        done.add_done_callback(lambda f: report(not f.cancelled() and f.exception() is None))

    def _fail(self, name: Name, reason: str) -> None:
        log.warning("handoff of %s (attempt %d) failed: %s", name.request_id, name.attempt, reason)
        request = self._requests.pop(name, None)
        if request is not None:
            self._outlet.fail(request.sequence.owner, name.request_id, name.attempt, reason)

    def _refuse(self, name: Name, reason: str) -> None:
        """Nothing was begun: the router may ask another worker."""
        log.warning("request %s (attempt %d) is refused: %s", name.request_id, name.attempt, reason)
        request = self._requests.pop(name, None)
        if request is not None:
            self._outlet.refuse(request.sequence.owner, name.request_id, name.attempt, reason)
