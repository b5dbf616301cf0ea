"""Who goes first: arrival under FCFS, arrival and priority under aging, with the bound that
docs/scheduling.md states. The clock is the test's own: a step takes a second."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine.kv.block_pool import BlockPool
from baton.engine.scheduler import Scheduler, SchedulerLimits
from baton.engine.sequence import FinishReason, Fork, Sequence, SequenceStatus

BLOCK_SIZE = 4
AGING = 10.0


def scheduler(aging: float | None, *, seats: int = 1, num_blocks: int = 64) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=seats,
        max_num_batched_tokens=64,
        prefill_chunk=64,
        max_model_len=200,
        prefix_caching=False,
        priority_aging=aging,
    )
    return Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE))


def request(name: str, *, priority: int = 0, at: float = 0.0, prompt: int = 4, outputs: int = 2) -> Sequence:
    params = ResolvedSampling(max_tokens=outputs)
    return Sequence(name, 1, list(range(prompt)), params, priority=Priority(priority, at))


def arrived(s: Scheduler, seq: Sequence) -> Sequence:
    """``seq`` with its first output and its blocks, as a handoff brings it."""
    blocks = s.pool.allocate(-(-seq.num_tokens // BLOCK_SIZE))
    assert blocks is not None
    seq.bind(blocks)
    seq.append(7)
    s.admit_computed(seq)
    return seq


@dataclass
class Run:
    """A scheduler and its clock; who began and who ended, in order, and when."""

    scheduler: Scheduler
    now: float = 0.0
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    def step(self) -> None:
        for seq, num_new, *_ in self.scheduler.schedule().items:
            self.began.setdefault(seq.request_id, self.now)
            self.scheduler.advance(seq, num_new)
            if seq.num_uncomputed == 0:
                seq.append(9)
            if seq.num_tokens >= seq.max_len:
                self.scheduler.finish(seq, FinishReason.LENGTH)
                self.ended[seq.request_id] = self.now + 1
        self.now += 1

    def until_idle(self) -> None:
        while self.scheduler.has_work:
            self.step()


def test_fcfs_keeps_the_order_of_arrival_whatever_the_clocks_say() -> None:
    run = Run(scheduler(None))
    for number, at in enumerate((5.0, 1.0, 3.0)):
        run.scheduler.add(request(f"r{number}", at=at))
    run.until_idle()
    assert list(run.began) == list(run.ended) == ["r0", "r1", "r2"]


def test_fcfs_refuses_priorities() -> None:
    s = scheduler(None)
    with pytest.raises(ValueError, match="request r: priority is -3; allowed: 0, as this worker"):
        s.add(request("r", priority=-3))
    assert not s.has_work


def test_lower_goes_first_and_equals_by_arrival() -> None:
    run = Run(scheduler(AGING))
    for name, priority in (("d", 1), ("b", 0), ("a", -1), ("c", 0)):
        run.scheduler.add(request(name, priority=priority))
    run.until_idle()
    assert list(run.began) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("later", "first"), [(AGING - 1, "urgent"), (AGING, "patient"), (AGING + 1, "patient")]
)
def test_a_level_is_worth_so_many_seconds_of_waiting(later: float, first: str) -> None:
    run = Run(scheduler(AGING))
    run.scheduler.add(request("patient", priority=1, at=0))
    run.scheduler.add(request("urgent", priority=0, at=later))
    run.until_idle()
    assert next(iter(run.began)) == first


@pytest.mark.parametrize(("priority", "each"), [(3, 2), (2, 3), (6, 1)])
def test_nobody_starves_behind_a_stream_of_urgent_requests(priority: int, each: int) -> None:
    """A long request of priority p behind an endless stream of short ones of priority 0, of which ``each``
    come in the time that one takes. Only those that come within D = p * AGING go before it."""
    run = Run(scheduler(AGING))
    run.scheduler.add(request("long", priority=priority, outputs=30))
    bound = priority * AGING
    number = 0
    while "long" not in run.ended:
        assert run.now < 2000
        for _ in range(each if run.now % 2 == 0 else 0):
            number += 1
            run.scheduler.add(request(f"short{number}@{run.now:g}", at=run.now))
        run.step()
    overtook = [name for name in run.ended if name != "long" and run.ended[name] < run.ended["long"]]
    assert all(float(name.partition("@")[2]) < bound for name in overtook)
    # The bound of the docs: D, and the work of those that came within it: two steps each.
    work = 2 * each * bound / 2
    assert run.began["long"] <= max(bound, work) + 2
    assert run.ended["long"] - run.began["long"] == 30  # and then nobody interrupts it
    assert overtook


def test_without_aging_the_same_stream_is_first_come_first_served() -> None:
    run = Run(scheduler(0.0))
    run.scheduler.add(request("patient", priority=9))
    run.scheduler.add(request("urgent", priority=-9, at=1))
    run.until_idle()
    assert list(run.began) == ["patient", "urgent"]


def test_forks_come_right_behind_their_parent() -> None:
    s = scheduler(AGING)
    params = ResolvedSampling(max_tokens=2)
    parent = Sequence(
        "a", 1, [1], params, forks=(Fork("b", params), Fork("c", params)), priority=Priority(2, 3.0)
    )
    earlier, later = request("earlier", priority=2, at=3.0), request("later", priority=2, at=3.0)
    urgent = request("urgent", priority=1, at=3.0)
    for seq in (earlier, parent, later, urgent):
        s.add(seq)
    forks = [parent.fork(number) for number in range(2)]
    everybody = sorted([*forks, later, urgent, parent, earlier], key=lambda seq: seq.place)
    assert [seq.request_id for seq in everybody] == ["urgent", "earlier", "a", "b", "c", "later"]
    assert all(fork.priority == parent.priority for fork in forks)


def test_the_last_in_order_is_preempted() -> None:
    s = scheduler(AGING, seats=3, num_blocks=7)
    patient, urgent = request("patient", priority=5, outputs=50), request("urgent", priority=-5, outputs=50)
    run = Run(s)
    s.add(patient)
    run.step()
    s.add(urgent)
    while not s.counters.preemptions:
        run.step()
    assert (patient.status, patient.preemptions, urgent.preemptions) == (SequenceStatus.WAITING, 1, 0)


def test_a_handoff_that_is_more_urgent_takes_a_seat_and_no_blocks() -> None:
    s = scheduler(AGING)
    patient = request("patient", priority=5, outputs=50)
    run = Run(s)
    s.add(patient)
    run.step()
    blocks = list(patient.block_ids)
    urgent = arrived(s, request("urgent", priority=-5, outputs=3))
    run.step()
    assert (s.running, s.joining) == ([urgent], [patient])
    assert list(patient.block_ids) == blocks
    run.until_idle()
    assert list(run.ended) == ["urgent", "patient"]
    assert s.counters.preemptions == 0


def test_a_handoff_in_want_of_a_seat_and_one_in_want_of_blocks_do_not_wait_for_each_other() -> None:
    s = scheduler(AGING, num_blocks=5)
    patient = request("patient", priority=5, prompt=8, outputs=12)
    run = Run(s)
    s.add(patient)
    run.step()
    arrived(s, request("urgent", priority=-5, prompt=11, outputs=8))
    assert s.pool.num_allocatable == 0
    run.until_idle()
    assert list(run.ended) == ["urgent", "patient"]


def test_room_is_promised_before_those_whose_turn_is_later() -> None:
    s = scheduler(AGING)
    s.add(request("running"))
    s.schedule()
    s.add(request("waiting", priority=1, at=0))
    assert not s.reserve(1, s.turn_of(request("less urgent", priority=1, at=1)))
    assert s.reserve(1, s.turn_of(request("more urgent", priority=0, at=1)))
