"""What a worker's roles need to hand KV over, and the terms that two workers agree on for a link."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.connector import wire
from baton.connector.choice import first_common
from baton.connector.identity import first_mismatch
from baton.connector.ranks.ends import Ends
from baton.connector.ranks.share import Share, Tie, objection, ties
from baton.supervision import Supervision
from baton.telemetry.handoff import HandoffMetrics
from baton.tls.channels import Dialer
from baton.v1 import handoff_pb2 as pb


@dataclass(frozen=True, slots=True)
class Wiring:
    """One worker's end of all its links."""

    incarnation: str
    address: str
    """Where this process serves, for the logs and metrics of its peers."""
    ends: Ends
    """The connectors and pools of its ranks."""
    compatibility: pb.Compatibility
    metrics: HandoffMetrics
    verify: bool = False
    """Have the checksum of every transfer compared (rule 10)."""
    patience_s: float = 60.0
    """How long decode waits for a sign of life of one handoff on a healthy link."""
    dialer: Dialer = field(default_factory=Dialer)
    """How prefill calls decode."""
    tasks: Supervision = field(default_factory=Supervision)
    """Who looks after what runs for as long as the worker."""

    @property
    def whole(self) -> Share:
        """All of the model's KV."""
        return Share(range(self.compatibility.num_kv_heads), range(self.compatibility.num_layers))


@dataclass(frozen=True, slots=True)
class Terms:
    """How one link works."""

    connector: str
    block_size: int
    """Tokens of a wire block: the smaller of both sides' block sizes, which divides the other."""
    verify: bool
    ties: tuple[Tie, ...]
    """Which ranks exchange what."""


def agree(ours: Wiring, opened: pb.LinkOpen) -> Terms | pb.LinkRefuse:
    """Decode's answer to a prefill worker that wants a link: the terms, or which field stands against it."""
    if opened.decode_incarnation != ours.incarnation:
        return pb.LinkRefuse(field="decode_incarnation", reason="decode has been restarted since")
    differs = first_mismatch(ours.compatibility, opened.compatibility)
    if differs is not None:
        # An empty text is what a worker of a release without the field says.
        mine, theirs = (
            "none" if (value := getattr(c, differs)) == "" else value
            for c in (ours.compatibility, opened.compatibility)
        )
        return pb.LinkRefuse(field=differs, reason=f"{differs} differs: prefill {theirs}, decode {mine}")
    smaller, larger = sorted((ours.compatibility.block_size, opened.compatibility.block_size))
    if smaller < 1 or larger % smaller:
        return pb.LinkRefuse(
            field="block_size",
            reason="block_size of one side must divide that of the other: "
            f"prefill {opened.compatibility.block_size}, decode {ours.compatibility.block_size}",
        )
    connector = first_common(opened.connectors, ours.ends.connectors)
    if connector is None:
        theirs, mine = (", ".join(names) for names in (opened.connectors, ours.ends.connectors))
        reason = f"no common connector: prefill has {theirs}, decode {mine}"
        return pb.LinkRefuse(field="connectors", reason=reason)
    exchanged = _ties(ours, opened)
    if isinstance(exchanged, pb.LinkRefuse):
        return exchanged
    return Terms(connector, smaller, ours.verify or opened.verify, exchanged)


def _ties(ours: Wiring, opened: pb.LinkOpen) -> tuple[Tie, ...] | pb.LinkRefuse:
    """Which ranks exchange what. A prefill worker that says nothing of ranks knows of one a worker."""
    here = ours.ends.shares
    if not opened.ranks and len(here) > 1:
        reason = (
            f"the ranks of prefill are not known, and decode has {len(here)}: prefill is too old for that"
        )
        return pb.LinkRefuse(field="ranks", reason=reason)
    shares = [wire.share_of(share) for share in opened.ranks] or [ours.whole]
    wrong = objection(shares, len(ours.whole.heads), len(ours.whole.layers))
    if wrong is not None:
        return pb.LinkRefuse(field="ranks", reason=f"the ranks of prefill cannot be: {wrong}")
    return ties(shares, here)
