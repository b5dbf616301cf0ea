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

from baton.connector import decode as decode_module
from baton.connector.decode import DecodeHandoffs, State
from baton.connector.decode import Handoff as DecodeHandoff
from baton.connector.messages import (
    Action,
    Ask,
    Drained,
    Fail,
    LinkId,
    Manifest,
    Name,
    Retire,
    Send,
    SendComplete,
)
from baton.connector.prefill import Handoff as PrefillHandoff
from baton.connector.prefill import PrefillHandoffs
from baton.connector.prefill import State as PrefillState
from tests.support.handoff_world import ViolationError, World, WorldConfig, run_randomly

STEPS = int(os.environ.get("BATON_PROPERTY_STEPS", "12000"))
STEPS_PER_WORLD = 300
MUTANT_RUNS = 400

CONFIGS = [
    WorldConfig(
        prefills=1 + n % 2,
        decodes=1 + n // 2 % 2,
        one_sided=n // 4 % 2 == 1,
        ordered=n // 8 % 2 == 1,
        requests=3 + n % 3,
        decode_blocks=10 - n % 4,
    )
    for n in range(16)
]


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


# --- mutants: each leaves out one rule, as systems in use do


class FreeOnAbort(DecodeHandoffs):
    """The request is over, so its pages are free: a write under way lands in the next request's."""

    def _abort(self, handoff: DecodeHandoff, now: float) -> list[Action]:
        actions = super()._abort(handoff, now)
        if handoff.state is State.DRAINING:
            actions += self._over(handoff, now) + self.pump(now)
        return actions


class FreeOnTimeout(DecodeHandoffs):
    """Two seconds of silence are taken for proof."""

    def tick(self, now: float) -> list[Action]:
        late = [
            handoff
            for handoff in self._handoffs.values()
            if handoff.state is State.DRAINING and now - handoff.draining_since >= decode_module.FENCE_AFTER_S
        ]
        return [action for handoff in late for action in self._over(handoff, now)] + super().tick(now)


class CommitOnLocalCompletion(DecodeHandoffs):
    """All receives have completed, so the request runs: prefill's pages may have changed meanwhile."""

    def received(self, link: LinkId, tag: int, ok: bool, now: float) -> list[Action]:
        name = self._by_tag.get((link, tag))
        handoff = self._handoffs.get(name) if name is not None else None
        if handoff is not None and handoff.state is State.ARMED:
            num_tokens, digest = self._room.manifest(handoff.name)
            manifest = Manifest(num_tokens, digest, handoff.num_segments)
            handoff.complete = SendComplete(handoff.name, manifest, first_token=7)
        return super().received(link, tag, ok, now)


class NeverFence(DecodeHandoffs):
    """A lost link is left alone: safe, and its pages never come back."""

    def _fence(self, state: decode_module._Link, now: float) -> list[Action]:
        super()._fence(state, now)
        return []

    def tick(self, now: float) -> list[Action]:
        return [action for action in super().tick(now) if not isinstance(action, Retire)]


class ForgetOldAttempts(DecodeHandoffs):
    """An older attempt is let in while a newer one is here."""

    def _on_ask(self, link: LinkId, ask: Ask, now: float) -> list[Action]:
        newest = self._newest.pop(ask.name.request_id, None)
        actions = super()._on_ask(link, ask, now)
        if newest is not None and newest in self._handoffs and ask.name not in self._handoffs:
            self._newest[newest.request_id] = newest
        return actions


class BelieveAnyDrained(DecodeHandoffs):
    """Frees at the peer's word, though it is this process that copies from the socket."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._drained_is_proof = True


class BindWhileFencing(DecodeHandoffs):
    """Posts receives on a link that is being closed."""

    def _current(self, link: LinkId) -> bool:
        state = self._links.get(link.prefill)
        return state is not None and state.id == link


class UnpinAtStop(PrefillHandoffs):
    """The request is over, so its source pages may change: what is under way carries the next one's KV."""

    def _stop(self, handoff: PrefillHandoff, now: float) -> list[Action]:
        for tag, pages in handoff.sending.items():
            self._source.unpin(pages)
            handoff.sending[tag] = ()
        return super()._stop(handoff, now)


class DrainedAfterFailure(PrefillHandoffs):
    """Takes a failed send for one that is over everywhere, and says so."""

    def sent(self, link: LinkId, tag: int, ok: bool, now: float) -> list[Action]:
        name = self._by_tag.get((link, tag))
        handoff = self._handoffs.get(name) if name is not None else None
        if ok or handoff is None or tag not in handoff.sending:
            return super().sent(link, tag, ok, now)
        del self._by_tag[link, tag]
        self._source.unpin(handoff.sending.pop(tag))
        if handoff.state is PrefillState.STOPPED:
            return self._drained_if_quiet(handoff, now)
        return [Fail(handoff.name, "failed"), *self.withdraw(handoff.name, "transfer", now)]


class DrainedAtOnce(PrefillHandoffs):
    """Answers a cancel before what it had posted is over."""

    def _on_cancel(
        self, link: LinkId, name: Name, handoff: PrefillHandoff | None, now: float
    ) -> list[Action]:
        return [*super()._on_cancel(link, name, handoff, now), Send(link, Drained(name, link))]


TWO_SIDED = WorldConfig(prefills=2, decodes=1, requests=4)
ONE_SIDED = replace(TWO_SIDED, one_sided=True)

MUTANTS: list[tuple[WorldConfig, str]] = [
    (replace(TWO_SIDED, decode_machine=FreeOnAbort), "touch"),
    (replace(TWO_SIDED, decode_machine=FreeOnTimeout), "touch"),
    (replace(TWO_SIDED, decode_machine=CommitOnLocalCompletion), "was committed with .* as its block"),
    (replace(TWO_SIDED, decode_machine=NeverFence), r"D\d+ holds \d+ of \d+ blocks"),
    (replace(TWO_SIDED, decode_machine=ForgetOldAttempts), "was committed after"),
    (replace(TWO_SIDED, decode_machine=BelieveAnyDrained), "touch"),
    (replace(TWO_SIDED, decode_machine=BindWhileFencing), "being fenced"),
    (replace(TWO_SIDED, prefill_machine=UnpinAtStop), "touch"),
    (replace(ONE_SIDED, decode_machine=FreeOnAbort), "touch"),
    (replace(ONE_SIDED, prefill_machine=DrainedAfterFailure), "touch"),
    (replace(ONE_SIDED, prefill_machine=DrainedAtOnce), "touch"),
]


@pytest.mark.parametrize(
    ("config", "complaint"),
    MUTANTS,
    ids=[
        f"{(c.decode_machine if c.decode_machine is not DecodeHandoffs else c.prefill_machine).__name__}"
        f"-{'one' if c.one_sided else 'two'}-sided"
        for c, _ in MUTANTS
    ],
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
