"""Decode's end of a link to one prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

from baton.handoff.messages import LinkId
from baton.handoff.wiring import Terms
from baton.net.heartbeat import Pulse
from baton.telemetry.handoff import Pair
from baton.transport.ranks.endpoint import DataLink
from baton.v1 import handoff_pb2 as pb


class EarlierLinksError(Exception):
    """A prefill process opens one link after the other, so that there is always an earlier one to fence."""

    def __init__(self) -> None:
        super().__init__("earlier links of this prefill worker are still being fenced; dial again")


@dataclass(slots=True)
class PrefillPeer:
    """One prefill worker's link: its control stream and its data connections."""

    id: LinkId
    pair: Pair
    terms: Terms
    data: DataLink
    pulse: Pulse
    outbound: asyncio.Queue[pb.DecodeMessage | Awaitable[None] | None] = field(default_factory=asyncio.Queue)
    """Messages to send, in order. An awaitable holds back the messages behind it until it is done."""
    fenced: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, message: pb.DecodeMessage) -> None:
        """Send a message once the receives that prefill may act upon are posted (rule 1), which may happen in
        other processes."""
        waiting = self.data.in_place()
        if waiting is not None:
            self.outbound.put_nowait(waiting)
        self.outbound.put_nowait(message)
