"""All ranks of a worker, and the links that they make together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from baton.connector.door import TOKEN_BYTES
from baton.connector.ranks.bundle import Bundle
from baton.connector.ranks.end import Cut, DataLink, Place, RankEnd
from baton.connector.ranks.share import Share, Tie
from baton.connector.transport import TransferError
from baton.options import join_address, parse_address


@dataclass(frozen=True, slots=True)
class Strand:
    """One data connection of a link, as decode tells prefill of it."""

    tie: Tie
    address: str
    """Where decode's rank listens."""
    token: bytes
    """Admits prefill's rank there, once."""


class Ends:
    """A worker's ranks, by number. Rank 0 is this process."""

    def __init__(self, ranks: Sequence[RankEnd]) -> None:
        self._ranks = tuple(ranks)
        first = self._ranks[0]
        self.connectors = tuple(
            name for name in first.connectors if all(name in rank.connectors for rank in self._ranks)
        )
        """Those that every rank has, the best first."""
        self.shares = tuple(rank.share for rank in self._ranks)
        self.whole = Share(
            range(max(share.heads.stop for share in self.shares)),
            range(max(share.layers.stop for share in self.shares)),
        )
        """All of the model's KV."""
        self.drained_is_proof = all(rank.drained_is_proof for rank in self._ranks)

    async def listen(self, places: Sequence[Place], port: int) -> Mapping[str, tuple[str, ...]]:
        """Accept data connections, each rank at its place: rank 0's connectors on ``port`` and those that
        follow, then those of the next rank (0: any). Connector → host:port of each rank, for peers to call.
        Raises OSError."""
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

    def strands(self, ties: Sequence[Tie], addresses: Sequence[str]) -> tuple[Strand, ...]:
        """For decode: a new token for each tie. ``addresses``: of each rank."""
        return tuple(Strand(tie, addresses[tie.decode], secrets.token_bytes(TOKEN_BYTES)) for tie in ties)

    def expect(
        self, connector: str, block_size: int, strands: Sequence[Strand], on_lost: Callable[[], None]
    ) -> DataLink:
        """Decode's end of a link of these strands; as ``Connector.expect``."""

        def expected(strand: Strand, on_lost: Callable[[], None]) -> DataLink:
            rank, cut = self._ranks[strand.tie.decode], Cut(block_size, strand.tie.share)
            return rank.expect(connector, strand.token, cut, on_lost)

        if len(strands) == 1:
            return expected(strands[0], on_lost)
        bundle = Bundle(on_lost)
        bundle.hold([expected(strand, bundle.part_lost) for strand in strands])
        return bundle

    async def connect(
        self, connector: str, block_size: int, strands: Sequence[Strand], on_lost: Callable[[], None]
    ) -> DataLink:
        """Prefill's end of it; as ``Connector.connect``. Raises ValueError as well, for strands that cannot
        be this worker's."""
        if not strands or not all(0 <= strand.tie.prefill < len(self._ranks) for strand in strands):
            raise ValueError(f"a link of ranks that this worker, which has {len(self._ranks)}, does not have")

        async def connected(strand: Strand, on_lost: Callable[[], None]) -> DataLink:
            rank, cut = self._ranks[strand.tie.prefill], Cut(block_size, strand.tie.share)
            return await rank.connect(connector, strand.address, strand.token, cut, on_lost)

        if len(strands) == 1:
            return await connected(strands[0], on_lost)
        bundle = Bundle(on_lost)
        parts = await _all_or_none([connected(strand, bundle.part_lost) for strand in strands])
        bundle.hold(parts)
        if bundle.ended:
            await bundle.close()
            raise TransferError("a data connection ended as soon as it was made")
        return bundle

    async def close(self) -> None:
        """Raises what the close of one raised, when all are closed."""
        for outcome in await asyncio.gather(*(r.close() for r in self._ranks), return_exceptions=True):
            if outcome is not None:
                raise outcome


async def _all_or_none(connecting: Sequence[Coroutine[None, None, DataLink]]) -> list[DataLink]:
    """Raises the first error, when what was made besides is closed again."""
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
