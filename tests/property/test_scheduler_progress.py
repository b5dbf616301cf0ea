"""No scheduler goes on for ever, or stops, with work to do: every step brings the first in the queue forward.

``BATON_EXPLORE=full`` walks until a million different states of the scheduler were seen, with each planted
fault after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

import pytest

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.engine.sequence_states import SequenceStates
from tests.support.scheduler_walks import Walk

FULL = os.environ.get("BATON_EXPLORE") == "full"
STATES = 1_000_000 if FULL else 8_000
FAULT_WALKS = 20_000 if FULL else 400


def test_every_step_brings_the_first_in_the_queue_forward() -> None:
    seen: set[int] = set()
    for seed in count():
        if len(seen) >= STATES:
            break
        assert (wrong := Walk(seed).run(seen.add)) is None, f"walk {seed}: {wrong}"
    print(f"{seed} walks, {len(seen)} different states")


class EvictsTheFirst(Scheduler):
    """Takes blocks from the sequence that is nearest to its end."""

    def _bind(self, seq: Sequence, want: int, plan: dict[Sequence, int]) -> int:
        while not (granted := self._grow(seq, want)):
            victim = next((other for other in self.running if other is not seq), None)
            if victim is None or self._ahead:
                self._starved = self._ahead
                return 0
            self.running.remove(victim)
            plan.pop(victim, None)
            self._preempt(victim)
        return granted


class MakesNoRoom(Scheduler):
    """Lets the first in the queue wait for blocks of sequences that wait for it."""

    def _make_room(self) -> bool:
        return False


@pytest.mark.parametrize("planted", [EvictsTheFirst, MakesNoRoom])
def test_a_planted_fault_is_found(planted: type[Scheduler]) -> None:
    assert _found(planted) is not None


def _under_way_is_computed(patch: pytest.MonkeyPatch) -> None:
    """Beams come back without the blocks that a mate is computing in a step under way."""
    patch.setattr(Sequence, "num_missing", property(lambda seq: seq.num_uncomputed))


def _keeps_pages_for_a_state(patch: pytest.MonkeyPatch) -> None:
    """A sequence keeps pages for a state that it shares with nobody any more."""
    ready = SequenceStates.ready

    def kept(states: SequenceStates, seq: Sequence) -> bool:
        return bool(states.pages and seq.next_state) or ready(states, seq)

    patch.setattr(SequenceStates, "ready", kept)


@pytest.mark.skipif(not FULL, reason="BATON_EXPLORE=full runs it")
@pytest.mark.parametrize("plant", [_under_way_is_computed, _keeps_pages_for_a_state])
def test_a_fault_that_was_shipped_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert _found(Scheduler) is not None


def _found(scheduler: type[Scheduler]) -> str | None:
    wrongs = (Walk(seed, scheduler).run(lambda _: None) for seed in range(FAULT_WALKS))
    return next((wrong for wrong in wrongs if wrong is not None), None)
