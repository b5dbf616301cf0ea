"""Decode opens one link at a time to a prefill process, whatever fails on the way."""

from __future__ import annotations

import asyncio

import pytest

from baton.handoff.decode import DecodeHandoffs
from baton.roles.decode_links import PrefillPeer
from baton.roles.prefill_links import DecodePeer, UnreachableError
from baton.transport.ranks.endpoint import DataLink
from baton.transport.ranks.endpoints import RankEndpoints
from baton.v1.handoff_pb2 import LinkOpen
from tests.support.local_worker import LocalWorker, answer, local_ring, until

PROMPT = [7, 3, 90, 14, 2, 55]


async def test_a_data_channel_that_cannot_be_made_locks_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    expect, failures = RankEndpoints.expect, [OSError(24, "Too many open files"), RuntimeError("no memory")]

    def fail_first(ends: RankEndpoints, *terms: object) -> DataLink:
        if failures:
            raise failures.pop()
        return expect(ends, *terms)  # type: ignore[arg-type]

    monkeypatch.setattr(RankEndpoints, "expect", fail_first)
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        await until(lambda: decode.decode.open_links and not failures)
        assert len(await answer(ring, "r", PROMPT, 5)) == 5
        assert decode.engine.generated_tokens == 4, "it was handed on"
        assert not decode.crashed.is_set()


def offer(prefill: LocalWorker, decode: LocalWorker) -> LinkOpen:
    return LinkOpen(
        prefill_incarnation="another",
        decode_incarnation=decode.incarnation,
        compatibility=prefill.wiring.compatibility,
        connectors=["tcp"],
        prefill_address=prefill.address,
    )


async def test_of_two_offers_at_once_the_later_one_has_the_link() -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]):
        opened = offer(prefill, decode)
        first = await decode.decode._accept(opened)
        assert isinstance(first, PrefillPeer)
        second, third = await asyncio.gather(decode.decode._accept(opened), decode.decode._accept(opened))
        assert isinstance(second, PrefillPeer) and isinstance(third, PrefillPeer)
        assert first.fenced.is_set()
        left = [peer for peer in (second, third) if not peer.fenced.is_set()]
        assert [peer.id.epoch for peer in left] == [max(second.id.epoch, third.id.epoch)]


async def test_a_prefill_process_that_dials_all_the_time_is_told_to_dial_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told so as long as its earlier links are being fenced, and no deeper than the call allows."""
    monkeypatch.setattr(DecodeHandoffs, "open_link", lambda *args, **named: None)
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]):
        peer = DecodePeer(decode.address, prefill.wiring, lambda link, message: None, lambda lost: None)
        with pytest.raises(UnreachableError, match=r"(?s)UNAVAILABLE.*dial again"):
            await peer.open(offer(prefill, decode))
