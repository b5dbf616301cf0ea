"""Decode's side of the handoff: the right to write into decode's pages, and its end.

::

                 ask            ready            all received and SendComplete
    (unknown) ─► QUEUED ─► RESERVED ─► ARMED ─────────────────────────────────► committed
                   │          │          │ cancel, withdraw, failed receive
                   ▼          ▼          ▼
                 (over)     (over)    DRAINING ── receives over, or DRAINED, or link fenced ──► (over)

A page of an ARMED or DRAINING handoff that is received into is pinned, whatever KV group it is of: the
transport may write to it. Time never unpins it; time only escalates, from Cancel to the fence of the link to
the end of the process.

Any message may be lost. So while decode waits for prefill, it repeats its last message: Credit in RESERVED,
Grant in ARMED, Cancel in DRAINING. Prefill answers Withdraw to messages of an attempt that it does not know,
and decode answers Cancel.

Pure: no I/O, no clock of its own, no thread. Each method returns the actions that the role must execute, in
order. Not thread-safe; the caller holds the engine's lock, as pages are the engine's.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.core.attempt_failure import AttemptFailure
from baton.handoff.blocks import Binding, GroupBlocks
from baton.handoff.messages import (
    REPEAT_S,
    AbortReason,
    Action,
    Ask,
    Cancel,
    CancelReceive,
    Commit,
    Credit,
    Decline,
    Drained,
    Fail,
    Fence,
    Grant,
    LinkId,
    Manifest,
    Name,
    PostReceive,
    Ready,
    Release,
    Retire,
    Segment,
    Send,
    SendComplete,
    Stop,
    ToDecode,
    Withdraw,
)
from baton.handoff.tombstones import Tombstones

RESEND_S = 0.2
"""The period at which Cancel is repeated, in seconds: shorter than ``REPEAT_S``, as pages wait for it."""
FENCE_AFTER_S = 2.0
RETIRE_AFTER_S = 1.0
MAX_SEGMENT_BLOCKS = 16
"""Most names of a segment: it is sent when its last block is computed, and must not wait for later chunks."""


class DecodeMemory(Protocol):
    """Decode's KV memory, as the state machine needs it."""

    def fits(self, num_tokens: int) -> bool:
        """Return whether a request of this size could ever run on this worker."""

    def reserve(self, name: Name, num_tokens: int) -> bool:
        """Promise room in all groups; False if there is none now."""

    def unreserve(self, name: Name) -> None: ...

    def bind(self, name: Name, blocks_per_page: int) -> Binding | None:
        """Turn the promise into pages of every group; those to be received into are pinned. None: no room at
        this moment. ``blocks_per_page``: blocks of the link in a page."""

    def unpin(self, pages: tuple[int, ...]) -> None: ...

    def free(self, name: Name, pages: tuple[int, ...]) -> None:
        """Release the references to pages, which are reused once no pin is left."""

    def manifest(self, name: Name) -> tuple[int, bytes, int]:
        """Return what prefill must confirm: the number and digest of the tokens, and the number of
        answers."""


class DecodeHandoffState(Enum):
    QUEUED = "queued"
    RESERVED = "reserved"
    ARMED = "armed"
    DRAINING = "draining"


@dataclass(slots=True)
class DecodeHandoff:
    name: Name
    link: LinkId
    num_tokens: int
    state: DecodeHandoffState
    turn: float = 0.0
    ready: bool = False
    binding: Binding | None = None
    segments: tuple[Segment, ...] = ()
    receiving: set[int] = field(default_factory=set)
    """Tags of receives that are not over."""
    checksums: dict[int, int] = field(default_factory=dict)
    """CRC-32 of the segments that arrived, by tag."""
    complete: SendComplete | None = None
    draining_since: float = 0.0
    spoke_at: float = 0.0
    """The time at which the last message (Credit, Grant or Cancel) was last sent."""

    @property
    def pinned(self) -> tuple[int, ...]:
        return self.binding.pinned if self.binding else ()


@dataclass(slots=True)
class _Link:
    id: LinkId
    blocks_per_page: int = 1
    verify: bool = False
    fencing_since: float | None = None


@dataclass(slots=True)
class DecodeCounters:
    stale: int = 0
    """Messages dropped, as their name was unknown or their attempt or epoch an older one."""
    committed: int = 0
    aborted: Counter[AbortReason] = field(default_factory=Counter)
    fences: int = 0


class DecodeHandoffs:
    """The state machine of all handoffs into one decode worker.

    ``drained_is_proof``: whether Drained proves that no byte will land. True for one-sided writes; false
    where this process itself copies from a socket, which may still hold bytes.
    """

    def __init__(
        self,
        incarnation: str,
        room: DecodeMemory,
        *,
        drained_is_proof: bool,
        max_queued: int = 256,
        tombstones: Tombstones | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.counters = DecodeCounters()
        self._room = room
        self._drained_is_proof = drained_is_proof
        self._max_queued = max_queued
        self._tombstones = tombstones or Tombstones()
        self._handoffs: dict[Name, DecodeHandoff] = {}
        self._newest: dict[str, Name] = {}
        self._by_tag: dict[tuple[LinkId, int], Name] = {}
        self._queue: list[Name] = []
        """Handoffs that wait for a promise of room, in the order of their turns."""
        self._links: dict[str, _Link] = {}
        self._last_epoch = 0
        """The last epoch of any link. An epoch for each prefill worker would have to be kept for as long as
        messages of its links may be under way, even if the worker never comes back."""
        self._next_tag = 1

    # --- queries

    @property
    def open_handoffs(self) -> int:
        return len(self._handoffs)

    def state_of(self, name: Name) -> DecodeHandoffState | None:
        handoff = self._handoffs.get(name)
        return handoff.state if handoff else None

    def name_of(self, link: LinkId, tag: int) -> Name | None:
        """Return the handoff that a transfer belongs to; None once the transfer is over."""
        return self._by_tag.get((link, tag))

    def busy(self, link: LinkId) -> bool:
        """Return whether a handoff is open on this link."""
        return any(handoff.link == link for handoff in self._handoffs.values())

    def pinned_pages(self) -> list[int]:
        return [page for handoff in self._handoffs.values() for page in handoff.pinned]

    # --- links

    def open_link(self, prefill: str, blocks_per_page: int = 1, *, verify: bool = False) -> LinkId | None:
        """Open a link for a prefill incarnation. None: its previous link must be fenced first (rule 5).

        ``blocks_per_page``: blocks of the link in a page of this worker; more than 1 if prefill's blocks are
        smaller. ``verify``: commit no handoff whose checksums differ (rule 10).
        """
        if prefill in self._links:
            return None
        self._last_epoch += 1
        link = LinkId(prefill, self.incarnation, self._last_epoch)
        self._links[prefill] = _Link(link, blocks_per_page, verify)
        return link

    def link_lost(self, link: LinkId, now: float) -> list[Action]:
        """Fence a link whose control stream or data connection broke: nothing more is accepted from it."""
        state = self._links.get(link.prefill)
        if state is None or state.id != link or state.fencing_since is not None:
            return []
        return self._fence(state, now)

    def link_fenced(self, link: LinkId, now: float) -> list[Action]:
        """Free all pages of a fenced link: no byte can move through it any more, which is the proof."""
        state = self._links.get(link.prefill)
        if state is None or state.id != link:
            return []
        del self._links[link.prefill]
        actions: list[Action] = []
        for handoff in [h for h in self._handoffs.values() if h.link == link]:
            if handoff.state is not DecodeHandoffState.DRAINING:
                self.counters.aborted[AbortReason.LINK_LOST] += 1
            actions += self._over(handoff, now, "the link to prefill was lost")
        return actions + self.pump(now)

    def _fence(self, state: _Link, now: float) -> list[Action]:
        state.fencing_since = now
        self.counters.fences += 1
        return [Fence(state.id)]

    def _current(self, link: LinkId) -> bool:
        state = self._links.get(link.prefill)
        return state is not None and state.id == link and state.fencing_since is None

    # --- messages from prefill

    def receive(self, link: LinkId, message: ToDecode, now: float) -> list[Action]:
        """Take one control message; messages with an unknown name, an older attempt or an older epoch are
        counted and dropped."""
        if not self._current(link):
            self.counters.stale += 1
            return []
        if isinstance(message, Ask):
            return self._on_ask(link, message, now)
        handoff = self._handoffs.get(message.name)
        if handoff is None or handoff.link != link:
            self.counters.stale += 1
            return self._over_already(link, message)
        match message:
            case Ready():
                return self._on_ready(handoff, now)
            case SendComplete():
                return self._on_send_complete(handoff, message, now)
            case Drained():
                return self._on_drained(handoff, message, now)
            case Withdraw():
                return self._abort(handoff, AbortReason.WITHDRAWN, now)

    def _over_already(self, link: LinkId, message: ToDecode) -> list[Action]:
        """Answer a message of an attempt that is over at decode: prefill still waits, as the message that
        ended the attempt was lost. Messages that prefill does not wait on need no answer."""
        if isinstance(message, Ready | SendComplete) and message.name not in self._handoffs:
            return [Send(link, Cancel(message.name))]
        return []

    def _on_ask(self, link: LinkId, ask: Ask, now: float) -> list[Action]:
        name = ask.name
        known = self._handoffs.get(name)
        if known is not None:
            if known.link == link:
                return self._repeat(known, now)
            self.counters.stale += 1
            return []
        if self._tombstones.covers(name) or self._newest.get(name.request_id, name).attempt > name.attempt:
            self.counters.stale += 1
            return [Send(link, Decline(name, "this attempt is over"))]
        if self._tombstones.full:
            reason = "decode has too many ended attempts to remember"
            return [Send(link, Decline(name, reason, elsewhere=True))]
        if not self._room.fits(ask.num_tokens):
            reason = f"the KV of {ask.num_tokens} tokens never fits in this decode worker"
            return [Send(link, Decline(name, reason, elsewhere=True))]
        actions = self._supersede(name, now)
        if len(self._queue) >= self._max_queued:
            # Prefill may have sent Ask twice, and the second one must not find room: this attempt is refused.
            self._tombstones.bury(name, now)
            reason = "decode has no room and its queue is full"
            return [*actions, Send(link, Decline(name, reason, elsewhere=True))]
        self._handoffs[name] = DecodeHandoff(name, link, ask.num_tokens, DecodeHandoffState.QUEUED, ask.turn)
        self._newest[name.request_id] = name
        insort(self._queue, name, key=lambda queued: self._handoffs[queued].turn)
        return actions + self.pump(now)

    def _supersede(self, name: Name, now: float) -> list[Action]:
        older = self._newest.get(name.request_id)
        if older is None or older.attempt >= name.attempt:
            return []
        return self._give_up(older, AbortReason.SUPERSEDED, now)

    def _on_ready(self, handoff: DecodeHandoff, now: float) -> list[Action]:
        if handoff.state is DecodeHandoffState.ARMED:
            return self._repeat(handoff, now)
        handoff.ready = True
        return self._bind(handoff, now)

    def _on_send_complete(self, handoff: DecodeHandoff, message: SendComplete, now: float) -> list[Action]:
        if handoff.state is not DecodeHandoffState.ARMED:
            self.counters.stale += 1
            return []
        num_tokens, digest, num_answers = self._room.manifest(handoff.name)
        if message.manifest != Manifest(num_tokens, digest, len(handoff.segments), num_answers):
            reason = "prefill's manifest does not match the request"
            return self._fail(handoff, reason, AbortReason.MANIFEST, now)
        handoff.complete = message
        return self._commit_if_whole(handoff, now)

    def _on_drained(self, handoff: DecodeHandoff, message: Drained, now: float) -> list[Action]:
        if handoff.state is not DecodeHandoffState.DRAINING or message.link != handoff.link:
            self.counters.stale += 1
            return []
        if self._drained_is_proof:
            return self._over(handoff, now) + self.pump(now)
        return []

    # --- the transport

    def received(
        self, link: LinkId, tag: int, ok: bool, now: float, checksum: int | None = None
    ) -> list[Action]:
        """Note that a posted receive is over: its bytes are in its pages or, if not ok, no more will come.

        ``checksum``: CRC-32 of the bytes in the pages, on a link that verifies.
        """
        name = self._by_tag.pop((link, tag), None)
        handoff = self._handoffs.get(name) if name is not None else None
        if handoff is None or tag not in handoff.receiving:
            self.counters.stale += 1
            return []
        handoff.receiving.discard(tag)
        if handoff.state is DecodeHandoffState.DRAINING:
            return [] if handoff.receiving else self._over(handoff, now) + self.pump(now)
        if not ok:
            reason = "the KV transfer from prefill was lost"
            return self._fail(handoff, reason, AbortReason.TRANSFER, now)
        if checksum is not None:
            handoff.checksums[tag] = checksum
        return self._commit_if_whole(handoff, now)

    def _commit_if_whole(self, handoff: DecodeHandoff, now: float) -> list[Action]:
        """Commit once all segments of the attempt and prefill's SendComplete have come on this epoch (rule
        4)."""
        complete, binding = handoff.complete, handoff.binding
        if handoff.receiving or complete is None or binding is None or not self._current(handoff.link):
            return []
        changed = self._changed(handoff, complete)
        if changed is not None:
            return self._fail(handoff, changed, AbortReason.CHECKSUM, now)
        self._room.unpin(handoff.pinned)
        self._forget(handoff, now)
        self.counters.committed += 1
        commit = Commit(handoff.name, binding, complete.firsts, complete.cached_tokens)
        return [commit, Send(handoff.link, Release(handoff.name))]

    def _changed(self, handoff: DecodeHandoff, complete: SendComplete) -> str | None:
        """Return an error that names blocks whose checksum differs from prefill's (rule 10), or None."""
        if not self._links[handoff.link.prefill].verify:
            return None
        if len(complete.checksums) != len(handoff.segments):
            return "prefill sent no checksums on a link that verifies"
        for segment, sent in zip(handoff.segments, complete.checksums, strict=True):
            if handoff.checksums.get(segment.tag) != sent:
                last = segment.first_block + segment.num_blocks - 1
                blocks = f"KV blocks {segment.first_block} to {last} of group {segment.group}"
                return f"{blocks} changed on the way: their checksum differs"
        return None

    # --- giving up

    def cancel(self, name: Name, now: float) -> list[Action]:
        """Give an attempt up for the router, in whatever state it is, known here or not (rule 9). An older
        attempt, whose own cancel is still to come, is given up with it."""
        return self._give_up(name, AbortReason.CANCELLED, now)

    def stalled(
        self, name: Name, reason: str, now: float, failure: AttemptFailure = AttemptFailure.HANDOFF_LOST
    ) -> list[Action]:
        """Give up a handoff that made no progress for too long on a healthy link. The time is no proof that
        nothing writes any more, only a reason to ask for proof."""
        handoff = self._handoffs.get(name)
        if handoff is None or handoff.state is DecodeHandoffState.DRAINING:
            return []
        return self._fail(handoff, reason, AbortReason.STALLED, now, failure)

    def _fail(
        self,
        handoff: DecodeHandoff,
        text: str,
        reason: AbortReason,
        now: float,
        failure: AttemptFailure = AttemptFailure.HANDOFF_LOST,
    ) -> list[Action]:
        return [Fail(handoff.name, text, failure), *self._abort(handoff, reason, now)]

    def _give_up(self, name: Name, reason: AbortReason, now: float) -> list[Action]:
        handoff = self._handoffs.get(name)
        if handoff is None:
            self._tombstones.bury(name, now)
            return self._supersede(name, now)
        return self._abort(handoff, reason, now)

    def _abort(self, handoff: DecodeHandoff, reason: AbortReason, now: float) -> list[Action]:
        if handoff.state is DecodeHandoffState.DRAINING:
            return []
        self.counters.aborted[reason] += 1
        actions: list[Action] = [Send(handoff.link, Cancel(handoff.name))]
        if handoff.state is not DecodeHandoffState.ARMED or not handoff.receiving:
            return actions + self._over(handoff, now) + self.pump(now)
        handoff.state = DecodeHandoffState.DRAINING
        handoff.draining_since = handoff.spoke_at = now
        return actions + [CancelReceive(handoff.link, tag) for tag in sorted(handoff.receiving)]

    def _over(self, handoff: DecodeHandoff, now: float, failure: str | None = None) -> list[Action]:
        """End a handoff whose pages nothing can write to any more."""
        failed = failure is not None and handoff.state is not DecodeHandoffState.DRAINING
        if handoff.binding is not None:
            self._room.unpin(handoff.pinned)
            self._room.free(handoff.name, handoff.binding.pages)
        elif handoff.state is DecodeHandoffState.RESERVED:
            self._room.unreserve(handoff.name)
        self._forget(handoff, now)
        failures = [Fail(handoff.name, failure, AttemptFailure.HANDOFF_LOST)] if failed and failure else []
        return [*failures, Stop(handoff.name)]

    def _forget(self, handoff: DecodeHandoff, now: float) -> None:
        name = handoff.name
        del self._handoffs[name]
        if self._newest.get(name.request_id) == name:
            del self._newest[name.request_id]
        for tag in handoff.receiving:
            self._by_tag.pop((handoff.link, tag), None)
        if handoff.state is DecodeHandoffState.QUEUED:
            self._queue.remove(name)
        self._tombstones.bury(name, now)

    # --- room

    def pump(self, now: float) -> list[Action]:
        """Promise room that may have come free, in the order of turns, and bind pages that handoffs wait
        for."""
        actions: list[Action] = []
        while self._queue:
            handoff = self._handoffs[self._queue[0]]
            if not self._room.reserve(handoff.name, handoff.num_tokens):
                break
            self._queue.pop(0)
            handoff.state = DecodeHandoffState.RESERVED
            actions += self._repeat(handoff, now)
        for handoff in list(self._handoffs.values()):
            if handoff.ready and handoff.state is DecodeHandoffState.RESERVED:
                actions += self._bind(handoff, now)
        return actions

    def _bind(self, handoff: DecodeHandoff, now: float) -> list[Action]:
        """Bind pages and post the receives, before the grant is sent (rule 1). Does nothing on a link that is
        being fenced: the fence would prove nothing about a receive posted after it."""
        if handoff.state is not DecodeHandoffState.RESERVED or not self._current(handoff.link):
            return []
        binding = self._room.bind(handoff.name, self._links[handoff.link.prefill].blocks_per_page)
        if binding is None:
            return []
        handoff.state = DecodeHandoffState.ARMED
        handoff.binding = binding
        handoff.segments = self._segments(binding)
        actions: list[Action] = []
        for segment in handoff.segments:
            handoff.receiving.add(segment.tag)
            self._by_tag[handoff.link, segment.tag] = handoff.name
            end = segment.first_block + segment.num_blocks
            blocks = binding.groups[segment.group].names_of(segment.first_block, end)
            actions.append(PostReceive(handoff.link, segment.tag, blocks))
        return actions + self._repeat(handoff, now)

    def _segments(self, binding: Binding) -> tuple[Segment, ...]:
        """Split the blocks to receive, group by group."""
        segments: list[Segment] = []
        for number, (group, missing) in enumerate(zip(binding.groups, binding.missing, strict=True)):
            for run in missing:
                for blocks in _split(group, run):
                    segments.append(Segment(self._next_tag, blocks.start, len(blocks), number))
                    self._next_tag += 1
        return tuple(segments)

    # --- time, which proves nothing

    def _repeat(self, handoff: DecodeHandoff, now: float) -> list[Action]:
        """Send the message of a handoff's present state, for the first time or again."""
        handoff.spoke_at = now
        match handoff.state:
            case DecodeHandoffState.RESERVED:
                return [Send(handoff.link, Credit(handoff.name))]
            case DecodeHandoffState.ARMED:
                return [Send(handoff.link, Grant(handoff.name, handoff.segments))]
            case DecodeHandoffState.DRAINING:
                return [Send(handoff.link, Cancel(handoff.name))]
            case _:
                return []

    def tick(self, now: float) -> list[Action]:
        """Repeat messages that may have been lost, and escalate where proof is overdue: fence the link, then
        end the process."""
        self._tombstones.expire(now)
        actions: list[Action] = []
        for handoff in self._handoffs.values():
            if not self._current(handoff.link):
                continue
            draining = handoff.state is DecodeHandoffState.DRAINING
            if draining and now - handoff.draining_since >= FENCE_AFTER_S:
                actions += self._fence(self._links[handoff.link.prefill], now)
            elif now - handoff.spoke_at >= (RESEND_S if draining else REPEAT_S):
                actions += self._repeat(handoff, now)
        for state in self._links.values():
            if state.fencing_since is not None and now - state.fencing_since >= RETIRE_AFTER_S:
                actions.append(Retire(state.id))
        return actions + self.pump(now)


def _split(group: GroupBlocks, run: range) -> list[range]:
    """Split a run of blocks into those that travel as one message: adjacent in the pool, as such a message is
    not copied. A block that lies in several pages is copied anyway."""
    parts: list[range] = []
    names, offset = group.names, group.first
    most = max(1, MAX_SEGMENT_BLOCKS // group.tables)
    first = run.start
    while first < run.stop:
        end, limit = first + 1, min(run.stop, first + most)
        if group.tables > 1:
            end = limit
        while end < limit and names[end - offset] == names[end - offset - 1] + 1:
            end += 1
        parts.append(range(first, end))
        first = end
    return parts
