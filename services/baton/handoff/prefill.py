"""Prefill's side of the handoff: the blocks that may be sent, and the hold on their source pages.

::

              credit            grant            all sent           release
    ASKED ─► COMPUTING ─┬─► (blocks leave as they are finished) ─► SENT ─► (forgotten)
                        │
                        └─ cancel, withdraw ─► STOPPED ── sends over ──► DRAINED said, (forgotten)

A page is pinned from the moment its send is posted until that send is over, whatever happens to the request
(rule 3): also a page of a window that the next chunk no longer sees, and a state's.

Any message may be lost. So while prefill waits for decode, it repeats its last message: Ask in ASKED, Ready
in COMPUTING until the grant, SendComplete in SENT. Decode answers Cancel to messages of an attempt that it
does not know, and prefill answers Withdraw.

Pure, like ``baton.handoff.decode``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.core.attempt_failure import AttemptFailure
from baton.handoff.blocks import GroupBlocks
from baton.handoff.messages import (
    REPEAT_ASK_S,
    REPEAT_S,
    AbortReason,
    Action,
    Ask,
    Cancel,
    Compute,
    Credit,
    Decline,
    Drained,
    Fail,
    First,
    Grant,
    LinkId,
    Manifest,
    Name,
    Ready,
    Release,
    Segment,
    Send,
    SendBlocks,
    SendComplete,
    Stop,
    ToPrefill,
    Withdraw,
)
from baton.handoff.tombstones import Tombstones
from baton.transport.block_names import pages_of


class SourcePages(Protocol):
    """Prefill's KV memory, as the state machine needs it."""

    def finished(self, name: Name, blocks_per_page: int) -> tuple[GroupBlocks, ...]:
        """Return the request's finished blocks of each group: those of a window without what no later token
        sees, a state only when it is the one after the whole prompt. Empty for a request that is unknown or
        has no pages. Called anew before every send: a preempted request has none, whatever it had before."""

    def pin(self, pages: tuple[int, ...]) -> None: ...

    def unpin(self, pages: tuple[int, ...]) -> None: ...


class PrefillHandoffState(Enum):
    ASKED = "asked"
    COMPUTING = "computing"
    SENT = "sent"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of prefill's work on a request."""

    num_tokens: int
    tokens_digest: bytes
    firsts: tuple[First, ...]
    cached_tokens: int


@dataclass(slots=True)
class PrefillHandoff:
    name: Name
    link: LinkId
    num_tokens: int
    wanted: tuple[range, ...]
    """The blocks of the link's size of each group that a token behind the prompt needs."""
    blocks_per_page: int
    state: PrefillHandoffState = PrefillHandoffState.ASKED
    ready_sent: bool = False
    granted: tuple[Segment, ...] | None = None
    unsent: list[Segment] = field(default_factory=list)
    checksums: dict[int, int] = field(default_factory=dict)
    """CRC-32 of the segments sent, by tag."""
    sending: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Pinned pages by the tag of their send, until it is over."""
    computed: Computed | None = None
    owes_drained: bool = False
    spoke_at: float | None = None
    """The time of the first tick after the last message (Ask, Ready or SendComplete) was sent."""


@dataclass(slots=True)
class PrefillCounters:
    stale: int = 0
    completed: int = 0
    aborted: Counter[AbortReason] = field(default_factory=Counter)


class PrefillHandoffs:
    """The state machine of all handoffs out of one prefill worker."""

    def __init__(self, source: SourcePages, tombstones: Tombstones | None = None) -> None:
        self.counters = PrefillCounters()
        self._source = source
        self._tombstones = tombstones or Tombstones()
        self._handoffs: dict[Name, PrefillHandoff] = {}
        self._by_tag: dict[tuple[LinkId, int], Name] = {}
        """The handoff of each granted segment, until its send is over or will never be posted."""
        self._links: dict[str, LinkId] = {}
        self._blocks_per_page: dict[LinkId, int] = {}

    @property
    def open_handoffs(self) -> int:
        return len(self._handoffs)

    def state_of(self, name: Name) -> PrefillHandoffState | None:
        handoff = self._handoffs.get(name)
        return handoff.state if handoff else None

    def name_of(self, link: LinkId, tag: int) -> Name | None:
        """Return the handoff that a transfer belongs to; None once the transfer is over."""
        return self._by_tag.get((link, tag))

    def busy(self, link: LinkId) -> bool:
        """Return whether a handoff is open on this link."""
        return any(handoff.link == link for handoff in self._handoffs.values())

    def pinned_pages(self) -> list[int]:
        return [p for h in self._handoffs.values() for pages in h.sending.values() for p in pages]

    # --- links

    def link_opened(self, link: LinkId, blocks_per_page: int = 1) -> None:
        """Add a link. ``blocks_per_page``: blocks of the link in a page of this worker; more than 1 if
        decode's blocks are smaller."""
        self._links[link.decode] = link
        self._blocks_per_page[link] = blocks_per_page

    def link_lost(self, link: LinkId, now: float) -> list[Action]:
        """Remove a link that is gone. The pages of each of its sends stay pinned until the send is over."""
        if self._links.get(link.decode) == link:
            del self._links[link.decode]
            del self._blocks_per_page[link]
        actions: list[Action] = []
        for handoff in [h for h in self._handoffs.values() if h.link == link]:
            if handoff.state in (PrefillHandoffState.ASKED, PrefillHandoffState.COMPUTING):
                actions.append(Fail(handoff.name, "the link to decode was lost", AttemptFailure.HANDOFF_LOST))
            handoff.owes_drained = False
            actions += self._stop(handoff, AbortReason.LINK_LOST, now)
        return actions

    # --- the life of a request at prefill

    def ask(
        self, name: Name, link: LinkId, num_tokens: int, wanted: tuple[range, ...], now: float
    ) -> list[Action]:
        """Ask decode for room for a request. ``wanted``: for each group, the blocks of the link's size that a
        token behind the prompt needs, and that prefill keeps until they may be sent."""
        if self._links.get(link.decode) != link:
            return [Fail(name, "the link to decode was lost", AttemptFailure.HANDOFF_LOST)]
        if name in self._handoffs:
            return []
        if self._tombstones.covers(name):
            self.counters.stale += 1
            return [Fail(name, "this attempt is over", AttemptFailure.WORKER_ERROR)]
        if self._tombstones.full:
            return [Fail(name, "prefill has too many ended attempts to remember", AttemptFailure.REFUSED)]
        per_page = self._blocks_per_page[link]
        self._handoffs[name] = PrefillHandoff(name, link, num_tokens, wanted, per_page)
        return [Send(link, Ask(name, num_tokens))]

    def progress(self, name: Name) -> list[Action]:
        """Send those blocks of the request that have been finished since the last call."""
        handoff = self._handoffs.get(name)
        if handoff is None or handoff.state is not PrefillHandoffState.COMPUTING:
            return []
        actions: list[Action] = []
        if not handoff.ready_sent and (handoff.computed is not None or self._begun(handoff)):
            handoff.ready_sent = True
            actions += self._say(handoff, Ready(name))
        return actions + self._push(handoff)

    def _begun(self, handoff: PrefillHandoff) -> bool:
        return any(group.names for group in self._source.finished(handoff.name, handoff.blocks_per_page))

    def computed(self, name: Name, computed: Computed) -> list[Action]:
        """Note that prefill is done: every block is finished, even the partial last one, and none
        preempted."""
        handoff = self._handoffs.get(name)
        if handoff is None or handoff.state is not PrefillHandoffState.COMPUTING:
            return []
        handoff.computed = computed
        return self.progress(name) + self._complete_if_sent(handoff)

    def _push(self, handoff: PrefillHandoff) -> list[Action]:
        """Post every granted segment whose blocks are finished."""
        if not handoff.unsent:
            return []
        actions: list[Action] = []
        waiting: list[Segment] = []
        finished = self._source.finished(handoff.name, handoff.blocks_per_page)
        for segment in handoff.unsent:
            end = segment.first_block + segment.num_blocks
            if not finished or end > finished[segment.group].end:
                waiting.append(segment)
                continue
            blocks = finished[segment.group].names_of(segment.first_block, end)
            pages = self._pages_to_pin(handoff, blocks)
            self._source.pin(pages)
            handoff.sending[segment.tag] = pages
            actions.append(SendBlocks(handoff.link, segment.tag, blocks))
        handoff.unsent = waiting
        return actions

    def _pages_to_pin(self, handoff: PrefillHandoff, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return pages_of(blocks, handoff.blocks_per_page)

    def sent(self, link: LinkId, tag: int, ok: bool, now: float, checksum: int | None = None) -> list[Action]:
        """Note that a send is over: its pages may change. Not ok: the link is broken, and an unknown part of
        the send has landed. Nothing more is sent on the link then, as Drained would be no proof any more.

        ``checksum``: CRC-32 of the blocks sent, on a link that verifies.
        """
        name = self._by_tag.pop((link, tag), None)
        handoff = self._handoffs.get(name) if name is not None else None
        if handoff is None or tag not in handoff.sending:
            self.counters.stale += 1
            return []
        self._source.unpin(handoff.sending.pop(tag))
        if not ok:
            return self.link_lost(link, now)
        if handoff.state is PrefillHandoffState.STOPPED:
            return self._drained_if_quiet(handoff, now)
        if checksum is not None:
            handoff.checksums[tag] = checksum
        return self._complete_if_sent(handoff)

    def _complete_if_sent(self, handoff: PrefillHandoff) -> list[Action]:
        done = handoff.computed
        if done is None or handoff.granted is None or handoff.unsent or handoff.sending:
            return []
        handoff.state = PrefillHandoffState.SENT
        self.counters.completed += 1
        complete = self._send_complete(handoff, done, handoff.granted)
        return [*self._say(handoff, complete), Stop(handoff.name)]

    @staticmethod
    def _send_complete(
        handoff: PrefillHandoff, done: Computed, segments: tuple[Segment, ...]
    ) -> SendComplete:
        manifest = Manifest(done.num_tokens, done.tokens_digest, len(segments), len(done.firsts))
        known = handoff.checksums
        checksums = tuple(known[segment.tag] for segment in segments if segment.tag in known)
        return SendComplete(handoff.name, manifest, done.firsts, done.cached_tokens, checksums)

    # --- messages from decode

    def receive(self, link: LinkId, message: ToPrefill, now: float) -> list[Action]:
        """Take one control message; messages with an unknown name, an older attempt or an older epoch are
        counted and dropped."""
        if self._links.get(link.decode) != link:
            self.counters.stale += 1
            return []
        handoff = self._handoffs.get(message.name)
        if isinstance(message, Cancel):
            return self._on_cancel(link, message.name, handoff, now)
        if handoff is None or handoff.link != link or handoff.state is PrefillHandoffState.STOPPED:
            self.counters.stale += 1
            return self._over_already(link, message)
        match message:
            case Credit():
                return self._on_credit(handoff)
            case Decline() if handoff.state is PrefillHandoffState.ASKED:
                self._forget(handoff, now)
                failure = AttemptFailure.REFUSED if message.elsewhere else AttemptFailure.WORKER_ERROR
                return [Fail(handoff.name, message.reason, failure), Stop(handoff.name)]
            case Grant():
                return self._on_grant(handoff, message, now)
            case Release() if handoff.state is PrefillHandoffState.SENT:
                self._forget(handoff, now)
                return []
            case _:
                self.counters.stale += 1
                return []

    @staticmethod
    def _over_already(link: LinkId, message: ToPrefill) -> list[Action]:
        """Answer a message of an attempt that is over at prefill: decode still keeps room, as the message
        that ended the attempt was lost."""
        if isinstance(message, Credit | Grant):
            return [Send(link, Withdraw(message.name, "this attempt is over"))]
        return []

    def _on_credit(self, handoff: PrefillHandoff) -> list[Action]:
        if handoff.state is not PrefillHandoffState.ASKED:
            return []
        handoff.state = PrefillHandoffState.COMPUTING
        return [Compute(handoff.name)]

    def _on_grant(self, handoff: PrefillHandoff, grant: Grant, now: float) -> list[Action]:
        if handoff.granted is not None or handoff.state is not PrefillHandoffState.COMPUTING:
            return []
        wrong = self._wrong(handoff, grant.segments)
        if wrong is not None:
            withdrawn = self._withdraw(handoff.name, wrong, AbortReason.MANIFEST, now)
            return [Fail(handoff.name, wrong, AttemptFailure.HANDOFF_LOST), *withdrawn]
        handoff.granted = grant.segments
        handoff.unsent = list(grant.segments)
        for segment in grant.segments:
            self._by_tag[handoff.link, segment.tag] = handoff.name
        return self._push(handoff) + self._complete_if_sent(handoff)

    def _wrong(self, handoff: PrefillHandoff, segments: tuple[Segment, ...]) -> str | None:
        """Return why granted segments cannot be sent, or None. Decode would wait for ever for blocks that are
        never computed, or that prefill gives back before decode asks, and take the end of the first of two
        sends with one tag for the end of both."""
        for segment in segments:
            if not 0 <= segment.group < len(handoff.wanted):
                return f"decode granted blocks of KV group {segment.group}, of {len(handoff.wanted)}"
            if segment.num_blocks < 1:
                return "decode granted a segment without blocks"
            wanted, end = handoff.wanted[segment.group], segment.first_block + segment.num_blocks
            if segment.first_block < wanted.start or end > wanted.stop:
                return (
                    f"decode granted KV blocks {segment.first_block} to {end - 1} of group {segment.group}, "
                    f"of which the request has {wanted.start} to {wanted.stop - 1} to send"
                )
        tags = {segment.tag for segment in segments}
        if len(tags) < len(segments) or any((handoff.link, tag) in self._by_tag for tag in tags):
            return "decode granted a tag twice"
        return None

    def _on_cancel(
        self, link: LinkId, name: Name, handoff: PrefillHandoff | None, now: float
    ) -> list[Action]:
        """Cancel an attempt. An unknown one is buried, and so never sent, and answered as well."""
        if handoff is None or handoff.link != link:
            self._tombstones.bury(name, now)
            return [Send(link, Drained(name, link))]
        handoff.owes_drained = True
        return self._stop(handoff, AbortReason.CANCELLED, now)

    # --- giving up

    def cancel(self, name: Name, now: float) -> list[Action]:
        """Give an attempt up for the router, in whatever state it is, known here or not (rule 9)."""
        if name not in self._handoffs:
            self._tombstones.bury(name, now)
            return []
        return self._withdraw(name, "cancelled", AbortReason.CANCELLED, now)

    def withdraw(self, name: Name, reason: str, now: float) -> list[Action]:
        """Give an attempt up that prefill cannot or need not hand on."""
        return self._withdraw(name, reason, AbortReason.WITHDRAWN, now)

    def _withdraw(self, name: Name, text: str, reason: AbortReason, now: float) -> list[Action]:
        handoff = self._handoffs.get(name)
        if handoff is None or handoff.state is PrefillHandoffState.STOPPED:
            return []
        actions: list[Action] = [Send(handoff.link, Withdraw(name, text))]
        return actions + self._stop(handoff, reason, now)

    def _stop(self, handoff: PrefillHandoff, reason: AbortReason, now: float) -> list[Action]:
        actions: list[Action] = []
        if handoff.state is not PrefillHandoffState.STOPPED:
            if handoff.state is not PrefillHandoffState.SENT:
                self.counters.aborted[reason] += 1
            handoff.state = PrefillHandoffState.STOPPED
            for segment in handoff.unsent:
                self._by_tag.pop((handoff.link, segment.tag), None)
            handoff.unsent = []
            actions.append(Stop(handoff.name))
        return actions + self._drained_if_quiet(handoff, now)

    def _drained_if_quiet(self, handoff: PrefillHandoff, now: float) -> list[Action]:
        if handoff.sending:
            return []
        self._forget(handoff, now)
        if handoff.owes_drained:
            return [Send(handoff.link, Drained(handoff.name, handoff.link))]
        return []

    def _forget(self, handoff: PrefillHandoff, now: float) -> None:
        del self._handoffs[handoff.name]
        self._tombstones.bury(handoff.name, now)

    # --- time, which proves nothing

    def _say(self, handoff: PrefillHandoff, message: Ask | Ready | SendComplete) -> list[Action]:
        handoff.spoke_at = None
        return [Send(handoff.link, message)]

    @staticmethod
    def _last_word(handoff: PrefillHandoff) -> Ask | Ready | SendComplete | None:
        """Return the message that decode has yet to answer, if there is one."""
        match handoff.state:
            case PrefillHandoffState.ASKED:
                return Ask(handoff.name, handoff.num_tokens)
            case PrefillHandoffState.COMPUTING if handoff.ready_sent and handoff.granted is None:
                return Ready(handoff.name)
            case PrefillHandoffState.SENT if handoff.computed is not None and handoff.granted is not None:
                return PrefillHandoffs._send_complete(handoff, handoff.computed, handoff.granted)
            case _:
                return None

    def tick(self, now: float) -> list[Action]:
        """Repeat messages that may have been lost."""
        self._tombstones.expire(now)
        actions: list[Action] = []
        for handoff in self._handoffs.values():
            message = self._last_word(handoff)
            if message is None:
                continue
            if handoff.spoke_at is None:
                handoff.spoke_at = now
            elif now - handoff.spoke_at >= (REPEAT_ASK_S if isinstance(message, Ask) else REPEAT_S):
                handoff.spoke_at = now
                actions.append(Send(handoff.link, message))
        return actions
