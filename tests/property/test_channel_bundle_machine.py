"""A bundle of data connections against what ``connector.transport.Link`` promises, whatever its parts do.

The parts are stand-ins that do what the test tells them, in any order that a connector might.
``PROPERTY_EXAMPLES`` (default 60) sets how many histories are tried, ``PROPERTY_STEPS`` (default 60) how long
they are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.transport.base import TransferError
from baton.transport.ranks.channel_bundle import ChannelBundle

T = TypeVar("T")
PICK = st.integers(0, 1 << 16)


class FakePart:
    """``DataLink`` whose transfers end when the test says so.

    ``distant``: in another process, which tells by the end of a receive alone whether it was withdrawn.
    """

    def __init__(self, on_lost: Callable[[], None], *, distant: bool) -> None:
        self.open: dict[int, asyncio.Future[None]] = {}
        """Transfers that may still move bytes."""
        self.matched: set[int] = set()
        self.withdrawing: list[int] = []
        self.outcome: dict[int, bool] = {}
        self.ended = False
        self.close_called = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_lost = on_lost
        self.distant = distant

    def size_of(self, blocks: Sequence[int]) -> int:
        return len(blocks)

    def post_receive(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        return self.send(tag, blocks)

    def send(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.ended:
            done.set_exception(TransferError("closed"))
        else:
            self.open[tag] = done
        return done

    def cancel_receive(self, tag: int) -> bool:
        if self.distant:
            self.withdrawing.append(tag)
            return False
        return self._withdraw(tag)

    def _withdraw(self, tag: int) -> bool:
        if tag not in self.open or tag in self.matched:
            return False
        self.over(tag, ok=False)
        return True

    def carry_out_withdrawals(self) -> None:
        for tag in self.withdrawing:
            self._withdraw(tag)
        self.withdrawing.clear()

    def over(self, tag: int, *, ok: bool) -> None:
        self.outcome[tag] = ok
        done = self.open.pop(tag)
        if ok:
            done.set_result(None)
        else:
            done.set_exception(TransferError("over"))

    def lose(self) -> None:
        """As connectors do: what runs fails, and then it is told once, unless this end was closed before."""
        if self.ended:
            return
        self.ended = True
        self._fail_all()
        if not self.close_called:
            self._on_lost()

    def finish_close(self) -> None:
        self.ended = True
        self._fail_all()
        if not self.closed.done():
            self.closed.set_result(None)

    def _fail_all(self) -> None:
        for tag in list(self.open):
            self.over(tag, ok=False)

    async def close(self) -> None:
        self.close_called = True
        await asyncio.shield(self.closed)

    async def checksum(self, blocks: Sequence[int]) -> int:
        raise AssertionError("not asked here")

    def in_place(self) -> Awaitable[None] | None:
        return None


class BundleMachine(RuleBasedStateMachine):
    @initialize(distant=st.lists(st.booleans(), min_size=2, max_size=4), sends=st.booleans())
    def start(self, distant: list[bool], sends: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.sends = sends
        self.lost = 0
        self.lost_before_close = False
        self.next_tag = 1
        self.whole: dict[int, asyncio.Future[None]] = {}
        self.part_was_lost = False
        self.closing: asyncio.Task[None] | None = None

        async def make() -> None:
            self.link = ChannelBundle(self.on_lost)
            self.parts = [FakePart(self.link.part_lost, distant=d and not sends) for d in distant]
            self.link.hold(self.parts)

        self.loop.run_until_complete(make())

    def on_lost(self) -> None:
        self.lost += 1

    def settle(self) -> None:
        """Let everything that is due be done."""

        async def turns() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def do(self, step: Callable[[], T]) -> T:
        """One step on the event loop, where all of this lives."""

        async def stepping() -> T:
            return step()

        return self.loop.run_until_complete(stepping())

    def part(self, pick: int) -> FakePart:
        return self.parts[pick % len(self.parts)]

    @rule()
    def post(self) -> None:
        start = self.link.send if self.sends else self.link.post_receive
        self.whole[self.next_tag] = self.do(lambda: start(self.next_tag, [0]))
        self.next_tag += 1

    @rule(pick=PICK, which=PICK)
    def part_matched(self, pick: int, which: int) -> None:
        part = self.part(pick)
        if part.open:
            part.matched.add(sorted(part.open)[which % len(part.open)])

    @rule(pick=PICK, which=PICK)
    def part_completes(self, pick: int, which: int) -> None:
        part = self.part(pick)
        ready = sorted(part.open if self.sends else part.matched & part.open.keys())
        if ready:
            part.over(ready[which % len(ready)], ok=True)
            self.settle()

    @rule(pick=PICK)
    def part_carries_out_withdrawals(self, pick: int) -> None:
        self.part(pick).carry_out_withdrawals()
        self.settle()

    @rule(pick=PICK, turns=st.booleans())
    def part_is_lost(self, pick: int, turns: bool) -> None:
        self.part_was_lost = True
        self.do(self.part(pick).lose)
        if turns:
            self.settle()

    @rule(pick=PICK)
    def part_is_quiet(self, pick: int) -> None:
        part = self.part(pick)
        if part.close_called:
            part.finish_close()
            self.settle()

    @precondition(lambda self: not self.sends)
    @rule(which=PICK)
    def cancel(self, which: int) -> None:
        tag = 1 + which % self.next_tag
        running = {id(part) for part in self.parts if tag in part.open}
        known = tag in self.whole and not self.whole[tag].done()
        withdrawn = self.do(lambda: self.link.cancel_receive(tag))
        for part in self.parts:
            near_and_idle = not part.distant and tag in part.open and tag not in part.matched
            assert not known or not near_and_idle, "a part was not asked"
            assert not known or not part.distant or tag in part.withdrawing, "a part was not asked"
        if withdrawn:
            assert running == {id(part) for part in self.parts}, "it was over in some part"
            assert not any(tag in part.open for part in self.parts), "a part was not withdrawn"
            assert self.whole[tag].done(), "a receive that was withdrawn is over"
        self.settle()

    @rule()
    def close(self) -> None:
        if self.closing is None:
            self.settle()
            self.lost_before_close = self.lost > 0
            self.closing = self.loop.create_task(self.link.close())
            self.settle()

    @invariant()
    def what_is_over_can_move_nothing(self) -> None:
        for tag, whole in self.whole.items():
            if whole.done():
                assert not any(tag in part.open for part in self.parts), f"{tag} may still move"
                if whole.exception() is None:
                    assert all(part.outcome[tag] for part in self.parts), f"{tag} is not whole"
                else:
                    assert isinstance(whole.exception(), TransferError)

    @invariant()
    def a_fence_is_over_when_every_part_is_quiet(self) -> None:
        if self.closing is not None and self.closing.done():
            assert self.closing.exception() is None
            assert all(part.closed.done() for part in self.parts)
            assert all(whole.done() for whole in self.whole.values())

    @invariant()
    def a_loss_is_told_once_and_not_after_a_close(self) -> None:
        assert self.lost <= self.part_was_lost, "a cancel is no loss"
        if self.closing is not None and not self.lost_before_close:
            assert self.lost == 0

    @invariant()
    def what_is_lost_in_part_is_closed_in_whole(self) -> None:
        if self.lost:
            self.settle()
            assert all(part.close_called for part in self.parts)

    def teardown(self) -> None:
        """Whatever happened, everything ends when the link is closed and its parts are."""
        if not hasattr(self, "loop"):
            return
        self.settle()
        if self.closing is None:
            self.closing = self.loop.create_task(self.link.close())
        self.settle()
        for part in self.parts:
            assert part.close_called
            part.finish_close()
        self.settle()
        assert self.closing.done()
        self.what_is_over_can_move_nothing()
        assert all(whole.done() for whole in self.whole.values())
        self.loop.close()


BundleMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "60")),
    stateful_step_count=int(os.environ.get("PROPERTY_STEPS", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestBundle = BundleMachine.TestCase
