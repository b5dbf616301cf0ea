"""Which workers are kept from requests for a while, and which never are."""

from __future__ import annotations

import random

import pytest

from baton.core.role import Role
from baton.router.fleet.outliers import EjectionRules, Outliers
from baton.router.fleet.step_times import StepTimes
from baton.v1 import worker_pb2 as pb
from baton.v1.inference_pb2 import FINISH_REASON_ERROR

RULES = EjectionRules()


def judge(count: int, role: Role = "decode", **rules: float) -> Outliers:
    outliers = Outliers(EjectionRules(**rules), random.Random(0))  # type: ignore[arg-type]
    outliers.keep({f"w{i}": role for i in range(count)})
    return outliers


def fail(outliers: Outliers, worker: str, now: float, times: int = RULES.failures) -> bool:
    """Whether that ejects it."""
    return [outliers.failed(worker, now) is not None for _ in range(times)].count(True) > 0


def test_failures_in_a_row_eject_and_a_success_between_saves() -> None:
    outliers = judge(3)
    assert not fail(outliers, "w0", 0.0, RULES.failures - 1)
    outliers.succeeded("w0")
    assert not fail(outliers, "w0", 0.0, RULES.failures - 1)
    assert outliers.failed("w0", 0.0) is not None
    assert outliers.ejected("w0", 1.0) and not outliers.ejected("w1", 1.0)


def test_it_comes_back_and_is_sent_away_for_longer_each_time_up_to_a_bound() -> None:
    outliers, now, lasted = judge(3), 0.0, []
    for _ in range(8):
        found = [outliers.failed("w0", now) for _ in range(RULES.failures)]
        [ejection] = filter(None, found)
        lasted.append(ejection.seconds)
        assert outliers.ejected("w0", now + ejection.seconds - 0.01)
        assert outliers.out(now + ejection.seconds - 0.01) == {"w0"}
        now += ejection.seconds
        assert not outliers.ejected("w0", now)
        assert not outliers.out(now)
    for n, seconds in enumerate(lasted):
        longest = min(RULES.max_s, RULES.base_s * 2**n)
        assert 0.8 * longest <= seconds <= longest
    assert len(set(lasted)) == len(lasted), "drawn, so that routers do not act as one"


def test_good_work_is_rewarded() -> None:
    outliers = judge(3)
    assert fail(outliers, "w0", 0.0)
    outliers.sweep(RULES.base_s + RULES.forgiven_after_s + 1)
    later = 1000.0
    [ejection] = filter(None, [outliers.failed("w0", later) for _ in range(RULES.failures)])
    assert ejection.seconds <= RULES.base_s


def test_the_last_of_a_role_is_never_ejected_and_never_more_than_a_part() -> None:
    assert not fail(judge(1), "w0", 0.0)
    pair = judge(2)
    assert fail(pair, "w0", 0.0) and not fail(pair, "w1", 0.0)
    many = judge(12)
    ejected = sum(fail(many, f"w{i}", 0.0) for i in range(12))
    assert ejected == int(RULES.max_of_role * 12)


def test_roles_do_not_share_a_bound() -> None:
    outliers = Outliers(RULES, random.Random(0))
    outliers.keep({"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"})
    assert fail(outliers, "p0", 0.0) and fail(outliers, "d0", 0.0)


def test_one_far_slower_than_its_like_is_ejected() -> None:
    outliers = judge(4)
    for _ in range(RULES.samples):
        for i in range(4):
            outliers.observe(f"w{i}", 0.5 if i == 2 else 0.03 + i / 1000)
    [ejection] = outliers.sweep(1.0)
    assert (ejection.worker, ejection.reason) == ("w2", "latency")
    assert outliers.sweep(2.0) == [], "once"


def step_times(step_s: float, seconds: float = 60.0, *, cancel: bool = False) -> list[float]:
    """What a router sees of a decode worker that writes one answer of its, and others' besides; a load report
    comes every half second."""
    times, found = StepTimes(), []
    steps = [(number * step_s, True) for number in range(1, int(seconds / step_s))]
    reports = [(number * 0.5 + 0.01, False) for number in range(int(seconds / 0.5))]
    for at_s, step in sorted(steps + reports):
        frame = pb.Frame(load=pb.Load(running=2))
        if step:
            frame.deltas.add(request_id="a", token_ids=[1])
        found += times.take(frame, "decode", at_s)
        if cancel:
            times.cancelled("a")
    return found


def test_load_reports_in_the_middle_of_long_steps_do_not_shorten_them() -> None:
    outliers = judge(4)
    for i in range(4):
        for seconds in step_times(2.0 if i == 2 else 0.1):
            outliers.observe(f"w{i}", seconds)
    [ejection] = outliers.sweep(61.0)
    assert (ejection.worker, ejection.told) == ("w2", "2000 ms a step, where 100 ms are usual")


def test_the_time_in_which_a_worker_wrote_nothing_of_ours_is_no_step() -> None:
    assert max(step_times(20.0, cancel=True)) <= 0.5


def test_nor_is_the_time_after_an_answer_that_ended_without_a_token() -> None:
    times, running = StepTimes(), pb.Load(running=1)
    ended = pb.TokenDelta(request_id="a", finish_reason=FINISH_REASON_ERROR, error="no", expired=True)
    frames = [
        (0.0, pb.Frame(load=running, deltas=[pb.TokenDelta(request_id="a", token_ids=[1])])),
        (0.1, pb.Frame(load=running, deltas=[ended])),
        *((number * 0.5, pb.Frame(load=running)) for number in range(1, 21)),
        (10.1, pb.Frame(load=running, deltas=[pb.TokenDelta(request_id="b", token_ids=[1])])),
    ]
    found = [seconds for at_s, frame in frames for seconds in times.take(frame, "decode", at_s)]
    assert found == [pytest.approx(0.1)]


def test_failures_are_no_steps() -> None:
    """Who fails at once is not fast."""
    failed = pb.TokenDelta(request_id="a", finish_reason=FINISH_REASON_ERROR, error="no")
    times = StepTimes()
    times.submitted("a", 256, 0.0)
    assert times.take(pb.Frame(deltas=[failed]), "prefill", 0.001) == []
    running = pb.Load(running=1)
    step = pb.Frame(load=running, deltas=[pb.TokenDelta(request_id="b", token_ids=[1])])
    frames = [(0.0, step), (0.4, pb.Frame(load=running, deltas=[failed])), (1.0, step)]
    assert [seconds for at_s, frame in frames for seconds in times.take(frame, "decode", at_s)] == [1.0]


def test_noise_few_samples_and_few_workers_eject_nobody() -> None:
    for count, samples, slow in (
        (4, RULES.samples, 0.015),
        (4, RULES.samples - 1, 0.5),
        (2, RULES.samples, 0.5),
    ):
        outliers = judge(count)
        for _ in range(samples):
            for i in range(count):
                outliers.observe(f"w{i}", slow if i == 0 else 0.002)
        assert outliers.sweep(1.0) == [], (count, samples, slow)


def test_all_slow_alike_are_usual() -> None:
    outliers = judge(6)
    for _ in range(RULES.samples):
        for i in range(6):
            outliers.observe(f"w{i}", 2.0)
    assert outliers.sweep(1.0) == []


def test_workers_that_left_are_forgotten() -> None:
    outliers = judge(3)
    assert fail(outliers, "w0", 0.0)
    outliers.keep({"w1": "decode"})
    outliers.keep({"w0": "decode", "w1": "decode"})
    assert not outliers.ejected("w0", 1.0)
    assert outliers.failed("stranger", 0.0) is None
