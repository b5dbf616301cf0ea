"""The parts that a worker's roles need to hand KV over, and the terms of a link between two workers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.names import check_address, check_name, check_words
from baton.handoff import wire
from baton.handoff.identity import Mismatch, first_mismatch, with_kv_dtype
from baton.net.channels import Dialer
from baton.telemetry.handoff import HandoffMetrics
from baton.telemetry.supervision import Supervision
from baton.transport.base import GroupPart
from baton.transport.block_names import MAX_GROUPS
from baton.transport.kv_types import FP8_DYNAMIC, convertible_to
from baton.transport.ranks.endpoints import RankEndpoints
from baton.transport.ranks.shard import KVShard, KVSlice, objection, slices
from baton.transport.registry import first_common
from baton.v1 import handoff_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wiring:
    """One worker's end of all its links."""

    incarnation: str
    address: str
    """The address at which this process serves, for the logs and metrics of its peers."""
    ends: RankEndpoints
    """The connectors and pools of the worker's ranks."""
    compatibility: pb.Compatibility
    metrics: HandoffMetrics
    verify: bool = False
    """Whether the checksum of every transfer is compared (rule 10)."""
    converts: tuple[str, ...] = ()
    """The types of KV, other than its own, that this worker converts on arrival."""
    patience_s: float = 60.0
    """The time that decode waits for a sign of life of one handoff on a healthy link, in seconds."""
    dialer: Dialer = field(default_factory=Dialer)
    """The dialer by which prefill calls decode."""
    tasks: Supervision = field(default_factory=Supervision)
    """The supervision of the tasks that run for as long as the worker."""
    keys: ClusterKeys = field(default_factory=ClusterKeys, repr=False)
    """The key that both workers prove to have."""

    @property
    def whole(self) -> KVShard:
        """The shard of all of the model's KV."""
        return KVShard(
            tuple(
                GroupPart(range(group.heads or group.units), range(group.layers))
                for group in self.compatibility.groups
            )
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one link."""

    connector: str
    block_size: int
    """Tokens of a block on the link: the smaller of both sides' block sizes, which divides the other."""
    verify: bool
    slices: tuple[KVSlice, ...]
    """The KV that each pair of ranks exchanges."""
    arrives_as: str = ""
    """The type that KV has on the link, where decode converts it; empty: decode's own."""


MAX_CONNECTORS = 16
MAX_RANKS = 4096


def check_names(opened: pb.LinkOpen) -> None:
    """Raises ValueError, naming the field, if a name that a prefill worker gives itself or its model is
    malformed. ``agree`` checks the offer itself."""
    check_name("prefill_incarnation", opened.prefill_incarnation)
    check_name("decode_incarnation", opened.decode_incarnation)
    check_address("prefill_address", opened.prefill_address)
    for each in opened.connectors:
        check_name("connectors", each)
    for descriptor, value in opened.compatibility.ListFields():
        if isinstance(value, str):
            check_words(f"compatibility.{descriptor.name}", value)
    for name, count, most in (
        ("connectors", len(opened.connectors), MAX_CONNECTORS),
        ("ranks", len(opened.ranks), MAX_RANKS),
        ("groups", len(opened.compatibility.groups), MAX_GROUPS),
        ("ranks.groups", max((len(rank.groups) for rank in opened.ranks), default=0), MAX_GROUPS),
    ):
        if count > most:
            raise ValueError(f"{name}: at most {most} are allowed, not {count}")
    for group in opened.compatibility.groups:
        check_words("compatibility.groups.kind", group.kind)


def agree(ours: Wiring, opened: pb.LinkOpen) -> Terms | pb.LinkRefuse:
    """Return decode's answer to a prefill worker's offer: the terms, or a refusal that names a field."""
    if opened.decode_incarnation != ours.incarnation:
        return pb.LinkRefuse(field="decode_incarnation", reason="decode has been restarted since")
    sent, verify = opened.compatibility, ours.verify or opened.verify
    arrives_as = sent.kv_dtype if sent.kv_dtype in ours.converts else ""
    if arrives_as:
        sent = with_kv_dtype(sent, ours.compatibility.kv_dtype)
    differs = first_mismatch(ours.compatibility, sent)
    if differs is not None:
        return _refusal_of(differs)
    if arrives_as and verify:
        reason = (
            f"verify_handoff compares bytes, which decode changes when it converts {arrives_as} "
            f"(--kv-convert) to {ours.compatibility.kv_dtype}; allowed: one of both options"
        )
        return pb.LinkRefuse(field="verify", reason=reason)
    smaller, larger = sorted((ours.compatibility.block_size, opened.compatibility.block_size))
    if smaller < 1 or larger % smaller:
        return pb.LinkRefuse(
            field="block_size",
            reason="block_size of one side must divide that of the other: "
            f"prefill {opened.compatibility.block_size}, decode {ours.compatibility.block_size}",
        )
    if smaller != larger and ours.compatibility.kv_dtype == FP8_DYNAMIC:
        return pb.LinkRefuse(
            field="block_size",
            reason=f"block_size must be the same with KV of {FP8_DYNAMIC}, whose blocks have scales: "
            f"prefill {opened.compatibility.block_size}, decode {ours.compatibility.block_size}",
        )
    connector = first_common(opened.connectors, ours.ends.connectors)
    theirs, mine = (", ".join(names) for names in (opened.connectors, ours.ends.connectors))
    if connector is None:
        reason = f"no common connector: prefill has {theirs}, decode {mine}"
        return pb.LinkRefuse(field="connectors", reason=reason)
    exchanged = _slices(ours, opened)
    if isinstance(exchanged, pb.LinkRefuse):
        return exchanged
    log.info("connector %s: the first of prefill's (%s) that decode has too (%s)", connector, theirs, mine)
    return Terms(connector, smaller, verify, exchanged, arrives_as)


def _refusal_of(differs: Mismatch) -> pb.LinkRefuse:
    # A worker of a release without the field sends an empty text.
    mine, theirs = ("none" if value == "" else value for value in (differs.ours, differs.theirs))
    reason = f"{differs.field} differs: prefill {theirs}, decode {mine}"
    if differs.field == "kv_dtype" and theirs in convertible_to(str(mine)):
        reason += "; decode converts it with --kv-convert allow"
    return pb.LinkRefuse(field=differs.field, reason=reason)


def _slices(ours: Wiring, opened: pb.LinkOpen) -> tuple[KVSlice, ...] | pb.LinkRefuse:
    """Return the KV that each pair of ranks exchanges. A prefill worker whose offer names no ranks is of a
    release with one rank for each worker."""
    here = ours.ends.shares
    if not opened.ranks and len(here) > 1:
        reason = (
            f"the ranks of prefill are not known, and decode has {len(here)}: prefill is too old for that"
        )
        return pb.LinkRefuse(field="ranks", reason=reason)
    shares = [wire.shard_of(share) for share in opened.ranks] or [ours.whole]
    wrong = objection(shares, ours.whole)
    if wrong is not None:
        return pb.LinkRefuse(field="ranks", reason=f"the ranks of prefill cannot be: {wrong}")
    return slices(shares, here)
