"""The conversion of the handoff's messages to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from baton.handoff.messages import (
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
from baton.transport.base import GroupPart
from baton.transport.ranks.endpoints import DataChannel
from baton.transport.ranks.shard import KVShard, KVSlice
from baton.v1 import handoff_pb2 as pb
from baton.v1.worker_pb2 import TokenDetails
from baton_kernels.kv_layout import LayerKV, StateKV
from baton_kernels.window import ChunkedWindow

FromPrefill = Ready | SendComplete | Drained | Withdraw
"""The messages of prefill without Ask, which the role builds, as it alone has the tokens."""


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
    """Convert a message of prefill; None for a kind that the state machine does not take (greeting, ask,
    heartbeat, unknown)."""
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
    """Convert SendComplete. First tokens whose details cannot be read are left out, so that the manifest
    counts too few answers and matches no request: at the commit it would be too late to refuse them."""
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
                pb.Segment(tag=s.tag, first_block=s.first_block, num_blocks=s.num_blocks, group=s.group)
                for s in message.segments
            ]
            return pb.DecodeMessage(grant=pb.Grant(name=name, segments=segments))
        case Release():
            return pb.DecodeMessage(release=pb.Release(name=name))
        case Cancel():
            return pb.DecodeMessage(cancel=pb.CancelHandoff(name=name))


def from_decode(message: pb.DecodeMessage) -> ToPrefill | None:
    """Convert a message of decode; None for a kind that the state machine does not take (greeting,
    heartbeat, unknown)."""
    match message.WhichOneof("message"):
        case "credit":
            return Credit(name_of(message.credit.name))
        case "decline":
            decline = message.decline
            return Decline(name_of(decline.name), decline.reason, decline.elsewhere)
        case "grant":
            segments = tuple(
                Segment(s.tag, s.first_block, s.num_blocks, s.group) for s in message.grant.segments
            )
            return Grant(name_of(message.grant.name), segments)
        case "release":
            return Release(name_of(message.release.name))
        case "cancel":
            return Cancel(name_of(message.cancel.name))
        case _:
            return None


def shard_to_proto(share: KVShard) -> pb.KVShard:
    made = pb.KVShard()
    for part in share.groups:
        made.groups.add(
            first_head=part.heads.start,
            num_heads=len(part.heads),
            first_layer=part.layers.start,
            num_layers=len(part.layers),
        )
    return made


def shard_of(share: pb.KVShard) -> KVShard:
    return KVShard(
        tuple(
            GroupPart(
                range(part.first_head, part.first_head + part.num_heads),
                range(part.first_layer, part.first_layer + part.num_layers),
            )
            for part in share.groups
        )
    )


def spec_of(kv: LayerKV, part: GroupPart) -> pb.KVGroupSpec:
    """Return the spec of a group of the whole model. ``kv``: what a layer of it keeps on a rank. ``part``:
    all its heads and layers."""
    if isinstance(kv, StateKV):
        return pb.KVGroupSpec(
            kind=kv.kind, units=len(part.heads), layers=len(part.layers), state_size=kv.size
        )
    chunked = isinstance(kv.window, ChunkedWindow)
    return pb.KVGroupSpec(
        kind=kv.kind,
        window=kv.window.size if isinstance(kv.window, ChunkedWindow) else kv.window or 0,
        chunked=chunked,
        heads=len(part.heads),
        layers=len(part.layers),
        vectors=kv.vectors,
        dim=kv.dim,
    )


def accept_channels(accept: pb.LinkAccept, channels: Sequence[DataChannel]) -> None:
    """Put a link's data connections into decode's answer. A single one, between two workers of one rank each,
    has fields of its own."""
    first = channels[0]
    if len(channels) == 1:
        accept.data_address, accept.data_token = first.address, first.token
        return
    for channel in channels:
        accept.channels.add(
            prefill_rank=channel.slice_.prefill,
            decode_rank=channel.slice_.decode,
            shard=shard_to_proto(channel.slice_.share),
            address=channel.address,
            token=channel.token,
        )


def channels_of(accept: pb.LinkAccept, whole: KVShard) -> tuple[DataChannel, ...]:
    """Return the link's data connections from decode's answer. ``whole``: the shard of all the model's KV."""
    if not accept.channels:
        return (DataChannel(KVSlice(0, 0, whole), accept.data_address, accept.data_token),)
    return tuple(
        DataChannel(KVSlice(s.prefill_rank, s.decode_rank, shard_of(s.shard)), s.address, s.token)
        for s in accept.channels
    )
