"""What prefill and decode have in common: decisions are carried out whole, or the worker ends."""

from __future__ import annotations

import asyncio
from threading import Lock

import pytest

from baton.handoff.messages import Action, Name, Stop
from baton.handoff.timeline import Stage, Timeline
from baton.roles.driver import MachineDriver, Timelines

NAME = Name("r", 0)


class Role:
    """Carries nothing out but a broken action, which fails."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.done: list[Action] = []
        self.crashes: list[str] = []
        self.driver = MachineDriver(self.lock, self.execute, self.crash, lambda: 5.0)

    def execute(self, action: Action) -> None:
        assert not self.lock.locked(), "the engine would wait for it"
        if action == Stop(Name("broken", 0)):
            raise RuntimeError("on purpose")
        self.done.append(action)

    def crash(self) -> None:
        self.crashes.append("crash")


def test_a_decision_is_made_under_the_lock_by_the_machine_s_own_time() -> None:
    role = Role()

    def step(now: float) -> list[Action]:
        assert role.lock.locked() and now == 5.0
        return [Stop(NAME)]

    role.driver.do(step)
    assert role.done == [Stop(NAME)] and not role.crashes


def test_a_decision_half_carried_out_ends_the_worker() -> None:
    role = Role()
    with pytest.raises(RuntimeError, match="on purpose"):
        role.driver.do(lambda _: [Stop(NAME), Stop(Name("broken", 0))])
    assert role.done == [Stop(NAME)] and len(role.crashes) == 1


async def test_what_cannot_be_followed_to_its_end_ends_the_worker() -> None:
    role = Role()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("on purpose")

    role.driver.spawn(asyncio.sleep(0))
    cancelled = asyncio.create_task(asyncio.sleep(60))
    role.driver.follow(cancelled)
    cancelled.cancel()
    await asyncio.sleep(0.01)
    assert not role.crashes
    role.driver.spawn(fail())
    await asyncio.sleep(0.01)
    assert len(role.crashes) == 1


def test_a_stage_is_noted_of_what_is_under_way_only() -> None:
    timelines = Timelines({NAME: Timeline(1.0, "tcp"), Name("s", 0): Timeline(1.0, "tcp")})
    for name, stage in ((None, Stage.READY), (NAME, None), (Name("over", 0), Stage.READY)):
        timelines.reach(name, stage)
    assert timelines.oldest(Stage.READY) is None and len(timelines) == 2
    timelines.reach(NAME, Stage.READY, 4.0)
    timelines.reach(Name("s", 0), Stage.READY, 3.0)
    assert timelines.oldest(Stage.READY) == 3.0
