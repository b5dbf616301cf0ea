"""All ranks of a worker, and the links that they make together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from baton.process.options import join_address, parse_address
from baton.transport.base import GroupPart, TransferError
from baton.transport.data_listener import TOKEN_BYTES
from baton.transport.ranks.channel_bundle import ChannelBundle
from baton.transport.ranks.endpoint import ChannelShape, DataLink, RankAddress, RankEndpoint
from baton.transport.ranks.shard import KVShard, KVSlice


@dataclass(frozen=True, slots=True)
class DataChannel:
    """One data connection of a link, as decode tells prefill of it."""

    slice_: KVSlice
    address: str
    """The address that decode's rank listens on."""
    token: bytes
    """The token that admits prefill's rank there, once."""


class RankEndpoints:
    """A worker's ranks, by number. Rank 0 is this process."""

    def __init__(self, ranks: Sequence[RankEndpoint]) -> None:
        self._ranks = tuple(ranks)
        first = self._ranks[0]
        self.connectors = tuple(
            name for name in first.connectors if all(name in rank.connectors for rank in self._ranks)
        )
        """The connectors that every rank has, the best first."""
        self.shares = tuple(rank.share for rank in self._ranks)
        self.whole = KVShard(
            tuple(
                GroupPart(range(max(p.heads.stop for p in parts)), range(max(p.layers.stop for p in parts)))
                for parts in zip(*(share.groups for share in self.shares), strict=True)
            )
        )
        """The model's whole KV."""
        self.drained_is_proof = all(rank.drained_is_proof for rank in self._ranks)

    async def listen(self, places: Sequence[RankAddress], port: int) -> Mapping[str, tuple[str, ...]]:
        """Accept data connections, each rank at its place: rank 0's connectors on ``port`` and the next
        ports, then the next rank's connectors (0: any). Returns the host:port of each rank, by connector, for
        peers to connect to. Raises OSError."""
        bound: list[Mapping[str, str]] = []
        for rank, place in zip(self._ranks, places, strict=True):
            addresses = await rank.listen(place.host, port)
            bound.append(
                {
                    name: join_address(place.advertised, parse_address(address)[1])
                    for name, address in addresses.items()
                }
            )
            port += len(rank.connectors) if port else 0
        return {name: tuple(addresses[name] for addresses in bound) for name in self.connectors}

    def channels(self, slices: Sequence[KVSlice], addresses: Sequence[str]) -> tuple[DataChannel, ...]:
        """Return decode's data channels, with a new token for each slice. ``addresses``: one for each
        rank."""
        return tuple(
            DataChannel(slice_, addresses[slice_.decode], secrets.token_bytes(TOKEN_BYTES))
            for slice_ in slices
        )

    def expect(
        self,
        connector: str,
        block_size: int,
        channels: Sequence[DataChannel],
        on_lost: Callable[[], None],
        arrives_as: str = "",
    ) -> DataLink:
        """Make decode's end of a link of these channels, as ``Connector.expect`` does. ``arrives_as``: see
        ``ChannelShape``."""

        def expected(channel: DataChannel, on_lost: Callable[[], None]) -> DataLink:
            cut = ChannelShape(block_size, channel.slice_.share, arrives_as)
            return self._ranks[channel.slice_.decode].expect(connector, channel.token, cut, on_lost)

        if len(channels) == 1:
            return expected(channels[0], on_lost)
        bundle = ChannelBundle(on_lost)
        bundle.hold([expected(channel, bundle.part_lost) for channel in channels])
        return bundle

    async def connect(
        self, connector: str, block_size: int, channels: Sequence[DataChannel], on_lost: Callable[[], None]
    ) -> DataLink:
        """Make prefill's end of a link of these channels, as ``Connector.connect`` does. Raises ValueError as
        well, for channels that cannot be this worker's."""
        if not channels or not all(0 <= channel.slice_.prefill < len(self._ranks) for channel in channels):
            raise ValueError(f"a link of ranks that this worker, which has {len(self._ranks)}, does not have")

        async def connected(channel: DataChannel, on_lost: Callable[[], None]) -> DataLink:
            rank, cut = self._ranks[channel.slice_.prefill], ChannelShape(block_size, channel.slice_.share)
            return await rank.connect(connector, channel.address, channel.token, cut, on_lost)

        if len(channels) == 1:
            return await connected(channels[0], on_lost)
        bundle = ChannelBundle(on_lost)
        parts = await _all_or_none([connected(channel, bundle.part_lost) for channel in channels])
        bundle.hold(parts)
        if bundle.ended:
            await bundle.close()
            raise TransferError("a data connection ended as soon as it was made")
        return bundle

    async def close(self) -> None:
        """Close every rank. Raises, when all are closed, the error that one close raised."""
        for outcome in await asyncio.gather(*(r.close() for r in self._ranks), return_exceptions=True):
            if outcome is not None:
                raise outcome


async def _all_or_none(connecting: Sequence[Coroutine[None, None, DataLink]]) -> list[DataLink]:
    """Await all connections. Raises the first error, when the connections that were made are closed again."""
    tasks = [asyncio.create_task(one) for one in connecting]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(made, BaseException):
                await made.close()
        raise
