"""A handoff of which nothing comes any more, on a link that is healthy."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from baton.core.attempt_failure import AttemptFailure
from baton.core.sampling_params import ResolvedSampling
from baton.handoff.blocks import GroupBlocks
from baton.handoff.decode import DecodeHandoffState
from baton.handoff.messages import (
    REPEAT_S,
    AbortReason,
    Action,
    Cancel,
    Credit,
    Fail,
    Grant,
    LinkId,
    Name,
    Segment,
    Send,
    SendBlocks,
    Stop,
    Withdraw,
)
from baton.handoff.prefill import PrefillHandoffs
from baton.roles.decode import FOR_PAGES, IN_LINE
from baton.roles.prefill import PrefillRole
from baton.router.dispatch.answers import Group
from baton.router.fleet.worker_client import WorkerClient
from tests.support.deep import all_deep_but
from tests.support.fake_engine import run_alone
from tests.support.local_worker import LocalWorker, answer, local_ring, until

PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40]
LENGTH = 6


@pytest.mark.parametrize("forgotten", all_deep_but(1, ["_compute", "_send_blocks"]))
async def test_it_is_given_up_and_done_again(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though decode says its last word again and again meanwhile: that is nothing that has come."""
    done = getattr(PrefillRole, forgotten)
    names: list[Name] = []

    def forget(role: PrefillRole, about: object) -> None:
        [name] = role._requests
        if name.attempt:
            done(role, about)
        else:
            names.append(name)

    monkeypatch.setattr(PrefillRole, forgotten, forget)
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        patience_s = 1.5 * REPEAT_S / (IN_LINE if forgotten == "_compute" else 1)
        decode.decode._wiring = replace(decode.decode._wiring, patience_s=patience_s)
        params = ResolvedSampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        assert await answer(ring, "r", PROMPT, LENGTH) == run_alone(PROMPT, params)
        assert set(names) == {Name("r", 0)}
        if forgotten == "_compute":  # pages that a send should have left are not given up by anybody's word
            await until(lambda: not (prefill.held or decode.held))


async def test_seconds_in_which_decode_stood_still_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come meanwhile is only not heard yet."""
    send, held = PrefillRole._send_blocks, asyncio.Event()
    kept: list[tuple[PrefillRole, SendBlocks]] = []

    def keep(role: PrefillRole, action: SendBlocks) -> None:
        kept.append((role, action))
        held.set()

    monkeypatch.setattr(PrefillRole, "_send_blocks", keep)
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        decode.decode._wiring = replace(decode.decode._wiring, patience_s=0.6)
        asked = asyncio.create_task(answer(ring, "r", PROMPT, LENGTH))
        await held.wait()
        monkeypatch.undo()
        time.sleep(1.0)  # noqa: ASYNC251 (nobody's turn comes)
        for role, action in kept:
            send(role, action)
        params = ResolvedSampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        assert await asked == run_alone(PROMPT, params)
        assert not decode.decode.counters.aborted


async def _without_pages(decode: LocalWorker, until_over: Callable[[], Awaitable[None]]) -> None:
    """Running requests grow into all that was promised to the handoff, for as long as that takes."""
    machine = decode.decode._machine
    await until(lambda: DecodeHandoffState.RESERVED in [machine.state_of(name) for name in machine._handoffs])
    with decode.engine.lock:
        taken = decode.engine.pool.allocate(decode.engine.pool.num_allocatable)
    assert taken is not None
    await until_over()
    with decode.engine.lock:
        decode.engine.pool.free(taken)


async def test_that_decode_has_no_pages_is_not_held_against_prefill() -> None:
    """Such a handoff may wait for longer than one of which nothing comes."""
    prefill, decode = LocalWorker("prefill", step_s=0.2), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        decode.decode._wiring = replace(decode.decode._wiring, patience_s=1.0)
        asked = asyncio.create_task(answer(ring, "r", PROMPT, LENGTH))
        await _without_pages(decode, lambda: asyncio.sleep(1.5))
        params = ResolvedSampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        assert await asked == run_alone(PROMPT, params)
        assert not decode.decode.counters.aborted


async def test_decode_that_has_no_pages_for_too_long_is_avoided() -> None:
    """Two full workers may wait for each other: one refuses, and another decode worker is asked."""
    prefill, full = LocalWorker("prefill", step_s=0.2), LocalWorker("decode")
    async with local_ring([prefill, full]) as ring:
        full.decode._wiring = replace(full.decode._wiring, patience_s=1.0 / FOR_PAGES)
        refused: list[tuple[str, str, set[str]]] = []
        place_again = ring.attempts.place_again

        def note(group: Group, refused_by: WorkerClient, reason: str) -> None:
            place_again(group, refused_by, reason)
            refused.append((refused_by.address, reason, set(group.avoided)))

        ring.attempts.place_again = note  # type: ignore[method-assign]
        asked = asyncio.create_task(answer(ring, "r", PROMPT, LENGTH))
        await _without_pages(full, lambda: until(lambda: refused))
        params = ResolvedSampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        assert await asked == run_alone(PROMPT, params)
        assert refused == [(full.address, "no pages came free here for 1 s", {full.address})]
        assert full.decode.counters.aborted == {AbortReason.STALLED: 1}
        await until(lambda: not (prefill.held or full.held))


class NoPages:
    """``baton.handoff.prefill.SourcePages`` of a request of which nothing is computed."""

    def finished(self, name: Name, blocks_per_page: int) -> tuple[GroupBlocks, ...]:
        return ()

    def pin(self, pages: tuple[int, ...]) -> None:
        raise AssertionError("there is nothing to send")

    unpin = pin


@pytest.mark.parametrize("segments", [[(0, 4)], [(0, 2), (2, 2)], [(3, 1)]])
def test_prefill_does_not_begin_what_it_could_never_end(segments: list[tuple[int, int]]) -> None:
    """Decode counts the request's blocks for itself, and may have counted more."""
    machine, link, name = PrefillHandoffs(NoPages()), LinkId("p", "d", 1), Name("r", 0)
    machine.link_opened(link)
    machine.ask(name, link, 3, (range(3),), 0.0)
    machine.receive(link, Credit(name), 0.0)
    granted = Grant(name, tuple(Segment(tag, *run) for tag, run in enumerate(segments)))
    [wrong] = [(first, first + count - 1) for first, count in segments if first + count > 3]
    blocks = f"KV blocks {wrong[0]} to {wrong[1]} of group 0"
    reason = f"decode granted {blocks}, of which the request has 0 to 2 to send"
    assert machine.receive(link, granted, 0.0) == withdrawn(link, name, reason)
    assert machine.counters.aborted == {AbortReason.MANIFEST: 1}
    assert machine.open_handoffs == 0


def withdrawn(link: LinkId, name: Name, reason: str) -> list[Action]:
    return [Fail(name, reason, AttemptFailure.HANDOFF_LOST), Send(link, Withdraw(name, reason)), Stop(name)]


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([Segment(1, 0, 2), Segment(1, 2, 2)], "decode granted a tag twice"),
        ([Segment(2, 0, 2), Segment(8, 2, 2)], "decode granted a tag twice"),
        ([Segment(2, 0, 2), Segment(9, 2, 2)], "decode granted a tag twice"),
        ([Segment(1, 0, 4), Segment(2, 4, 0)], "decode granted a segment without blocks"),
    ],
    ids=["twice in one grant", "being sent", "to be sent", "empty"],
)
def test_prefill_does_not_begin_sends_that_it_could_not_tell_apart(
    segments: list[Segment], reason: str
) -> None:
    """The end of one would be taken for the other's, and its pages would stay pinned."""
    source = Pages()
    machine, link = PrefillHandoffs(source), LinkId("p", "d", 1)
    machine.link_opened(link)
    other, name = Name("other", 0), Name("r", 0)
    for each in (other, name):
        machine.ask(each, link, 4, (range(4),), 0.0)
        machine.receive(link, Credit(each), 0.0)
    machine.receive(link, Grant(other, (Segment(8, 0, 2), Segment(9, 2, 2))), 0.0)
    assert source.pinned == Counter((0, 1)), "two blocks are computed, and two are not"
    assert machine.receive(link, Grant(name, tuple(segments)), 0.0) == withdrawn(link, name, reason)
    machine.sent(link, 8, True, 0.0)
    machine.receive(link, Cancel(other), 0.0)
    assert machine.open_handoffs == source.pinned.total() == 0
    machine.ask(again := Name("r", 1), link, 4, (range(4),), 0.0)
    machine.receive(link, Credit(again), 0.0)
    taken = machine.receive(link, Grant(again, (Segment(9, 0, 2),)), 0.0)
    assert taken == [SendBlocks(link, 9, (0, 1))], "what is not to be sent any more uses no tag"


class Pages:
    """Likewise, of requests of which the first two blocks are computed."""

    def __init__(self) -> None:
        self.pinned: Counter[int] = Counter()

    def finished(self, name: Name, blocks_per_page: int) -> tuple[GroupBlocks, ...]:
        return (GroupBlocks((0, 1)),)

    def pin(self, pages: tuple[int, ...]) -> None:
        self.pinned.update(pages)

    def unpin(self, pages: tuple[int, ...]) -> None:
        self.pinned.subtract(pages)
