"""Every reachable state of the handoff's shipped machines, in instances small enough to visit them all.

In each state nothing happens that must never happen, and from each every block can become free again without
a fault, without new work and without a router's help. ``BATON_EXPLORE=full`` adds the large instances, which
take many minutes each. ``-s`` shows the numbers of states.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest

from tests.support.deep import all_deep_but
from tests.support.handoff_explorer import FULL as FULL_GROUP
from tests.support.handoff_explorer import STATE, WINDOW, Instance, explore
from tests.support.handoff_mutants import (
    BelieveAnyDrained,
    BindWhileFencing,
    CommitOnLocalCompletion,
    DrainedAfterFailure,
    DrainedAtOnce,
    DrainedWithoutAttempt,
    ForgetOldAttempts,
    FreeOnAbort,
    FreeOnTimeout,
    LeaveStatesUnpinned,
    LeaveWindowsUnpinned,
    NeverFence,
    NeverRepeatAtDecode,
    NeverRepeatAtPrefill,
    OneGroupsHit,
    ReconnectWithoutFence,
    UnpinAtStop,
)
from tests.support.handoff_world import ViolationError

ONE = Instance(requests=(1,), cancels=0, crashes=0, losses=0)
TWO = replace(ONE, requests=(1, 1))
RETRIED = replace(ONE, attempts=2)
RANKS = replace(TWO, prefills=2)
"""Two links into one page of decode's: the second request waits for credit."""
GROUPED = replace(
    ONE, requests=(2,), groups=(FULL_GROUP, WINDOW, STATE), prefill_pages=5, decode_pages=4, segment_blocks=2
)
"""Two blocks in a full group, a window that sees the second alone, and a state."""
SHORT = replace(GROUPED, requests=(1,), prefill_pages=3, decode_pages=3)
WINDOWED = replace(SHORT, groups=(FULL_GROUP, WINDOW), prefill_pages=2, decode_pages=2)
STATEFUL = replace(SHORT, groups=(FULL_GROUP, STATE), prefill_pages=2, decode_pages=2)

SMALL = {
    "one request, a cancel, a crash, a lost message": replace(ONE, cancels=1, crashes=1, losses=1),
    "one request, copied by decode, a crash, a lost message": replace(
        ONE, one_sided=False, crashes=1, losses=1
    ),
    "one request, a connection that breaks, fences that hang": replace(
        ONE, cancels=1, cuts=1, fences_may_hang=True
    ),
    "one request, messages that come twice": replace(ONE, cancels=1, repeats=2),
    "two segments, a crash, a lost message": replace(
        ONE, requests=(2,), prefill_pages=2, decode_pages=2, crashes=1, losses=1
    ),
    "two requests, a crash": replace(TWO, crashes=1),
    "two requests, a lost message": replace(TWO, losses=1),
    "two attempts, a lost message": replace(RETRIED, losses=1),
    "two ranks, a lost message": replace(RANKS, losses=1),
    "three groups, a crash, a lost message": replace(GROUPED, crashes=1, losses=1),
    "three groups, copied by decode, a crash": replace(GROUPED, one_sided=False, crashes=1),
    "a full group and a window, a cancel": replace(WINDOWED, cancels=1),
    "a full group and a state, a connection that breaks": replace(STATEFUL, cuts=1, fences_may_hang=True),
    "three groups, one of them cached, a lost message": replace(SHORT, hit=True, losses=1),
}
LARGE = {
    "two requests, a cancel, a crash, a lost message": replace(TWO, cancels=1, crashes=1, losses=1),
    "two attempts, a cancel, a crash, a lost message": replace(RETRIED, cancels=1, crashes=1, losses=1),
    "two ranks, a cancel, a lost message": replace(RANKS, cancels=1, losses=1),
    "two ranks, a crash, a lost message": replace(RANKS, crashes=1, losses=1),
    "three groups, a cancel": replace(GROUPED, cancels=1),
    "three groups, copied by decode, a cancel": replace(GROUPED, one_sided=False, cancels=1),
    "three groups, one block, a cancel, a crash": replace(SHORT, cancels=1, crashes=1),
    "three groups, two requests, a lost message": replace(SHORT, requests=(1, 1), losses=1),
}
FULL = os.environ.get("BATON_EXPLORE") == "full"


def check(name: str, instance: Instance) -> None:
    result = explore(instance)
    print(f"{name}: {result}")
    assert not result.stuck, f"blocks that never become free after: {', '.join(result.way)}"


@pytest.mark.parametrize("name", all_deep_but(4, SMALL))
def test_all_states_are_safe_and_can_become_idle(name: str) -> None:
    check(name, SMALL[name])


@pytest.mark.skipif(not FULL, reason="BATON_EXPLORE=full runs it")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", LARGE)
def test_all_states_of_a_large_instance(name: str) -> None:
    check(name, LARGE[name])


UNSAFE = [
    (replace(ONE, cancels=1, decode_machine=FreeOnAbort), "pinned for None"),
    (replace(ONE, cancels=1, decode_machine=FreeOnTimeout), "pinned for None"),
    (
        replace(RETRIED, prefill_pages=2, decode_pages=2, cancels=1, decode_machine=DrainedWithoutAttempt),
        "pinned for None",
    ),
    (replace(TWO, cuts=1, decode_machine=ReconnectWithoutFence), "pinned for None"),
    (replace(TWO, cuts=1, decode_machine=CommitOnLocalCompletion), "was committed with"),
    (replace(ONE, cuts=1, decode_machine=BindWhileFencing), "being fenced"),
    (replace(ONE, cancels=1, one_sided=False, decode_machine=BelieveAnyDrained), "pinned for None"),
    (replace(RETRIED, prefill_pages=2, decode_pages=2, decode_machine=ForgetOldAttempts), "committed after"),
    (replace(TWO, cancels=1, prefill_machine=UnpinAtStop), "is changed while"),
    (replace(ONE, cancels=1, cuts=1, prefill_machine=DrainedAfterFailure), "pinned for None"),
    (replace(ONE, cancels=1, prefill_machine=DrainedAtOnce), "pinned for None"),
    (replace(WINDOWED, requests=(1, 1), cuts=1, prefill_machine=LeaveWindowsUnpinned), "is changed while"),
    (replace(STATEFUL, requests=(1, 1), cuts=1, prefill_machine=LeaveStatesUnpinned), "is changed while"),
    (replace(GROUPED, early_state=True), "is changed while"),
    (replace(SHORT, hit=True, decode_machine=OneGroupsHit), "was committed with None"),
]
LEAKING = [
    replace(ONE, crashes=1, decode_machine=NeverFence),
    replace(ONE, cancels=1, losses=1, decode_machine=NeverRepeatAtDecode),
    replace(ONE, losses=1, prefill_machine=NeverRepeatAtPrefill),
]


def planted(instance: Instance) -> str:
    machines = (instance.decode_machine, instance.prefill_machine)
    names = [m.__name__ for m in machines if m.__module__.startswith("tests.")]
    return (names + ["EarlyState"] * instance.early_state)[0]


@pytest.mark.parametrize(
    ("instance", "complaint"), all_deep_but(4, UNSAFE), ids=[planted(i) for i, _ in UNSAFE]
)
def test_a_harmful_mutant_is_found(instance: Instance, complaint: str) -> None:
    with pytest.raises(ViolationError, match=re.compile(complaint)):
        explore(instance)


@pytest.mark.parametrize("instance", LEAKING, ids=planted)
def test_a_leaking_mutant_is_found(instance: Instance) -> None:
    """Safe in every state, and in some of them blocks are lost for good."""
    result = explore(instance)
    assert result.stuck, "every block can become free"
