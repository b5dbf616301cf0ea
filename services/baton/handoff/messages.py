"""The types of the handoff: names, messages between prefill and decode, and actions of the state machines.

All types are frozen and hashable, so that a state of the protocol can be stored, compared and explored. Rule
numbers in this package are those of docs/architecture.md, "The handoff".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from baton.core.attempt_failure import AttemptFailure
from baton.handoff.blocks import Binding

REPEAT_S = 1.0
"""The period at which a side that waits for an answer repeats its last message, in seconds: the message or
the answer may be lost."""
REPEAT_ASK_S = 10.0
"""The period at which ``Ask`` is repeated, in seconds: it carries the whole prompt and may wait in decode's
queue for long."""


class AbortReason(Enum):
    """The reason why a handoff was given up."""

    CANCELLED = "cancelled"
    """The router gave the attempt up, or decode did on its behalf."""
    SUPERSEDED = "superseded"
    """A newer attempt of the request came."""
    WITHDRAWN = "withdrawn"
    """Prefill gave the attempt up: its first token was the last, or its engine refused."""
    LINK_LOST = "link_lost"
    TRANSFER = "transfer"
    """A receive ended without its bytes."""
    MANIFEST = "manifest"
    CHECKSUM = "checksum"
    STALLED = "stalled"
    """Nothing happened for too long on a healthy link."""


class Name(NamedTuple):
    """The name of one attempt at one request. The router assigns both parts and never reuses an attempt."""

    request_id: str
    attempt: int


class LinkId(NamedTuple):
    """The name of one link between two process starts, of prefill and decode. Decode assigns the epoch."""

    prefill: str
    decode: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a request's blocks of one KV group, which travels as one message. It is adjacent in decode's
    pool if the group has one table."""

    tag: int
    """A number that is unique among all segments that decode ever posted on the link."""
    first_block: int
    num_blocks: int
    """Blocks of the link's size, the smaller of both sides' block sizes. A state is one block."""
    group: int = 0
    """The group's number among those that both sides have agreed on."""


# --- prefill to decode


@dataclass(frozen=True, slots=True)
class Ask:
    """Prefill's request for room, before it computes (rule 6)."""

    name: Name
    num_tokens: int
    """Tokens of the request. Each side counts them itself, and decode what room they take in each group; the
    number is ignored when an attempt is asked for again."""
    turn: float = 0.0
    """The sort key of the queue for room: the least is first, even if it asked later; equals go in the order
    in which they asked."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Prefill has computed the first blocks: decode binds pages now, not at queue time."""

    name: Name


@dataclass(frozen=True, slots=True)
class Manifest:
    """Prefill's account of what it has sent; decode commits only if it equals decode's own (rule 4)."""

    num_tokens: int
    tokens_digest: bytes
    num_segments: int
    num_answers: int = 1
    """Number of answers that share the prompt."""


@dataclass(frozen=True, slots=True)
class First:
    """The first token of an answer and its serialized ``TokenDetails``; decode sends both to the router
    again. For a beam search, the likeliest first token with the candidates; the router gets neither."""

    token: int
    details: bytes = b""


@dataclass(frozen=True, slots=True)
class SendComplete:
    """Every send of the attempt has completed while prefill held its pages without a break."""

    name: Name
    manifest: Manifest
    firsts: tuple[First, ...]
    """The first token of each answer, in the request's order."""
    cached_tokens: int = 0
    checksums: tuple[int, ...] = ()
    """CRC-32 of each segment as it was sent, in the grant's order; empty on a link that does not verify."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Prefill posts no more sends for the attempt, and those it had posted are over."""

    name: Name
    link: LinkId


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Prefill gives the attempt up, or does not know it."""

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
    """Whether another decode worker may accept the request."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode has posted receives for these segments. Blocks in no segment are in decode's cache (rule 7)."""

    name: Name
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Decode has committed; prefill forgets the attempt."""

    name: Name


@dataclass(frozen=True, slots=True)
class Cancel:
    """Decode gives the attempt up, or does not know it, and waits for Drained. Resent until there is proof
    that no byte will land."""

    name: Name


ToDecode = Ask | Ready | SendComplete | Drained | Withdraw
ToPrefill = Credit | Decline | Grant | Release | Cancel


# --- actions of a state machine, which its role executes in the order returned


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the link's control stream."""

    link: LinkId
    message: ToDecode | ToPrefill


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Post a receive into blocks, before any later action (rule 1). They are named as in
    ``baton.transport.block_names``: blocks of a link may be smaller than local pages, or lie in several."""

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
    """Send blocks, named as in ``PostReceive``. The machine has pinned their pages until the completion is
    reported (rule 3)."""

    link: LinkId
    tag: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Run the request: its KV is complete and no longer written to."""

    name: Name
    binding: Binding
    firsts: tuple[First, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the request at prefill: decode has promised room."""

    name: Name


@dataclass(frozen=True, slots=True)
class Stop:
    """Free everything that the engine still holds for the attempt, which is over on this side."""

    name: Name


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the router that the attempt failed, and the reason."""

    name: Name
    reason: str
    failure: AttemptFailure


@dataclass(frozen=True, slots=True)
class Fence:
    """Force the link closed, and report when no byte can move through it any more (rule 2)."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Retire:
    """End this process, as a fence did not complete: only that proves that nothing writes to its memory."""

    link: LinkId


Action = Send | PostReceive | CancelReceive | SendBlocks | Commit | Compute | Stop | Fail | Fence | Retire
