"""The handoff's state machines under every kind of fault, and mutants that show that the tests would notice.

``BATON_PROPERTY_STEPS`` sets how many events the shipped machines go through, once by chance alone and once
under hypothesis, which shrinks what it finds. Nightly: 200000 and more.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from baton.handoff.decode import DecodeHandoffs
from baton.handoff.prefill import PrefillHandoffs
from baton.router.dispatch.ledger import LedgerEntry
from tests.support.deep import all_deep_but
from tests.support.handoff_mutants import (
    BelieveAnyDrained,
    BelieveAnyGrant,
    BindWhileFencing,
    CommitOnLocalCompletion,
    CommitUnverified,
    DrainedAfterFailure,
    DrainedAtOnce,
    DrainedWithoutAttempt,
    ForgetOldAttempts,
    FreeOnAbort,
    FreeOnTimeout,
    LeaveStatesUnpinned,
    LeaveWindowsUnpinned,
    NeverFence,
    NeverRepeatAtPrefill,
    NoAttemptCheck,
    NoSequenceCheck,
    OneGroupsHit,
    ReconnectWithoutFence,
    UnpinAtStop,
)
from tests.support.handoff_world import (
    FULL,
    STATE,
    WINDOW,
    ViolationError,
    World,
    WorldConfig,
    run_randomly,
)

STEPS = int(os.environ.get("BATON_PROPERTY_STEPS", "12000"))
STEPS_PER_WORLD = 300
DEEP_S = 300 + STEPS / 50
"""Seconds that the deep runs may take on a busy machine."""
MUTANT_RUNS = 400

GROUPS = (FULL, WINDOW, STATE)
PLAIN = [
    WorldConfig(
        prefills=1 + n % 2,
        decodes=1 + n // 2 % 2,
        one_sided=n // 4 % 2 == 1,
        ordered=n // 8 % 2 == 1,
        requests=3 + n % 3,
        decode_blocks=10 - n % 4,
        prefill_per_page=2 if n % 3 == 1 else 1,
        decode_per_page=2 if n % 3 == 2 else 1,
        verify=n % 5 < 2,
    )
    for n in range(16)
]
GROUPED = [
    replace(config, groups=GROUPS, prefill_blocks=20, decode_blocks=2 * config.decode_blocks)
    for config in PLAIN
]
CONFIGS = [config for pair in zip(PLAIN, GROUPED, strict=True) for config in pair]


@pytest.mark.timeout(DEEP_S)
def test_the_shipped_machines_survive_chance() -> None:
    commits = 0
    for seed in range(-(-STEPS // STEPS_PER_WORLD)):
        world = run_randomly(CONFIGS[seed % len(CONFIGS)], seed, STEPS_PER_WORLD)
        commits += sum(world.commits.values())
    assert commits > STEPS / 500, "hardly anything was handed on: this run proves little"


def test_a_history_can_be_repeated() -> None:
    first, second = (run_randomly(CONFIGS[3], seed=5, steps=500) for _ in range(2))
    assert first.now == second.now
    assert first.commits == second.commits


# --- under hypothesis


NUMBERS = st.integers(min_value=0, max_value=2**24)
COMMON = tuple(event for event, weight in World.EVENTS.items() if weight >= 8)
RARE = tuple(event for event in World.EVENTS if event not in COMMON)


class HandoffMachine(RuleBasedStateMachine):
    """Chooses the events; the world holds the oracles."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(WorldConfig())
        self.seed = 0

    @initialize(config=st.sampled_from(CONFIGS), seed=NUMBERS)
    def start(self, config: WorldConfig, seed: int) -> None:
        self.world, self.seed = World(config), seed

    @rule(event=st.sampled_from(COMMON), number=NUMBERS)
    def something_usual(self, event: str, number: int) -> None:
        self.world.step(event, number)

    @rule(event=st.sampled_from(RARE), number=NUMBERS)
    def something_rare(self, event: str, number: int) -> None:
        self.world.step(event, number)

    @rule(seed=NUMBERS)
    def go_on(self, seed: int) -> None:
        """A few events at once, so that transfers get far enough to be disturbed."""
        self.world.advance(seed, 12)

    def teardown(self) -> None:
        self.world.settle(self.seed)


@pytest.mark.deep
@pytest.mark.timeout(DEEP_S)
def test_the_shipped_machines_survive_hypothesis() -> None:
    # An example of 50 rules makes some 150 events.
    examples = max(10, STEPS // 150)
    run_state_machine_as_test(
        HandoffMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize="BATON_PROPERTY_STEPS" not in os.environ,
        ),
    )


# --- mutants

TWO_SIDED = WorldConfig(prefills=2, decodes=1, requests=4)
ONE_SIDED = replace(TWO_SIDED, one_sided=True)
ROOMY = WorldConfig(requests=2, one_sided=True, prefill_blocks=20, decode_blocks=20)
"""Several attempts of a request get far at once."""

SEVERAL = WorldConfig(requests=4, groups=GROUPS, prefill_blocks=16, decode_blocks=16)
"""A full group, a window and a state."""

MUTANTS: list[tuple[WorldConfig, str]] = [
    (replace(TWO_SIDED, decode_machine=FreeOnAbort), "touch"),
    (replace(TWO_SIDED, decode_machine=FreeOnTimeout), "touch"),
    (replace(TWO_SIDED, decode_machine=CommitOnLocalCompletion), "was committed with .* as its block"),
    (replace(TWO_SIDED, decode_machine=CommitUnverified, verify=True), "was committed with .*noise"),
    (replace(TWO_SIDED, decode_machine=NeverFence), r"D\d+ holds \d+ of \d+ blocks"),
    (replace(TWO_SIDED, decode_machine=ForgetOldAttempts), "was committed after"),
    (replace(TWO_SIDED, decode_machine=BelieveAnyDrained), "touch"),
    (replace(TWO_SIDED, decode_machine=BindWhileFencing), "being fenced"),
    (replace(TWO_SIDED, prefill_machine=UnpinAtStop), "touch"),
    (replace(TWO_SIDED, prefill_machine=BelieveAnyGrant), "is sent twice"),
    (replace(TWO_SIDED, prefill_machine=NeverRepeatAtPrefill), r"P\d+ has \d+ open handoffs"),
    (replace(TWO_SIDED, entry=NoAttemptCheck), "follows tokens it was not sampled after"),
    (replace(TWO_SIDED, entry=NoSequenceCheck), r"'s token for position \d+ is delivered at \d+"),
    (replace(ONE_SIDED, decode_machine=FreeOnAbort), "touch"),
    (replace(ONE_SIDED, decode_machine=FreeOnTimeout), "touch"),
    (replace(ROOMY, decode_machine=DrainedWithoutAttempt), "touch"),
    (replace(ONE_SIDED, decode_machine=ReconnectWithoutFence), "touch"),
    (replace(ONE_SIDED, decode_machine=NeverFence), r"D\d+ holds \d+ of \d+ blocks"),
    (replace(ONE_SIDED, prefill_machine=DrainedAfterFailure), "touch"),
    (replace(ONE_SIDED, prefill_machine=DrainedAtOnce), "touch"),
    (replace(SEVERAL, prefill_machine=LeaveWindowsUnpinned), "touch"),
    (replace(SEVERAL, prefill_machine=LeaveStatesUnpinned), "touch"),
    (replace(SEVERAL, early_state=True), "changes block .* while a transfer may touch it"),
    (replace(SEVERAL, decode_machine=OneGroupsHit), "was committed with .* of group [12]"),
    (replace(SEVERAL, hits_of_one_group=True), r"goes on with .* (of group 1|as the state behind)"),
]


def planted(config: WorldConfig) -> str:
    shipped = (DecodeHandoffs, PrefillHandoffs, LedgerEntry)
    parts = (config.decode_machine, config.prefill_machine, config.entry)
    names = [part.__name__ for part in parts if part not in shipped]
    names += ["EarlyState"] * config.early_state + ["HitsOfOneGroup"] * config.hits_of_one_group
    return names[0]


@pytest.mark.parametrize(
    ("config", "complaint"),
    all_deep_but(2, MUTANTS),
    ids=[f"{planted(config)}-{'one' if config.one_sided else 'two'}-sided" for config, _ in MUTANTS],
)
def test_a_mutant_is_caught(config: WorldConfig, complaint: str) -> None:
    """Some run fails, and one of those that do with the complaint that shows the harm."""
    heard: set[str] = set()
    for seed in range(MUTANT_RUNS):
        try:
            run_randomly(config, seed, STEPS_PER_WORLD)
        except ViolationError as error:
            if re.search(complaint, str(error)):
                return
            heard.add(str(error))
    pytest.fail(f"not noticed in {MUTANT_RUNS} runs; heard {heard or 'nothing'}")
