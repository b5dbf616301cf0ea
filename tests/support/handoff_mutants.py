"""The handoff's machines and the router's ledger with one rule left out each, as systems in use do.

The tests of the handoff must fail with every one of them, or they would not notice the fault in what ships.
"""

from __future__ import annotations

from dataclasses import replace

from baton.core.attempt_failure import AttemptFailure
from baton.handoff import decode as decode_module
from baton.handoff.blocks import Binding
from baton.handoff.decode import DecodeHandoff as DecodeHandoff
from baton.handoff.decode import DecodeHandoffs, DecodeHandoffState
from baton.handoff.messages import (
    AbortReason,
    Action,
    Ask,
    Credit,
    Drained,
    Fail,
    First,
    Grant,
    LinkId,
    Manifest,
    Name,
    Retire,
    Segment,
    Send,
    SendComplete,
    ToDecode,
)
from baton.handoff.prefill import PrefillHandoff as PrefillHandoff
from baton.handoff.prefill import PrefillHandoffs
from baton.handoff.prefill import PrefillHandoffState as PrefillState
from baton.router.dispatch.ledger import LedgerEntry
from baton.router.dispatch.types import RingError, TokenChunk
from baton.transport.block_names import group_of
from baton.v1 import worker_pb2


class FreeOnAbort(DecodeHandoffs):
    """The request is over, so its pages are free: a write under way lands in the next request's."""

    def _abort(self, handoff: DecodeHandoff, reason: AbortReason, now: float) -> list[Action]:
        actions = super()._abort(handoff, reason, now)
        if handoff.state is DecodeHandoffState.DRAINING:
            actions += self._over(handoff, now) + self.pump(now)
        return actions


class FreeOnTimeout(DecodeHandoffs):
    """Two seconds of silence are taken for proof."""

    def tick(self, now: float) -> list[Action]:
        late = [
            handoff
            for handoff in self._handoffs.values()
            if handoff.state is DecodeHandoffState.DRAINING
            and now - handoff.draining_since >= decode_module.FENCE_AFTER_S
        ]
        return [action for handoff in late for action in self._over(handoff, now)] + super().tick(now)


class CommitOnLocalCompletion(DecodeHandoffs):
    """All receives have completed, so the request runs: prefill's pages may have changed meanwhile."""

    def received(
        self, link: LinkId, tag: int, ok: bool, now: float, checksum: int | None = None
    ) -> list[Action]:
        name = self._by_tag.get((link, tag))
        handoff = self._handoffs.get(name) if name is not None else None
        if handoff is not None and handoff.state is DecodeHandoffState.ARMED:
            num_tokens, digest, _ = self._room.manifest(handoff.name)
            manifest = Manifest(num_tokens, digest, len(handoff.segments))
            handoff.complete = SendComplete(handoff.name, manifest, (First(7),))
        return super().received(link, tag, ok, now, checksum)


class CommitUnverified(DecodeHandoffs):
    """Checksums are for debugging, are they not?"""

    def _changed(self, handoff: DecodeHandoff, complete: SendComplete) -> str | None:
        return None


class NeverFence(DecodeHandoffs):
    """A lost link is left alone: safe, and its pages never come back."""

    def _fence(self, state: decode_module._Link, now: float) -> list[Action]:
        super()._fence(state, now)
        return []

    def tick(self, now: float) -> list[Action]:
        return [action for action in super().tick(now) if not isinstance(action, Retire)]


class ForgetOldAttempts(DecodeHandoffs):
    """An older attempt is let in while a newer one is here."""

    def _on_ask(self, link: LinkId, ask: Ask, now: float) -> list[Action]:
        newest = self._newest.pop(ask.name.request_id, None)
        actions = super()._on_ask(link, ask, now)
        if newest is not None and newest in self._handoffs and ask.name not in self._handoffs:
            self._newest[newest.request_id] = newest
        return actions


class DrainedWithoutAttempt(DecodeHandoffs):
    """Takes the word about one attempt for the word about another one of the same request."""

    def receive(self, link: LinkId, message: ToDecode, now: float) -> list[Action]:
        if isinstance(message, Drained):
            for name, handoff in self._handoffs.items():
                if (
                    name.request_id == message.name.request_id
                    and handoff.state is DecodeHandoffState.DRAINING
                ):
                    return super().receive(link, replace(message, name=name), now)
        return super().receive(link, message, now)


class ReconnectWithoutFence(DecodeHandoffs):
    """A peer that dials again has nothing under way, has it? Its old link is taken for closed."""

    def open_link(self, prefill: str, blocks_per_page: int = 1, *, verify: bool = False) -> LinkId | None:
        old = self._links.pop(prefill, None)
        for handoff in [h for h in self._handoffs.values() if old is not None and h.link == old.id]:
            self._over(handoff, 0.0)
        return super().open_link(prefill, blocks_per_page, verify=verify)


class BelieveAnyDrained(DecodeHandoffs):
    """Frees at the peer's word, though it is this process that copies from the socket."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._drained_is_proof = True


class BindWhileFencing(DecodeHandoffs):
    """Posts receives on a link that is being closed."""

    def _current(self, link: LinkId) -> bool:
        state = self._links.get(link.prefill)
        return state is not None and state.id == link


class UnpinAtStop(PrefillHandoffs):
    """The request is over, so its source pages may change: what is under way carries the next one's KV."""

    def _stop(self, handoff: PrefillHandoff, reason: AbortReason, now: float) -> list[Action]:
        for tag, pages in handoff.sending.items():
            self._source.unpin(pages)
            handoff.sending[tag] = ()
        return super()._stop(handoff, reason, now)


class LeaveWindowsUnpinned(PrefillHandoffs):
    """No later token sees a window's page, so it is free: another request's KV goes out in its place."""

    def _pages_to_pin(self, handoff: PrefillHandoff, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return () if group_of(blocks[0]) == 1 else super()._pages_to_pin(handoff, blocks)


class LeaveStatesUnpinned(PrefillHandoffs):
    """A state is small and soon sent: the next request's is written over it."""

    def _pages_to_pin(self, handoff: PrefillHandoff, blocks: tuple[int, ...]) -> tuple[int, ...]:
        last = len(handoff.wanted) - 1
        return () if group_of(blocks[0]) == last else super()._pages_to_pin(handoff, blocks)


class OneGroupsHit(DecodeHandoffs):
    """Takes what the cache has of the first group for what it has of all."""

    def _segments(self, binding: Binding) -> tuple[Segment, ...]:
        first = binding.missing[0]
        begin = first[0].start if first else None
        missing = tuple(
            tuple(run for each in runs if begin is not None and (run := _behind(each, begin)))
            for runs in binding.missing
        )
        return super()._segments(replace(binding, missing=missing))


def _behind(run: range, begin: int) -> range:
    """What is left of a run of blocks from ``begin`` on; a state is left whole."""
    return run if run == range(1) else range(max(run.start, begin), run.stop)


class DrainedAfterFailure(PrefillHandoffs):
    """Takes a failed send for one that is over everywhere, and says so."""

    def sent(self, link: LinkId, tag: int, ok: bool, now: float, checksum: int | None = None) -> list[Action]:
        name = self._by_tag.get((link, tag))
        handoff = self._handoffs.get(name) if name is not None else None
        if ok or handoff is None or tag not in handoff.sending:
            return super().sent(link, tag, ok, now, checksum)
        del self._by_tag[link, tag]
        self._source.unpin(handoff.sending.pop(tag))
        if handoff.state is PrefillState.STOPPED:
            return self._drained_if_quiet(handoff, now)
        return [
            Fail(handoff.name, "failed", AttemptFailure.HANDOFF_LOST),
            *self.withdraw(handoff.name, "transfer", now),
        ]


class DrainedAtOnce(PrefillHandoffs):
    """Answers a cancel before what it had posted is over."""

    def _on_cancel(
        self, link: LinkId, name: Name, handoff: PrefillHandoff | None, now: float
    ) -> list[Action]:
        return [*super()._on_cancel(link, name, handoff, now), Send(link, Drained(name, link))]


class BelieveAnyGrant(PrefillHandoffs):
    """Sends whatever is granted, under whatever tags."""

    def _wrong(self, handoff: PrefillHandoff, segments: tuple[Segment, ...]) -> str | None:
        return None


class NeverRepeatAtPrefill(PrefillHandoffs):
    """Trusts that every message arrives: a lost one leaves both sides waiting for each other."""

    def tick(self, now: float) -> list[Action]:
        self._tombstones.expire(now)
        return []


class NeverRepeatAtDecode(DecodeHandoffs):
    """Likewise: a lost Withdraw leaves room promised for ever."""

    def tick(self, now: float) -> list[Action]:
        return [action for action in super().tick(now) if not is_promise(action)]


def is_promise(action: Action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, Credit | Grant)


class NoAttemptCheck(LedgerEntry):
    """Positions alone decide: a token of an attempt that was given up goes between those of its successor."""

    def accept(self, delta: worker_pb2.TokenDelta) -> TokenChunk | RingError | None:
        delta.attempt = self.attempt
        return super().accept(delta)


class NoSequenceCheck(LedgerEntry):
    """Whatever the current attempt says is new: its first token comes from prefill, and again from decode."""

    def accept(self, delta: worker_pb2.TokenDelta) -> TokenChunk | RingError | None:
        delta.first_seq = len(self.output_ids)
        return super().accept(delta)
