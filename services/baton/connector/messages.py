"""The words of the handoff: names, messages between prefill and decode, and what a machine asks to be done.

All are frozen and hashable, so that a state of the protocol can be stored, compared and explored. Rule
numbers in this package are those of docs/architecture.md, "The handoff".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

REPEAT_S = 1.0
"""Whoever waits for the other side says its last word again this often, as that or the answer may be lost."""
REPEAT_ASK_S = 10.0
"""Likewise for ``Ask``, which carries the whole prompt and may wait in decode's queue for long."""


class AbortReason(Enum):
    """Why a handoff was given up."""

    CANCELLED = "cancelled"
    """By the router, or by decode on its behalf."""
    SUPERSEDED = "superseded"
    """A newer attempt of the request came."""
    WITHDRAWN = "withdrawn"
    """By prefill: its first token was the last, or its engine refused."""
    LINK_LOST = "link_lost"
    TRANSFER = "transfer"
    """A receive ended without its bytes."""
    MANIFEST = "manifest"
    CHECKSUM = "checksum"
    STALLED = "stalled"
    """Nothing happened for too long on a healthy link."""


class Failure(Enum):
    """What the router may do about an attempt that failed."""

    REFUSED = "refused"
    """Nothing was begun in decode: ask another worker there."""
    LOST = "lost"
    """The handoff broke: go on from the tokens delivered, with another attempt."""
    FINAL = "final"
    """Another attempt would end in the same way."""


class Name(NamedTuple):
    """One try at one request. The router mints both parts and never reuses an attempt."""

    request_id: str
    attempt: int


class LinkId(NamedTuple):
    """A link's life between one process start of prefill and one of decode. The epoch is decode's to give."""

    prefill: str
    decode: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a request's blocks that is adjacent in decode's pool and travels as one message."""

    tag: int
    """Unique among everything decode ever posted on the link."""
    first_block: int
    num_blocks: int
    """Blocks are the link's: of the smaller of both sides' block sizes."""


# --- prefill to decode


@dataclass(frozen=True, slots=True)
class Ask:
    """Prefill asks for room, before it computes (rule 6)."""

    name: Name
    num_blocks: int
    """Blocks that the request's tokens fill, the partial last one included. Counted by each side; of no
    matter when an attempt is asked for again."""
    turn: float = 0.0
    """Whose turn is earlier is promised room first, be it asked for later; among equals, who asked first."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The first blocks are computed: decode binds pages now, not at queue time."""

    name: Name


@dataclass(frozen=True, slots=True)
class Manifest:
    """What prefill says it has sent; decode commits only what equals its own account (rule 4)."""

    num_tokens: int
    tokens_digest: bytes
    num_segments: int
    num_answers: int = 1
    """Answers that share the prompt."""


@dataclass(frozen=True, slots=True)
class First:
    """The first token of an answer, and what the router is told with it (``TokenDetails``): decode repeats
    both. Of a beam search, the likeliest first token, with the candidates: nobody is told of them."""

    token: int
    details: bytes = b""


@dataclass(frozen=True, slots=True)
class SendComplete:
    """Every send of the attempt completed while prefill's hold was unbroken."""

    name: Name
    manifest: Manifest
    firsts: tuple[First, ...]
    """Of each answer, in the request's order."""
    cached_tokens: int = 0
    checksums: tuple[int, ...] = ()
    """CRC-32 of each segment as it was sent, in the grant's order; none on a link that does not verify."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Prefill posts nothing more for the attempt, and what it had posted is over."""

    name: Name
    link: LinkId


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Prefill gives the attempt up, or has none of this name."""

    name: Name
    reason: str


# --- decode to prefill


@dataclass(frozen=True, slots=True)
class Credit:
    """Room is promised: prefill may compute."""

    name: Name


@dataclass(frozen=True, slots=True)
class Decline:
    name: Name
    reason: str
    elsewhere: bool = False
    """The request may be welcome at another decode worker."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Receives are posted for these segments. Blocks that none names are in decode's cache (rule 7)."""

    name: Name
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Decode has committed; prefill forgets the attempt."""

    name: Name


@dataclass(frozen=True, slots=True)
class Cancel:
    """Decode gives the attempt up, or has none of this name, and wants to hear Drained. Resent until there is
    proof."""

    name: Name


ToDecode = Ask | Ready | SendComplete | Drained | Withdraw
ToPrefill = Credit | Decline | Grant | Release | Cancel


# --- what a machine asks its service to do, in this order


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the link's control stream."""

    link: LinkId
    message: ToDecode | ToPrefill


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Post a receive into blocks, before anything that follows (rule 1).

    A block is named ``page * blocks_per_page + index``, for a link whose blocks are smaller than our pages.
    """

    link: LinkId
    tag: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """Cancel a receive if nothing has matched it; its completion is reported either way."""

    link: LinkId
    tag: int


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Send blocks, named as in ``PostReceive``, whose pages the machine has pinned until the completion is
    reported (rule 3)."""

    link: LinkId
    tag: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The request's KV is whole and its own: run it."""

    name: Name
    pages: tuple[int, ...]
    firsts: tuple[First, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Decode has promised room: prefill computes the request."""

    name: Name


@dataclass(frozen=True, slots=True)
class Stop:
    """The attempt is over here: free what the engine still holds for it."""

    name: Name


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the router that the attempt failed, and why."""

    name: Name
    reason: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Fence:
    """Force the link closed and report when no byte can move through it any more (rule 2)."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Retire:
    """A fence did not complete: only the end of this process proves that its memory is quiet."""

    link: LinkId


Action = Send | PostReceive | CancelReceive | SendBlocks | Commit | Compute | Stop | Fail | Fence | Retire
