"""Admission under any order of comings and goings: bounds hold, nobody starves, shares are fair."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.router.admission.capacity import Capacity
from baton.router.admission.queue import FairQueue, QueueBounds, QueuedRequest, QueueEntry, RefusedError

BOUNDS = QueueBounds(requests=12, prompt_tokens=500, max_wait_s=5.0)
SEATS = 4
TOKENS = 1000


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(BOUNDS)
        self.now = 0.0
        self.capacity = Capacity(SEATS, TOKENS)
        self.waiting: list[QueueEntry] = []
        self.open: list[QueueEntry] = []

    def admit(self) -> None:
        for entry in self.queue.admit(self.capacity, self.now):
            self.waiting.remove(entry)
            self.open.append(entry)

    @rule(
        tenant=st.sampled_from("abc"),
        prompt=st.integers(1, 200),
        most=st.integers(1, 400),
        answers=st.integers(1, 6),
        priority=st.integers(-2, 2),
        deadline=st.none() | st.floats(0.1, 20.0),
    )
    def come(
        self, tenant: str, prompt: int, most: int, answers: int, priority: int, deadline: float | None
    ) -> None:
        asked = QueuedRequest(
            tenant=tenant,
            weight={"a": 1.0, "b": 2.0, "c": 0.5}[tenant],
            answers=answers,
            prompt_tokens=prompt,
            max_outputs=most,
            turn=self.now + priority,
            deadline=None if deadline is None else self.now + deadline,
        )
        try:
            self.waiting.append(self.queue.offer(asked, self.now))
        except RefusedError as error:
            assert self.waiting, "refused while nobody waits"
            assert error.blame in ("tenant", "overall") and error.retry_after_s >= 0
        self.admit()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outputs=st.integers(0, 500), completed=st.booleans())
    def end(self, data: st.DataObject, outputs: int, completed: bool) -> None:
        entry = data.draw(st.sampled_from(self.open))
        self.open.remove(entry)
        self.queue.end(entry, outputs, completed, self.now)
        self.admit()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entry)
        self.queue.give_up(entry, self.now)
        self.admit()

    @rule(seconds=st.floats(0.001, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_true(self) -> None:
        queue = self.queue
        assert queue.waiting == len(self.waiting)
        assert queue.waiting_prompt_tokens == sum(e.asked.prompt_tokens for e in self.waiting)
        assert queue.waiting_tokens == sum(e.tokens for e in self.waiting)
        assert queue.open_requests == len(self.open)
        assert queue.open_answers == sum(e.asked.answers for e in self.open)
        assert queue.open_tokens == sum(e.tokens for e in self.open)

    @invariant()
    def bounds_hold(self) -> None:
        # One more may wait than the bounds say: the first, which nobody was before.
        assert len(self.waiting) <= BOUNDS.requests
        # Those of one request may be more than there are seats: the rest of them waits on the workers.
        answers = [e.asked.answers for e in self.open]
        assert sum(answers) - max(answers, default=0) <= SEATS
        assert len(self.open) <= 1 or sum(e.tokens for e in self.open) <= TOKENS

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert self.open or not self.waiting

    def teardown(self) -> None:
        """Whoever waits gets its turn, if only others end."""
        for _ in range(len(self.waiting) + len(self.open)):
            if self.open:
                self.queue.end(self.open.pop(0), 1, True, self.now)
                self.admit()
        assert not self.waiting and not self.open
        assert not self.queue._tenants and not self.queue._gone


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.deep
@given(
    weights=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=5),
    means=st.lists(st.integers(5, 400), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_tenants_that_always_want_more_share_by_weight(
    weights: list[float], means: list[int], seed: int
) -> None:
    """The theorem of start-time fair queueing, for several servers and lengths that are known at the end: of
    what two tenants have used over their weights neither is ahead by more than all seats' longest requests.
    When one is let in, what it had used is no more than what the other had and has open."""
    rng = random.Random(seed)
    queue = FairQueue(QueueBounds(requests=10**6, prompt_tokens=10**9, max_wait_s=1e9))
    used = [0.0] * len(weights)
    now = 0.0
    open_: list[QueueEntry] = []

    def offer(tenant: int) -> None:
        asked = QueuedRequest(
            tenant=str(tenant),
            weight=weights[tenant],
            prompt_tokens=rng.randint(1, 2 * means[tenant]),
            max_outputs=400,
        )
        queue.offer(asked, now)

    for tenant in range(len(weights)):
        for _ in range(8):
            offer(tenant)
    capacity = Capacity(seats := 8)
    for _ in range(6000):
        now += 0.01
        for entry in queue.admit(capacity, now):
            open_.append(entry)
            offer(int(entry.asked.tenant))
        entry = open_.pop(rng.randrange(len(open_)))
        outputs = min(400, round(rng.expovariate(1 / means[int(entry.asked.tenant)])))
        queue.end(entry, outputs, True, now)
        used[int(entry.asked.tenant)] += entry.asked.prompt_tokens + outputs
    share = [tokens / weight for tokens, weight in zip(used, weights, strict=True)]
    longest = [(2 * mean + 400) / weight for mean, weight in zip(means, weights, strict=False)]
    for one, other in itertools.permutations(range(len(weights)), 2):
        assert share[one] - share[other] <= seats * max(longest[one], longest[other])


def test_a_request_of_many_answers_does_not_wait_until_the_ring_is_empty() -> None:
    queue = FairQueue(BOUNDS)
    for _ in range(4):
        queue.offer(QueuedRequest(tenant="a", prompt_tokens=1, max_outputs=1), 0.0)
    running = queue.admit(Capacity(8), 0.0)
    queue.offer(QueuedRequest(tenant="b", prompt_tokens=1, max_outputs=100, answers=50), 0.0)
    queue.offer(QueuedRequest(tenant="c", prompt_tokens=1, max_outputs=1), 0.0)
    [many] = queue.admit(Capacity(8), 0.0)
    assert len(running) == 4 and many.asked.answers == 50
    assert not queue.admit(Capacity(8), 0.0), "nobody else while its answers wait for seats"
    queue.end(many, 100, True, 1.0)
    assert [entry.asked.tenant for entry in queue.admit(Capacity(8), 1.0)] == ["c"]


def test_those_who_gave_up_are_nobodys_wait() -> None:
    queue = FairQueue(QueueBounds(requests=500, prompt_tokens=10**6, max_wait_s=100.0))
    first = queue.offer(QueuedRequest(tenant="a", prompt_tokens=10, max_outputs=10), 0.0)
    queue.admit(Capacity(1), 0.0)
    queue.end(first, 10, True, 1.0)
    waiting = [
        queue.offer(QueuedRequest(tenant="a", prompt_tokens=10, max_outputs=10), 1.0) for _ in range(61)
    ]
    queue.admit(Capacity(1), 1.0)
    newest = QueuedRequest(tenant="a", prompt_tokens=10, max_outputs=10)
    before = queue.wait_s(queue.check(newest, 1.0))
    for entry in waiting[31:]:
        queue.give_up(entry, 1.0)
    after = queue.wait_s(queue.check(newest, 1.0))
    assert before is not None and after is not None
    assert after == pytest.approx(before / 2, rel=0.05)


def test_within_a_tenant_the_least_turn_goes_first_and_others_are_not_delayed_by_it() -> None:
    queue = FairQueue(BOUNDS)
    for tenant, turns in (("a", (3.0, 1.0, 2.0)), ("b", (9.0,))):
        for turn in turns:
            queue.offer(QueuedRequest(tenant=tenant, prompt_tokens=10, max_outputs=10, turn=turn), 0.0)
    order = []
    while queue.waiting:
        [entry] = queue.admit(Capacity(1), 0.0)
        order.append((entry.asked.tenant, entry.asked.turn))
        queue.end(entry, 10, True, 0.0)
    assert order == [("a", 1.0), ("b", 9.0), ("a", 2.0), ("a", 3.0)]


def test_an_early_deadline_is_refused_once_it_is_known_how_long_others_take() -> None:
    queue = FairQueue(QueueBounds(requests=100, prompt_tokens=10**6, max_wait_s=100.0))
    first = queue.offer(QueuedRequest(tenant="a", prompt_tokens=10, max_outputs=10), 0.0)
    queue.admit(Capacity(1), 0.0)
    queue.end(first, 10, True, 4.0)
    for _ in range(3):
        queue.offer(QueuedRequest(tenant="a", prompt_tokens=10, max_outputs=10), 4.0)
        queue.admit(Capacity(1), 4.0)
    with pytest.raises(RefusedError) as refused:
        queue.offer(QueuedRequest(tenant="b", prompt_tokens=10, max_outputs=10, deadline=7.0), 4.0)
    assert refused.value.retry_after_s > 0
    queue.offer(QueuedRequest(tenant="b", prompt_tokens=10, max_outputs=10, deadline=60.0), 4.0)


def test_long_prompts_and_parallel_answers_take_no_longer_for_each_of_their_tokens() -> None:
    queue, now = FairQueue(QueueBounds(requests=100, prompt_tokens=10**6, max_wait_s=100.0)), 0.0

    def chat() -> QueuedRequest:
        return QueuedRequest(tenant="a", prompt_tokens=200, max_outputs=4096, turn=now)

    def answer(asked: QueuedRequest, outputs: int, seconds: float) -> None:
        nonlocal now
        entry = queue.offer(asked, now)
        assert queue.admit(Capacity(1), now) == [entry]
        now += seconds
        queue.end(entry, outputs, True, now)

    long_prompt = QueuedRequest(tenant="b", prompt_tokens=8000, max_outputs=128)
    for _ in range(50):
        answer(chat(), 200, 4.0)
        answer(
            QueuedRequest(tenant="b", prompt_tokens=3000, max_outputs=1), 1, 0.5
        )  # of such an answer a token says little
    for _ in range(4):
        queue.offer(chat(), now)
        queue.admit(Capacity(2), now)
    parallel = QueuedRequest(tenant="b", prompt_tokens=200, answers=8, max_outputs=8 * 4096)
    for asked in (long_prompt, parallel, chat()):
        wait = queue.wait_s(queue.check(asked, now))
        assert wait is not None and 0 < wait < 5
        queue.check(replace(asked, deadline=now + 20), now)
    with pytest.raises(RefusedError, match="deadline"):
        queue.check(replace(chat(), deadline=now + 4), now)


def test_who_is_refused_hears_what_wait_would_be_begun_and_when_to_come_back() -> None:
    queue = FairQueue(QueueBounds(requests=500, prompt_tokens=10**6, max_wait_s=100.0))
    first = queue.offer(QueuedRequest(tenant="a", prompt_tokens=10, max_outputs=10), 0.0)
    queue.admit(Capacity(1), 0.0)
    queue.end(first, 10, True, 1.0)
    with pytest.raises(RefusedError) as refused:
        for _ in range(200):
            queue.offer(QueuedRequest(tenant="a", prompt_tokens=10, max_outputs=10), 1.0)
            queue.admit(Capacity(1), 1.0)
    told = re.fullmatch(
        r"it would wait for (\S+) s; no wait is begun that should take over 70\.0 s", refused.value.reason
    )
    assert told is not None
    assert float(told[1]) > 70.0
    assert refused.value.retry_after_s == pytest.approx(float(told[1]) - 70.0, abs=0.1)
