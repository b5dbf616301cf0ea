"""What makes a worker decode: it takes requests over from prefill workers and runs them on."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import grpc

from baton.connector import wire
from baton.connector.choice import first_common
from baton.connector.decode import Counters, DecodeHandoffs
from baton.connector.identity import first_mismatch, handle_is_valid, tokens_digest
from baton.connector.liveness import TEMPO, TICK_S, Pulse, Tempo
from baton.connector.messages import (
    Action,
    Ask,
    CancelReceive,
    Commit,
    Fail,
    Fence,
    LinkId,
    Name,
    PostReceive,
    Retire,
    Send,
    Stop,
)
from baton.connector.transport import Connector, KVMemory, Link
from baton.decode.room import PoolRoom
from baton.engine.engine import Engine
from baton.engine.outlet import Outlet
from baton.engine.sequence import Sequence
from baton.sampling_params import SamplingParams
from baton.v1 import handoff_pb2 as pb
from baton.v1 import handoff_pb2_grpc as pb_grpc
from baton.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    """One prefill worker's link: its control stream and its data connection."""

    id: LinkId
    data: Link
    pulse: Pulse
    outbound: asyncio.Queue[pb.DecodeMessage | None] = field(default_factory=asyncio.Queue)
    fenced: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeRole(pb_grpc.HandoffServicer):
    """Serves ``Handoff.Link`` to prefill workers and carries out what the state machine decides.

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
        cluster_key: bytes,
        outlet: Outlet,
        on_retire: Callable[[], None],
        on_crash: Callable[[], None],
        tempo: Tempo = TEMPO,
    ) -> None:
        self._engine = engine
        self._connectors = connectors
        self._memory = memory
        self._compatibility = compatibility
        self._incarnation = incarnation
        self._cluster_key = cluster_key
        self._outlet = outlet
        self._on_retire = on_retire
        self._on_crash = on_crash
        self._tempo = tempo
        self._room = PoolRoom(engine)
        drained_is_proof = all(connector.drained_is_proof for connector in connectors.values())
        self._machine = DecodeHandoffs(incarnation, self._room, drained_is_proof=drained_is_proof)
        self._peers: dict[LinkId, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.data_addresses: dict[str, str] = {}
        """Connector → where it listens."""

    @property
    def counters(self) -> Counters:
        return self._machine.counters

    @property
    def open_handoffs(self) -> int:
        return self._machine.open_handoffs

    @property
    def open_links(self) -> int:
        """Links over which prefill workers may still ask, and those being fenced."""
        return len(self._peers)

    async def run_timers(self) -> None:
        """Listen for silence, resend and escalate, for as long as the worker lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for peer in list(self._peers.values()):
                self._check_pulse(peer, now - before)
            before = now
            self._do(self._machine.tick)

    def _check_pulse(self, peer: _Peer, elapsed: float) -> None:
        if peer.pulse.tick(elapsed):
            peer.outbound.put_nowait(pb.DecodeMessage(heartbeat=pb.Heartbeat()))
        if peer.pulse.lost(partial(self._machine.busy, peer.id)):
            log.warning("prefill %s is silent: its link is fenced", peer.id.prefill)
            self._do(lambda now: self._machine.link_lost(peer.id, now))

    def room_changed(self) -> None:
        """Blocks may have come free since the last step."""
        if self._machine.open_handoffs:
            self._do(lambda now: self._machine.pump(now))

    def cancel(self, name: Name) -> None:
        self._do(lambda now: self._machine.cancel(name, now))

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
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("open"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be LinkOpen")
            return
        refusal = self._refusal(first.open)
        if refusal is not None:
            log.warning("refused prefill %s: %s", first.open.prefill_incarnation, refusal.reason)
            yield pb.DecodeMessage(refuse=refusal)
            return
        connector = first_common(first.open.connectors, self._connectors)
        assert connector is not None  # or it would have been refused
        peer = await self._accept(first.open.prefill_incarnation, connector)
        reader = asyncio.create_task(self._read(peer, request_iterator))
        try:
            while (message := await peer.outbound.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._do(lambda now: self._machine.link_lost(peer.id, now))

    async def _read(self, peer: _Peer, messages: AsyncIterator[pb.PrefillMessage]) -> None:
        try:
            async for message in messages:
                peer.pulse.heard()
                self._take(peer.id, message)
        finally:
            peer.outbound.put_nowait(None)

    def _refusal(self, opened: pb.LinkOpen) -> pb.LinkRefuse | None:
        if opened.decode_incarnation != self._incarnation:
            return pb.LinkRefuse(field="decode_incarnation", reason="decode has been restarted since")
        differs = first_mismatch(self._compatibility, opened.compatibility)
        if differs is not None:
            ours, theirs = (getattr(c, differs) for c in (self._compatibility, opened.compatibility))
            return pb.LinkRefuse(field=differs, reason=f"{differs} differs: prefill {theirs}, decode {ours}")
        if first_common(opened.connectors, self._connectors) is None:
            theirs, ours = (", ".join(names) for names in (opened.connectors, self._connectors))
            reason = f"no common connector: prefill has {theirs}, decode {ours}"
            return pb.LinkRefuse(field="connectors", reason=reason)
        return None

    async def _accept(self, prefill: str, connector: Connector) -> _Peer:
        for old in [p for p in self._peers.values() if p.id.prefill == prefill]:
            self._do(partial(self._machine.link_lost, old.id))
            await old.fenced.wait()
        with self._engine.lock:
            link = self._machine.open_link(prefill)
        if link is None:  # it has dialled twice, and the other call was first
            return await self._accept(prefill, connector)
        token = secrets.token_bytes(32)
        memory = self._memory.part(self._compatibility.block_size)
        data = connector.expect(
            token, memory, lambda: self._do(lambda now: self._machine.link_lost(link, now))
        )
        peer = _Peer(link, data, Pulse(self._tempo))
        self._peers[link] = peer
        accept = pb.LinkAccept(
            decode_incarnation=self._incarnation,
            epoch=link.epoch,
            connector=connector.name,
            data_address=self.data_addresses[connector.name],
            data_token=token,
        )
        peer.outbound.put_nowait(pb.DecodeMessage(accept=accept))
        log.info("prefill %s linked, epoch %d, connector %s", prefill, link.epoch, connector.name)
        return peer

    def _take(self, link: LinkId, message: pb.PrefillMessage) -> None:
        if message.HasField("ask"):
            self._on_ask(link, message.ask)
            return
        known = wire.from_prefill(message, link)
        if known is not None:
            self._do(lambda now: self._machine.receive(link, known, now))

    def _on_ask(self, link: LinkId, ask: pb.Ask) -> None:
        name = wire.name_of(ask.name)
        sequence = Sequence(
            request_id=name.request_id,
            attempt=name.attempt,
            prompt_ids=tuple(ask.prompt_ids),
            output_ids=list(ask.output_ids),
            params=SamplingParams.from_proto(ask.params),
            owner=ask.router_id,
        )
        refusal = self._objection(name, sequence, ask.handle)
        if refusal is not None:
            self._send(link, pb.DecodeMessage(decline=pb.Decline(name=ask.name, reason=refusal)))
            return
        # Hashed here, as it takes a while for a long prompt and the machine runs under the engine's lock.
        manifest = (sequence.num_tokens, tokens_digest(sequence.token_ids))
        block_size = self._engine.pool.block_size
        if self._engine.scheduler.limits.shares(sequence):
            sequence.extend_hashes(block_size)

        def receive(now: float) -> list[Action]:
            if self._machine.state_of(name) is None:
                self._room.expect(name, sequence, manifest)
            actions = self._machine.receive(link, Ask(name, -(-sequence.num_tokens // block_size)), now)
            if self._machine.state_of(name) is None:
                self._room.take(name)
            return actions

        self._do(receive)

    def _objection(self, name: Name, sequence: Sequence, handle: bytes) -> str | None:
        """Why this request must not come in, or None."""
        if not handle_is_valid(handle, self._cluster_key, name, self._incarnation, sequence.num_tokens):
            return "invalid handle: do router and workers share one cluster key?"
        if not self._outlet.connected(sequence.owner):
            return "its router is not connected to decode"
        try:
            self._engine.check(sequence)
        except ValueError as error:
            return str(error)
        return None

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
                self._room.take(name)
            case Fail(name=name, reason=reason):
                self._fail(name, reason)
            case Fence(link=link):
                task = asyncio.create_task(self._fence(link))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Retire(link=link):
                log.critical("the fence of %s did not complete: this worker must end", link)
                self._on_retire()
            case _:
                raise AssertionError(f"not an action of decode: {action}")

    def _send(self, link: LinkId, message: pb.DecodeMessage) -> None:
        peer = self._peers.get(link)
        if peer is not None:
            peer.outbound.put_nowait(message)

    def _post_receive(self, action: PostReceive) -> None:
        link, tag = action.link, action.tag
        peer = self._peers.get(link)
        if peer is None:  # fenced meanwhile; the machine has been told, or is about to be
            return
        done = asyncio.ensure_future(peer.data.post_receive(tag, action.pages))

        def report(future: asyncio.Future[None]) -> None:
            ok = not future.cancelled() and future.exception() is None
            self._do(lambda now: self._machine.received(link, tag, ok, now))

        done.add_done_callback(report)

    def _commit(self, commit: Commit) -> None:
        with self._engine.lock:
            sequence = self._room.take(commit.name)
            if sequence is None:
                raise AssertionError(f"committed a request that was never asked for: {commit.name}")
            first_seq = sequence.num_outputs
            sequence.bind(commit.pages)
            sequence.num_cached = commit.cached_tokens
            sequence.append(commit.first_token)
            try:
                self._engine.admit_computed(sequence)
            except ValueError as error:  # a newer attempt of the request is here already
                log.warning("a committed handoff came too late: %s", error)
                self._engine.pool.free(commit.pages)
                self._outlet.fail(sequence.owner, *commit.name, str(error))
                return
        # Prefill has sent this token to the router as well: should prefill die now, it is not lost.
        first = worker_pb2.TokenDelta(
            request_id=commit.name.request_id,
            attempt=commit.name.attempt,
            first_seq=first_seq,
            token_ids=[commit.first_token],
            cached_tokens=commit.cached_tokens,
        )
        self._outlet.deliver(sequence.owner, first)

    def _fail(self, name: Name, reason: str) -> None:
        log.warning("handoff of %s (attempt %d) failed: %s", name.request_id, name.attempt, reason)
        owner = self._room.owner(name)
        if owner is not None:
            self._outlet.fail(owner, name.request_id, name.attempt, reason)

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
