"""Silence is found in time, and never where it was we who did not listen."""

from __future__ import annotations

from baton.connector.liveness import BUSY_SILENCE_S, HEARTBEAT_S, IDLE_SILENCE_S, Pulse

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
