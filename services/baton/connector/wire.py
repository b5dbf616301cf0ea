"""The handoff's messages as protobuf, and back."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from baton.connector.messages import (
    Cancel,
    Credit,
    Decline,
    Drained,
    First,
    Grant,
    LinkId,
    Manifest,
    Name,
    Ready,
    Release,
    Segment,
    SendComplete,
    ToDecode,
    ToPrefill,
    Withdraw,
)
from baton.connector.ranks.ends import Strand
from baton.connector.ranks.share import Share, Tie
from baton.v1 import handoff_pb2 as pb
from baton.v1.worker_pb2 import TokenDetails

FromPrefill = Ready | SendComplete | Drained | Withdraw
"""What prefill says after it has asked; Ask is built by the service, which alone has the tokens."""


def _name(name: Name) -> pb.Name:
    return pb.Name(request_id=name.request_id, attempt=name.attempt)


def name_of(name: pb.Name) -> Name:
    return Name(name.request_id, name.attempt)


def to_decode(message: FromPrefill) -> pb.PrefillMessage:
    name = _name(message.name)
    match message:
        case Ready():
            return pb.PrefillMessage(ready=pb.Ready(name=name))
        case SendComplete(manifest=manifest):
            complete = pb.SendComplete(
                name=name,
                num_tokens=manifest.num_tokens,
                tokens_digest=manifest.tokens_digest,
                num_segments=manifest.num_segments,
                firsts=[pb.FirstToken(token=f.token, details=f.details) for f in message.firsts],
                cached_tokens=message.cached_tokens,
                checksums=message.checksums,
            )
            return pb.PrefillMessage(send_complete=complete)
        case Drained():
            return pb.PrefillMessage(drained=pb.Drained(name=name, epoch=message.link.epoch))
        case Withdraw():
            return pb.PrefillMessage(withdraw=pb.Withdraw(name=name, reason=message.reason))


def from_prefill(message: pb.PrefillMessage, link: LinkId) -> ToDecode | None:
    """None: a kind of message that the state machine does not take (greeting, ask, heartbeat, unknown)."""
    match message.WhichOneof("message"):
        case "ready":
            return Ready(name_of(message.ready.name))
        case "send_complete":
            return _send_complete(message.send_complete)
        case "drained":
            of = LinkId(link.prefill, link.decode, message.drained.epoch)
            return Drained(name_of(message.drained.name), of)
        case "withdraw":
            return Withdraw(name_of(message.withdraw.name), message.withdraw.reason)
        case _:
            return None


def _send_complete(body: pb.SendComplete) -> SendComplete:
    """A first token whose details cannot be read is none: the manifest counts too few, and matches no
    request. Later, at the commit, there would be nobody to tell."""
    firsts = tuple(First(first.token, first.details) for first in body.firsts if _readable(first.details))
    manifest = Manifest(body.num_tokens, body.tokens_digest, body.num_segments, len(firsts))
    return SendComplete(name_of(body.name), manifest, firsts, body.cached_tokens, tuple(body.checksums))


def _readable(details: bytes) -> bool:
    try:
        TokenDetails.FromString(details)
    except DecodeError:
        return False
    return True


def to_prefill(message: ToPrefill) -> pb.DecodeMessage:
    name = _name(message.name)
    match message:
        case Credit():
            return pb.DecodeMessage(credit=pb.Credit(name=name))
        case Decline():
            decline = pb.Decline(name=name, reason=message.reason, elsewhere=message.elsewhere)
            return pb.DecodeMessage(decline=decline)
        case Grant():
            segments = [
                pb.Segment(tag=s.tag, first_block=s.first_block, num_blocks=s.num_blocks)
                for s in message.segments
            ]
            return pb.DecodeMessage(grant=pb.Grant(name=name, segments=segments))
        case Release():
            return pb.DecodeMessage(release=pb.Release(name=name))
        case Cancel():
            return pb.DecodeMessage(cancel=pb.CancelHandoff(name=name))


def from_decode(message: pb.DecodeMessage) -> ToPrefill | None:
    """None: a kind of message that the state machine does not take (greeting, heartbeat, unknown)."""
    match message.WhichOneof("message"):
        case "credit":
            return Credit(name_of(message.credit.name))
        case "decline":
            decline = message.decline
            return Decline(name_of(decline.name), decline.reason, decline.elsewhere)
        case "grant":
            segments = tuple(Segment(s.tag, s.first_block, s.num_blocks) for s in message.grant.segments)
            return Grant(name_of(message.grant.name), segments)
        case "release":
            return Release(name_of(message.release.name))
        case "cancel":
            return Cancel(name_of(message.cancel.name))
        case _:
            return None


def share_to_proto(share: Share) -> pb.Share:
    heads, layers = share.heads, share.layers
    return pb.Share(
        first_head=heads.start, num_heads=len(heads), first_layer=layers.start, num_layers=len(layers)
    )


def share_of(share: pb.Share) -> Share:
    return Share(
        range(share.first_head, share.first_head + share.num_heads),
        range(share.first_layer, share.first_layer + share.num_layers),
    )


def accept_strands(accept: pb.LinkAccept, strands: Sequence[Strand]) -> None:
    """Put a link's data connections into decode's answer. The one of two workers of one rank each has its own
    place there."""
    first = strands[0]
    if len(strands) == 1:
        accept.data_address, accept.data_token = first.address, first.token
        return
    for strand in strands:
        accept.strands.add(
            prefill_rank=strand.tie.prefill,
            decode_rank=strand.tie.decode,
            share=share_to_proto(strand.tie.share),
            address=strand.address,
            token=strand.token,
        )


def strands_of(accept: pb.LinkAccept, whole: Share) -> tuple[Strand, ...]:
    """The link's data connections as decode answered. ``whole``: all of the model's KV."""
    if not accept.strands:
        return (Strand(Tie(0, 0, whole), accept.data_address, accept.data_token),)
    return tuple(
        Strand(Tie(s.prefill_rank, s.decode_rank, share_of(s.share)), s.address, s.token)
        for s in accept.strands
    )
