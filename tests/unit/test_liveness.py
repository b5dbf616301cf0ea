"""Silence is found in time, and never where it was we who did not listen."""

from __future__ import annotations

from typing import cast

import pytest

from baton.handoff.decode import RETIRE_AFTER_S, DecodeHandoffs, DecodeMemory
from baton.handoff.messages import Retire
from baton.net.heartbeat import (
    BUSY_SILENCE_S,
    HEARTBEAT_S,
    IDLE_SILENCE_S,
    MAX_PER_TICK_S,
    OwnTime,
    Pulse,
)

TICK_S = 0.1


def silent_for(pulse: Pulse, seconds: float) -> int:
    """Ticks through ``seconds`` of silence; returns the heartbeats that were due."""
    return sum(pulse.tick(TICK_S) for _ in range(round(seconds / TICK_S)))


def test_a_busy_link_may_be_silent_for_two_seconds_an_idle_one_for_ten() -> None:
    pulse = Pulse()
    silent_for(pulse, BUSY_SILENCE_S - TICK_S)
    assert not pulse.lost(lambda: True)
    silent_for(pulse, 2 * TICK_S)
    assert pulse.lost(lambda: True)
    assert not pulse.lost(lambda: False)
    silent_for(pulse, IDLE_SILENCE_S)
    assert pulse.lost(lambda: False)


def test_any_word_ends_the_silence() -> None:
    pulse = Pulse()
    for _ in range(100):
        silent_for(pulse, 1.5)
        pulse.heard()
    assert not pulse.lost(lambda: True)


def test_heartbeats_are_due_twice_a_second() -> None:
    assert silent_for(Pulse(), 30) in range(round(30 / HEARTBEAT_S) - 12, round(30 / HEARTBEAT_S) + 1)


def test_a_minute_in_which_we_were_stopped_is_no_silence_of_the_peer() -> None:
    pulse = Pulse()
    pulse.tick(60.0)
    assert not pulse.lost(lambda: True)


def test_own_time_goes_on_by_its_ticks_and_never_back() -> None:
    own = OwnTime(50.0)
    assert (own.at(50.0), own.at(50.25), own.at(99.0)) == (0.0, 0.25, MAX_PER_TICK_S)
    assert own.tick(50.25) == 0.0
    assert own.tick(60.25) == pytest.approx(10.0 - MAX_PER_TICK_S)
    assert own.at(60.25) == pytest.approx(0.25 + MAX_PER_TICK_S)


@pytest.mark.parametrize("stopped_s", [0.0, 60.0])
def test_a_worker_that_stood_still_does_not_retire_for_that(stopped_s: float) -> None:
    """The end of the fence may be there, and only not heard yet."""
    machine, own, now = (
        DecodeHandoffs("d", cast(DecodeMemory, None), drained_is_proof=False),
        OwnTime(100.0),
        100.0,
    )
    link = machine.open_link("p")
    assert link is not None
    machine.link_lost(link, own.at(now))
    now += stopped_s
    ticks = 0
    while Retire(link) not in machine.tick(own.at(now)):
        now, ticks = now + TICK_S, ticks + 1
        own.tick(now)
        assert ticks * TICK_S < 2 * RETIRE_AFTER_S
    assert ticks * TICK_S > RETIRE_AFTER_S / 2
