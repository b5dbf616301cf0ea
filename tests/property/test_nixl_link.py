"""A link of ``nixl`` under any order of posting, sending, cancelling and closing, whatever the blocks are.

What was posted and sent lands, nothing else changes, and after the close nothing does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.transport import nixl
from baton.transport.base import TransferError
from baton.transport.nixl_agent import AddressRange
from baton.transport.nixl_frames import cut, paired
from baton.transport.staging import Staging
from tests.support.links import PAGE_BYTES, WAIT_S, HostMemory
from tests.support.nixl import HAVE_NIXL, WITHOUT_NIXL

pytestmark = pytest.mark.nixl

PAGES = 12
spans = st.lists(st.builds(AddressRange, st.integers(0, 1 << 40), st.integers(1, 40)), min_size=1, max_size=8)


@given(spans, st.data())
def test_a_cut_has_the_bytes_asked_for(some: list[AddressRange], data: st.DataObject) -> None:
    whole = sum(span.nbytes for span in some)
    start = data.draw(st.integers(0, whole - 1))
    length = data.draw(st.integers(1, whole - start))
    assert addresses(cut(some, start, length)) == addresses(some)[start : start + length]


def addresses(some: Sequence[AddressRange]) -> list[int]:
    """Return the address of each byte."""
    return [address for span in some for address in range(span.address, span.address + span.nbytes)]


@given(spans, spans)
def test_pairs_are_as_long_and_lose_no_byte(ours: list[AddressRange], theirs: list[AddressRange]) -> None:
    length = min(sum(span.nbytes for span in side) for side in (ours, theirs))
    ours, theirs = cut(ours, 0, length), cut(theirs, 0, length)
    left, right = paired(ours, theirs)
    assert [span.nbytes for span in left] == [span.nbytes for span in right]
    assert (addresses(left), addresses(right)) == (addresses(ours), addresses(theirs))


@dataclass
class Plan:
    """What is done to one message, in the order of ``steps`` of all messages."""

    pages: list[int]
    cancelled: bool
    sent: bool
    posted: bool


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Plan], list[int], int]:
    """Messages into pages of their own, an order of their steps, and how many steps are done before the
    close."""
    pages = draw(st.permutations(range(PAGES)))
    messages: list[Plan] = []
    while pages:
        count = draw(st.integers(1, 4))
        flags = (draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 9)) > 0)
        messages.append(Plan(list(pages[:count]), *flags))
        pages = pages[count:]
    order = draw(st.permutations([number for number in range(len(messages)) for _ in range(3)]))
    return messages, list(order), draw(st.integers(0, len(order)))


class Copied(HostMemory):
    """Memory whose blocks go by way of staging memory."""

    def whole(self) -> None:  # type: ignore[override]
        return None


@dataclass
class Run:
    source: HostMemory
    target: HostMemory
    withdrawn: set[int] = field(default_factory=set)


@pytest.mark.skipif(not HAVE_NIXL, reason=WITHOUT_NIXL)
@settings(max_examples=25, deadline=None)
@given(plan=plans(), staged=st.tuples(st.booleans(), st.booleans()), early=st.booleans())
def test_what_was_posted_and_sent_lands_and_nothing_else_changes(
    plan: tuple[list[Plan], list[int], int], staged: tuple[bool, bool], early: bool
) -> None:
    asyncio.run(carried_out(*plan, staged, early))


async def carried_out(
    messages: list[Plan], order: list[int], before_close: int, staged: tuple[bool, bool], early: bool
) -> None:
    """``early``: close in the middle of what runs, after ``before_close`` steps."""
    source, target = (
        (Copied if copied else HostMemory)(PAGES, seed=seed)
        for copied, seed in zip(staged, (1, 2), strict=True)
    )
    run, untouched = Run(source, target), bytes(target.bytes)
    prefill, decode = (nixl.NixlConnector(Staging(), lambda: None, {"NET_DEVICES": "lo"}) for _ in range(2))
    token = os.urandom(32)
    receiver = decode.expect(token, target, lambda: None)
    address = await decode.listen("127.0.0.1", 0)
    sender = await prefill.connect(address, token, source, lambda: None)
    steps = dict.fromkeys(range(len(messages)), 0)
    received: dict[int, asyncio.Future[None]] = {}
    sent: dict[int, asyncio.Future[None]] = {}
    for number in order[: before_close if early else None]:
        message, step = messages[number], steps[number]
        steps[number] += 1
        if step == 0 and message.posted:
            received[number] = asyncio.ensure_future(receiver.post_receive(number, message.pages))
        elif step == 1 and message.cancelled and number in received:
            if receiver.cancel_receive(number):
                run.withdrawn.add(number)
        elif step == 2 and message.sent:
            sent[number] = asyncio.ensure_future(sender.send(number, message.pages))
            await asyncio.sleep(0)
    if not early:
        await asyncio.wait_for(asyncio.gather(*sent.values()), WAIT_S)
        due = [received[number] for number in sent if number in received and number not in run.withdrawn]
        await asyncio.wait_for(asyncio.gather(*due), WAIT_S)
    await asyncio.gather(sender.close(), receiver.close())
    after = bytes(target.bytes)
    assert all(future.done() for future in (*received.values(), *sent.values()))
    check(messages, received, sent, run, untouched)
    await asyncio.sleep(0.01)
    assert bytes(target.bytes) == after
    for connector in (prefill, decode):
        await connector.close()


def check(
    messages: list[Plan],
    received: dict[int, asyncio.Future[None]],
    sent: dict[int, asyncio.Future[None]],
    run: Run,
    untouched: bytes,
) -> None:
    for number, message in enumerate(messages):
        error = received[number].exception() if number in received else None
        assert error is None or isinstance(error, TransferError)
        for page in message.pages:
            now, old = run.target.page(page), untouched[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            if number not in received or number in run.withdrawn or number not in sent:
                assert now == old, f"page {page} changed"
            elif error is None:
                assert now == run.source.page(page), f"page {page} has not landed"
