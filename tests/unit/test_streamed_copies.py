"""The host tier on a CUDA device: copies run beside the steps, and nothing meets bytes that are on their way.

The device is a fake one, on which nothing runs before somebody waits for it.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.execution import StepResult
from baton.engine.kv import streamed_copies
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_memory import HostMemory
from baton.engine.kv.host_tier import CopyPlan, HostTier
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import ScheduledBatch, Scheduler, SchedulerLimits
from baton.engine.sequence import Sequence
from baton.parallel.messages import CopyBlocks
from baton.transport.pool_memory import PoolMemory
from tests.support.fake_cuda.device import FakeCuda
from tests.support.fake_cuda.streams import Order
from tests.support.fake_engine import FakeModel, run

pytestmark = pytest.mark.deep

BLOCK = (1, 1, 2, 4, 4)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as fake:
        yield fake
        gc.collect()  # pinned memory is given back to the device that it was pinned for


def pool_of(numbers: list[int]) -> Tensor:
    """A pool whose blocks are full of these numbers."""
    pool = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1).repeat(1, *BLOCK).cuda()
    torch.cuda.synchronize()
    return pool


def tier_of(pool: Tensor, num_slots: int = 8) -> HostMemory:
    return HostMemory(pool, num_slots, BreakEven(4))


def held(cuda: FakeCuda, tensor: Tensor) -> list[int]:
    """The number that each block is full of, at this moment, in whatever memory."""
    now = cuda.peek(tensor) if tensor.device.type == "cuda" else tensor
    flat = now.flatten(1)
    assert bool((flat == flat[:, :1]).all()), "a block is in part of one and in part of another"
    return [int(number) for number in flat[:, 0].tolist()]


def finish() -> None:
    torch.cuda.synchronize()


class TestSaves:
    def test_a_step_that_evicts_waits_for_no_copy(self, cuda: FakeCuda) -> None:
        pool = pool_of([0, 1, 2, 3])
        tier = tier_of(pool)
        tier.carry_out(CopyPlan({4: 1, 5: 2}, {}))
        tier.join()
        assert held(cuda, tier._slots) == [0] * 8, "they were only started"
        pool[1].fill_(10)  # the step writes to a block that it has just been given
        torch.cuda.current_stream().synchronize()
        assert held(cuda, pool) == [0, 10, 2, 3]
        assert held(cuda, tier._slots) == [0] * 8, "nor does the step's stream wait for the bus"
        finish()
        assert held(cuda, tier._slots) == [0, 0, 0, 0, 1, 2, 0, 0]

    def test_more_blocks_than_the_ring_holds(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streamed_copies, "RING_BYTES", 4 * 32 * 4)
        pool = pool_of(list(range(16)))
        tier = tier_of(pool, 16)
        assert tier._streamed is not None
        assert tier._streamed._half == 2
        for first in (0, 7):
            tier.carry_out(CopyPlan({first + at: 15 - first - at for at in range(7)}, {}))
        tier.join()
        pool.fill_(99)
        finish()
        assert held(cuda, tier._slots)[:14] == list(range(15, 1, -1))

    def test_what_arrives_in_a_block_that_is_being_saved(self, cuda: FakeCuda) -> None:
        """A peer's bytes come at once: no stream of the pool's own orders them."""
        pool = pool_of([0, 1, 2, 3])
        tier = tier_of(pool)
        memory = PoolMemory(pool, tier.settle)
        tier.carry_out(CopyPlan({0: 1, 1: 2}, {}))
        part = memory.part(4)
        part.scatter([1], memoryview(bytearray(torch.full(BLOCK, 7.0).numpy().tobytes())))
        tier.carry_out(CopyPlan({2: 3}, {}))
        [view] = part.on_device([3])
        cuda._at(view.pointer, view.nbytes).zero_()
        finish()
        assert held(cuda, pool) == [0, 7, 2, 0]
        assert held(cuda, tier._slots)[:3] == [1, 2, 3]


class TestRestores:
    def test_a_step_finds_restored_blocks_restored(self, cuda: FakeCuda) -> None:
        pool = pool_of([0, 1, 2, 3])
        tier = tier_of(pool)
        tier.carry_out(CopyPlan({0: 1, 1: 2}, {}))
        tier.carry_out(CopyPlan({}, {3: 0, 0: 1}))
        assert held(cuda, pool) == [0, 1, 2, 3], "they were only started"
        tier.join()
        seen = pool.clone()
        torch.cuda.current_stream().synchronize()
        assert held(cuda, seen) == [2, 1, 2, 1]

    def test_saves_of_a_plan_go_before_its_restores(self, cuda: FakeCuda) -> None:
        pool = pool_of([0, 1, 2, 3])
        tier = tier_of(pool)
        tier.carry_out(CopyPlan({0: 1}, {}))
        tier.carry_out(CopyPlan({1: 2}, {2: 0}))
        finish()
        assert held(cuda, pool) == [0, 1, 1, 3]
        assert held(cuda, tier._slots)[:2] == [1, 2]


@pytest.mark.parametrize("order", ["late", "others_first", "early", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_device_does_first_what_comes_back_is_what_went(order: Order, seed: int) -> None:
    """Steps, arrivals, evictions and restores in any order, against numbers that change at once."""
    with FakeCuda(order=order, seed=seed) as cuda:
        _come_and_go(cuda, random.Random(seed))
        gc.collect()


def _come_and_go(cuda: FakeCuda, rng: random.Random) -> None:
    numbers, slots = list(range(12)), [0] * 6
    pool = pool_of(numbers)
    tier = tier_of(pool, 6)
    memory = PoolMemory(pool, tier.settle).part(4)
    for turn in range(40):
        saved = rng.sample(range(12), rng.randrange(4))
        plan = CopyPlan(dict(zip(rng.sample(range(6), len(saved)), saved, strict=True)), {})
        for slot, block in plan.saves.items():
            slots[slot] = numbers[block]
        for block in rng.sample(range(12), rng.randrange(3)):
            plan.restores[block] = rng.randrange(6)
            numbers[block] = slots[plan.restores[block]]
        tier.carry_out(plan)
        written = rng.sample(range(12), 2)
        for block in written:
            numbers[block] = 100 + turn
        if rng.random() < 0.5:  # a step writes
            tier.join()
            for block in written:
                pool[block].fill_(100 + turn)
            torch.cuda.current_stream().synchronize()
        else:  # a peer's bytes arrive
            content = torch.full((2, *BLOCK), 100.0 + turn).numpy().tobytes()
            memory.scatter(written, memoryview(bytearray(content)))
    finish()
    assert held(cuda, pool) == numbers
    assert held(cuda, tier._slots) == slots


class TestMemory:
    def test_no_more_is_pinned_than_there_are_slots(self, cuda: FakeCuda) -> None:
        pool = pool_of([0, 1, 2, 3])
        before = cuda.pinned.sizes
        tier = tier_of(pool, 9)
        new = {at: size for at, size in cuda.pinned.sizes.items() if at not in before}
        assert new == {tier._slots.data_ptr(): 9 * pool[0].nbytes}
        assert tier._slots.is_pinned()
        del tier
        gc.collect()
        assert not set(new) & set(cuda.pinned.sizes), "it is given back with the tier"

    def test_pages_that_cannot_be_pinned_are_an_error(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Full:
            def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
                return 2

        pool = pool_of([0])
        monkeypatch.setattr(torch.cuda, "cudart", Full)
        with pytest.raises(RuntimeError, match="128 bytes of host memory cannot be pinned: CUDA error 2"):
            tier_of(pool, 1)


class TestFigures:
    def test_the_break_even_is_told_what_the_devices_clock_says(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda.Event, "elapsed_time", lambda self, end: 30.0)
        tier = tier_of(pool_of([0, 1, 2, 3]))
        tier.carry_out(CopyPlan({0: 1, 1: 2}, {3: 1}))
        assert tier._break_even.copy_s is None
        finish()
        tier.carry_out(CopyPlan({2: 0}, {}))
        assert tier._break_even.copy_s == pytest.approx(0.01), "30 ms for three blocks"
        assert (tier.copied.saved, tier.copied.restored) == (3 * 128, 128)


class TestRanks:
    def test_the_leader_waits_for_no_answer(self, cuda: FakeCuda) -> None:
        """Another rank hears of the copies before it hears of the step that must come behind them."""
        told: list[CopyBlocks] = []

        class Others:
            def question(self) -> int:
                raise AssertionError("nothing is asked")

            def tell(self, message: CopyBlocks, payload: bytes) -> None:
                told.append(message)

        tier = HostMemory(pool_of([0, 1]), 2, BreakEven(4), Others())  # type: ignore[arg-type]
        tier.carry_out(CopyPlan({0: 1}, {}))
        assert told == [CopyBlocks(0, 1, 0)]


def test_a_step_begins_behind_the_copies(cuda: FakeCuda) -> None:
    """Whatever allocates from the engine's pool has the copies started; a step joins them before it runs."""
    pool = pool_of(list(range(6)))
    tier = HostTier(4, BreakEven(4))
    host = HostMemory(pool, 4, tier.break_even)
    happened: list[str] = []
    plain_join, plain_carry = host.join, host.carry_out

    def join() -> None:
        happened.append("join")
        plain_join()

    def carry_out(plan: CopyPlan) -> None:
        happened.append("copies")
        plain_carry(plan)

    host.join, host.carry_out = join, carry_out  # type: ignore[method-assign]

    class Runner(ModelRunner):
        def run(self, batch: ScheduledBatch) -> StepResult:
            happened.append("step")
            return super().run(batch)

    cpu = torch.zeros(6, 2, 2, 2, 4, 3)
    runner = Runner(FakeModel(97), cpu, 4, torch.device("cpu"))
    scheduler = Scheduler(SchedulerLimits(4, 64, 16, 99), BlockPool(6, 4, tier.save), tier)
    engine = Engine(runner, scheduler, frozenset(), 97, host)
    run(engine, Sequence("a", 1, [1, 2, 3], ResolvedSampling(max_tokens=2, temperature=0.0)))
    assert happened == ["copies", "join", "step"] * 2
