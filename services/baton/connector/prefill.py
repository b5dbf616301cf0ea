"""Prefill's side of the handoff: what may be sent, and how long its source pages are held.

::

              credit            grant            all sent           release
    ASKED ─► COMPUTING ─┬─► (blocks leave as they are finished) ─► SENT ─► (forgotten)
                        │
                        └─ cancel, withdraw ─► STOPPED ── sends over ──► DRAINED said, (forgotten)

A page is pinned from the moment its send is posted until that send is over, whatever happens to the request
(rule 3).

Any message may be lost. So while decode's next word is awaited, the last one to it is said again: Ask in
ASKED, Ready in COMPUTING until the grant, SendComplete in SENT. Decode says Cancel of an attempt that it does
not know, and likewise Withdraw is said here.

Pure, like ``baton.connector.decode``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.connector.messages import (
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
    Failure,
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
from baton.connector.tombstones import Tombstones


class SourcePages(Protocol):
    """Prefill's memory, as the machine needs it."""

    def finished(self, name: Name, blocks_per_page: int) -> tuple[int, ...]:
        """The request's finished blocks now, in order, named as in ``SendBlocks``. Asked anew before every
        send: a preempted request has none, whatever it had before."""

    def pin(self, pages: tuple[int, ...]) -> None: ...

    def unpin(self, pages: tuple[int, ...]) -> None: ...


class State(Enum):
    ASKED = "asked"
    COMPUTING = "computing"
    SENT = "sent"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Computed:
    """The end of prefill's work on a request."""

    num_tokens: int
    tokens_digest: bytes
    firsts: tuple[First, ...]
    cached_tokens: int


@dataclass(slots=True)
class Handoff:
    name: Name
    link: LinkId
    num_blocks: int
    blocks_per_page: int
    state: State = State.ASKED
    ready_sent: bool = False
    granted: tuple[Segment, ...] | None = None
    unsent: list[Segment] = field(default_factory=list)
    checksums: dict[int, int] = field(default_factory=dict)
    """CRC-32 of what was sent, by tag."""
    sending: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Pinned pages by the tag of their send, until it is over."""
    computed: Computed | None = None
    owes_drained: bool = False
    spoke_at: float | None = None
    """The first tick after the last word here (Ask, Ready or SendComplete) was said."""


@dataclass(slots=True)
class Counters:
    stale: int = 0
    completed: int = 0
    aborted: Counter[AbortReason] = field(default_factory=Counter)


class PrefillHandoffs:
    """All handoffs out of one prefill worker."""

    def __init__(self, source: SourcePages, tombstones: Tombstones | None = None) -> None:
        self.counters = Counters()
        self._source = source
        self._tombstones = tombstones or Tombstones()
        self._handoffs: dict[Name, Handoff] = {}
        self._by_tag: dict[tuple[LinkId, int], Name] = {}
        """Of what is granted, until its send is over or will never be."""
        self._links: dict[str, LinkId] = {}
        self._blocks_per_page: dict[LinkId, int] = {}

    @property
    def open_handoffs(self) -> int:
        return len(self._handoffs)

    def state_of(self, name: Name) -> State | None:
        handoff = self._handoffs.get(name)
        return handoff.state if handoff else None

    def name_of(self, link: LinkId, tag: int) -> Name | None:
        """Whose transfer this is, until it is over."""
        return self._by_tag.get((link, tag))

    def busy(self, link: LinkId) -> bool:
        """Whether a handoff is open on this link."""
        return any(handoff.link == link for handoff in self._handoffs.values())

    def pinned_pages(self) -> list[int]:
        return [p for h in self._handoffs.values() for pages in h.sending.values() for p in pages]

    # --- links

    def link_opened(self, link: LinkId, blocks_per_page: int = 1) -> None:
        """``blocks_per_page``: blocks of the link in one of our pages; more than 1 where decode's are
        smaller."""
        self._links[link.decode] = link
        self._blocks_per_page[link] = blocks_per_page

    def link_lost(self, link: LinkId, now: float) -> list[Action]:
        """The link is gone. Its sends will each be reported over; until then their pages stay pinned."""
        if self._links.get(link.decode) == link:
            del self._links[link.decode]
            del self._blocks_per_page[link]
        actions: list[Action] = []
        for handoff in [h for h in self._handoffs.values() if h.link == link]:
            if handoff.state in (State.ASKED, State.COMPUTING):
                actions.append(Fail(handoff.name, "the link to decode was lost", Failure.LOST))
            handoff.owes_drained = False
            actions += self._stop(handoff, AbortReason.LINK_LOST, now)
        return actions

    # --- the request's life here

    def ask(self, name: Name, link: LinkId, num_blocks: int, now: float) -> list[Action]:
        """A request arrived for handing on over this link, in so many of the link's blocks."""
        if self._links.get(link.decode) != link:
            return [Fail(name, "the link to decode was lost", Failure.LOST)]
        if name in self._handoffs:
            return []
        if self._tombstones.covers(name):
            self.counters.stale += 1
            return [Fail(name, "this attempt is over", Failure.FINAL)]
        if self._tombstones.full:
            return [Fail(name, "prefill has too many ended attempts to remember", Failure.REFUSED)]
        self._handoffs[name] = Handoff(name, link, num_blocks, self._blocks_per_page[link])
        return [Send(link, Ask(name, num_blocks))]

    def progress(self, name: Name) -> list[Action]:
        """More of the request's blocks are finished and may be sent."""
        handoff = self._handoffs.get(name)
        if handoff is None or handoff.state is not State.COMPUTING:
            return []
        actions: list[Action] = []
        if not handoff.ready_sent and self._source.finished(name, handoff.blocks_per_page):
            handoff.ready_sent = True
            actions += self._say(handoff, Ready(name))
        return actions + self._push(handoff)

    def computed(self, name: Name, computed: Computed) -> list[Action]:
        """Prefill is done: every block is finished, the partial last one included, and none is preempted."""
        handoff = self._handoffs.get(name)
        if handoff is None or handoff.state is not State.COMPUTING:
            return []
        handoff.computed = computed
        return self.progress(name) + self._complete_if_sent(handoff)

    def _push(self, handoff: Handoff) -> list[Action]:
        """Post every granted segment whose blocks are finished."""
        if not handoff.unsent:
            return []
        actions: list[Action] = []
        waiting: list[Segment] = []
        finished = self._source.finished(handoff.name, handoff.blocks_per_page)
        for segment in handoff.unsent:
            end = segment.first_block + segment.num_blocks
            if end > len(finished):
                waiting.append(segment)
                continue
            blocks = finished[segment.first_block : end]
            pages = tuple(dict.fromkeys(block // handoff.blocks_per_page for block in blocks))
            self._source.pin(pages)
            handoff.sending[segment.tag] = pages
            actions.append(SendBlocks(handoff.link, segment.tag, blocks))
        handoff.unsent = waiting
        return actions

    def sent(self, link: LinkId, tag: int, ok: bool, now: float, checksum: int | None = None) -> list[Action]:
        """A send is over: its pages may change. Not ok: the link is broken, and how much of the send has
        landed is unknown. So nothing more is said on the link: after that, Drained would be no proof.

        ``checksum``: CRC-32 of what was sent, on a link that verifies.
        """
        name = self._by_tag.pop((link, tag), None)
        handoff = self._handoffs.get(name) if name is not None else None
        if handoff is None or tag not in handoff.sending:
            self.counters.stale += 1
            return []
        self._source.unpin(handoff.sending.pop(tag))
        if not ok:
            return self.link_lost(link, now)
        if handoff.state is State.STOPPED:
            return self._drained_if_quiet(handoff, now)
        if checksum is not None:
            handoff.checksums[tag] = checksum
        return self._complete_if_sent(handoff)

    def _complete_if_sent(self, handoff: Handoff) -> list[Action]:
        done = handoff.computed
        if done is None or handoff.granted is None or handoff.unsent or handoff.sending:
            return []
        handoff.state = State.SENT
        self.counters.completed += 1
        complete = self._send_complete(handoff, done, handoff.granted)
        return [*self._say(handoff, complete), Stop(handoff.name)]

    @staticmethod
    def _send_complete(handoff: Handoff, done: Computed, segments: tuple[Segment, ...]) -> SendComplete:
        manifest = Manifest(done.num_tokens, done.tokens_digest, len(segments), len(done.firsts))
        known = handoff.checksums
        checksums = tuple(known[segment.tag] for segment in segments if segment.tag in known)
        return SendComplete(handoff.name, manifest, done.firsts, done.cached_tokens, checksums)

    # --- messages from decode

    def receive(self, link: LinkId, message: ToPrefill, now: float) -> list[Action]:
        """Take one control message; unknown, older-attempt and older-epoch ones are counted and dropped."""
        if self._links.get(link.decode) != link:
            self.counters.stale += 1
            return []
        handoff = self._handoffs.get(message.name)
        if isinstance(message, Cancel):
            return self._on_cancel(link, message.name, handoff, now)
        if handoff is None or handoff.link != link or handoff.state is State.STOPPED:
            self.counters.stale += 1
            return self._over_already(link, message)
        match message:
            case Credit():
                return self._on_credit(handoff)
            case Decline() if handoff.state is State.ASKED:
                self._forget(handoff, now)
                failure = Failure.REFUSED if message.elsewhere else Failure.FINAL
                return [Fail(handoff.name, message.reason, failure), Stop(handoff.name)]
            case Grant():
                return self._on_grant(handoff, message, now)
            case Release() if handoff.state is State.SENT:
                self._forget(handoff, now)
                return []
            case _:
                self.counters.stale += 1
                return []

    @staticmethod
    def _over_already(link: LinkId, message: ToPrefill) -> list[Action]:
        """Decode keeps room for an attempt that is over here; the word that said so was lost."""
        if isinstance(message, Credit | Grant):
            return [Send(link, Withdraw(message.name, "this attempt is over"))]
        return []

    def _on_credit(self, handoff: Handoff) -> list[Action]:
        if handoff.state is not State.ASKED:
            return []
        handoff.state = State.COMPUTING
        return [Compute(handoff.name)]

    def _on_grant(self, handoff: Handoff, grant: Grant, now: float) -> list[Action]:
        if handoff.granted is not None or handoff.state is not State.COMPUTING:
            return []
        wrong = self._wrong(handoff, grant.segments)
        if wrong is not None:
            withdrawn = self._withdraw(handoff.name, wrong, AbortReason.MANIFEST, now)
            return [Fail(handoff.name, wrong, Failure.LOST), *withdrawn]
        handoff.granted = grant.segments
        handoff.unsent = list(grant.segments)
        for segment in grant.segments:
            self._by_tag[handoff.link, segment.tag] = handoff.name
        return self._push(handoff) + self._complete_if_sent(handoff)

    def _wrong(self, handoff: Handoff, segments: tuple[Segment, ...]) -> str | None:
        """Why these cannot be sent, or None. Decode would wait for ever for what is never computed; and of
        two sends with one tag, the end of the first would be taken for that of both."""
        if any(segment.first_block + segment.num_blocks > handoff.num_blocks for segment in segments):
            return f"decode granted more than the {handoff.num_blocks} KV blocks of the request"
        if any(segment.num_blocks < 1 for segment in segments):
            return "decode granted a segment without blocks"
        tags = {segment.tag for segment in segments}
        if len(tags) < len(segments) or any((handoff.link, tag) in self._by_tag for tag in tags):
            return "decode granted a tag twice"
        return None

    def _on_cancel(self, link: LinkId, name: Name, handoff: Handoff | None, now: float) -> list[Action]:
        """Answered even for an attempt never heard of: it is buried, so nothing of it will ever be posted."""
        if handoff is None or handoff.link != link:
            self._tombstones.bury(name, now)
            return [Send(link, Drained(name, link))]
        handoff.owes_drained = True
        return self._stop(handoff, AbortReason.CANCELLED, now)

    # --- giving up

    def cancel(self, name: Name, now: float) -> list[Action]:
        """The router gives the attempt up, in whatever state it is, known here or not (rule 9)."""
        if name not in self._handoffs:
            self._tombstones.bury(name, now)
            return []
        return self._withdraw(name, "cancelled", AbortReason.CANCELLED, now)

    def withdraw(self, name: Name, reason: str, now: float) -> list[Action]:
        """Prefill cannot or need not hand the request on."""
        return self._withdraw(name, reason, AbortReason.WITHDRAWN, now)

    def _withdraw(self, name: Name, text: str, reason: AbortReason, now: float) -> list[Action]:
        handoff = self._handoffs.get(name)
        if handoff is None or handoff.state is State.STOPPED:
            return []
        actions: list[Action] = [Send(handoff.link, Withdraw(name, text))]
        return actions + self._stop(handoff, reason, now)

    def _stop(self, handoff: Handoff, reason: AbortReason, now: float) -> list[Action]:
        actions: list[Action] = []
        if handoff.state is not State.STOPPED:
            if handoff.state is not State.SENT:
                self.counters.aborted[reason] += 1
            handoff.state = State.STOPPED
            for segment in handoff.unsent:
                self._by_tag.pop((handoff.link, segment.tag), None)
            handoff.unsent = []
            actions.append(Stop(handoff.name))
        return actions + self._drained_if_quiet(handoff, now)

    def _drained_if_quiet(self, handoff: Handoff, now: float) -> list[Action]:
        if handoff.sending:
            return []
        self._forget(handoff, now)
        if handoff.owes_drained:
            return [Send(handoff.link, Drained(handoff.name, handoff.link))]
        return []

    def _forget(self, handoff: Handoff, now: float) -> None:
        del self._handoffs[handoff.name]
        self._tombstones.bury(handoff.name, now)

    # --- time, which proves nothing

    def _say(self, handoff: Handoff, message: Ask | Ready | SendComplete) -> list[Action]:
        handoff.spoke_at = None
        return [Send(handoff.link, message)]

    @staticmethod
    def _last_word(handoff: Handoff) -> Ask | Ready | SendComplete | None:
        """What decode has yet to answer."""
        match handoff.state:
            case State.ASKED:
                return Ask(handoff.name, handoff.num_blocks)
            case State.COMPUTING if handoff.ready_sent and handoff.granted is None:
                return Ready(handoff.name)
            case State.SENT if handoff.computed is not None and handoff.granted is not None:
                return PrefillHandoffs._send_complete(handoff, handoff.computed, handoff.granted)
            case _:
                return None

    def tick(self, now: float) -> list[Action]:
        """Repeat what may have been lost."""
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
