"""What a malformed peer can do to ``ucx``: end its own link, and nothing else."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import pytest

from baton.transport.base import TransferError
from baton.transport.staging import PIECE_BYTES, Staging
from tests.support.links import PAGE_BYTES, WAIT_S, HostMemory, until, within
from tests.support.sender import UCX

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')", allow_module_level=True)

from baton.transport.ucx import UcxConnector, UcxReceivingLink, UcxSendingLink

LAST = 1
PAGES = 2048
"""Eight megabytes: several pieces."""


@dataclass
class RankEndpoints:
    """A link whose sending end sends what it is told to."""

    receiver: UcxReceivingLink
    sender: UcxSendingLink
    target: HostMemory
    token: bytes
    lost: list[str]

    def announce(self, tag: int, size: int, *, last: bool) -> None:
        """One UCX message, as the wire format has it: the message's tag hashed with the link's token."""
        name = int.from_bytes(blake2b(struct.pack("!Q", tag), key=self.token, digest_size=8).digest())
        wire_tag = name | LAST if last else name & ~LAST
        driver = self.sender._driver
        assert driver is not None
        driver.call(partial(self._announce, wire_tag, memoryview(bytearray(b"x" * size))))

    def _announce(self, wire_tag: int, content: memoryview) -> None:
        driver, endpoint = self.sender._driver, self.sender._endpoint
        assert driver is not None
        assert endpoint is not None
        self.sender._started()

        def over(status: int) -> None:
            assert content.nbytes >= 0, "held until here"
            self.sender._finished()

        request = endpoint.tag_send(driver.array(content), driver.ucp.UCXXTag(wire_tag))
        driver.watch_on_thread(request, over)


@pytest.fixture(params=UCX)
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[RankEndpoints]:
    crashes: list[str] = []
    prefill, decode = (
        UcxConnector(Staging(), partial(crashes.append, end), UCX[request.param])
        for end in ("prefill", "decode")
    )
    target, token, lost = HostMemory(PAGES), os.urandom(32), list[str]()
    address = await decode.listen("127.0.0.1", 0)
    receiver = decode.expect(token, target, lambda: lost.append("receiver"))
    sender = await prefill.connect(address, token, HostMemory(1), lambda: lost.append("sender"))
    assert isinstance(receiver, UcxReceivingLink)
    assert isinstance(sender, UcxSendingLink)
    yield RankEndpoints(receiver, sender, target, token, lost)
    for link in (receiver, sender):
        await within(link.close())
    for connector in (prefill, decode):
        await connector.close()
    assert crashes == []


async def test_pieces_of_any_size_make_a_message(ends: RankEndpoints) -> None:
    received = ends.receiver.post_receive(1, range(6))
    ends.announce(1, PAGE_BYTES, last=False)
    ends.announce(1, 3 * PAGE_BYTES, last=False)
    ends.announce(1, 2 * PAGE_BYTES, last=True)
    await within(received)
    assert ends.target.bytes.count(b"x") == 6 * PAGE_BYTES


@pytest.mark.parametrize(
    "pieces",
    [
        [(1, 3 * PAGE_BYTES, True)],
        [(1, PAGE_BYTES, False), (1, PAGE_BYTES, True)],
        [(1, 7 * PAGE_BYTES, True)],
        [(1, 6 * PAGE_BYTES, False)],
        [(1, 3 * PAGE_BYTES, False), (1, 4 * PAGE_BYTES, False)],
        [(1, 3 * PAGE_BYTES, False), (2, PAGE_BYTES, True)],
        [(1, PAGE_BYTES + 1, False)],
        [(1, 100, True)],
        [(1, 0, False)],
        [(1, 0, True)],
    ],
    ids=[
        "too short",
        "too short in two",
        "too long",
        "no end",
        "too long in two",
        "another before its end",
        "no whole page",
        "less than a page",
        "nothing",
        "nothing at all",
    ],
)
async def test_a_malformed_message_ends_the_link(
    ends: RankEndpoints, pieces: list[tuple[int, int, bool]]
) -> None:
    received = [ends.receiver.post_receive(1, range(6)), ends.receiver.post_receive(2, [7])]
    for tag, size, last in pieces:
        ends.announce(tag, size, last=last)
    for future in received:
        with pytest.raises(TransferError):
            await within(future)
    await until(lambda: sorted(ends.lost) == ["receiver", "sender"])


async def test_a_piece_larger_than_pieces_are_ends_the_link(ends: RankEndpoints) -> None:
    received = ends.receiver.post_receive(1, range(PAGES))
    ends.announce(1, PIECE_BYTES + PAGE_BYTES, last=False)
    with pytest.raises(TransferError):
        await within(received)
    assert not any(ends.target.bytes)


@pytest.mark.deep
async def test_what_nobody_posted_takes_no_memory_and_holds_nobody_up(ends: RankEndpoints) -> None:
    for tag in range(10, 20):
        ends.announce(tag, 64 << 20, last=True)
    received = ends.receiver.post_receive(1, [3])
    ends.announce(1, PAGE_BYTES, last=True)
    await within(received)
    await until(lambda: ends.sender._running == 0)
    assert ends.lost == []


async def test_a_message_that_never_ends_is_over_when_the_link_is_closed(ends: RankEndpoints) -> None:
    received = ends.receiver.post_receive(1, range(6))
    ends.announce(1, PAGE_BYTES, last=False)
    await until(lambda: ends.target.bytes.startswith(b"x"))
    assert not ends.receiver.cancel_receive(1), "its first piece was matched"
    assert not received.done()
    async with asyncio.timeout(WAIT_S):
        await ends.receiver.close()
    assert isinstance(received.exception(), TransferError)
