"""What the router keeps between decisions."""

from __future__ import annotations

import random

from baton.router.placement import Estimate, PlacementOptions, WorkerReport
from baton.router.placement.estimate import Estimates
from baton.router.placement.placer import Placer

CONDITIONAL = PlacementOptions()


def report(address: str, **known: float) -> WorkerReport:
    role = {"p": "prefill", "d": "decode"}[address[0]]
    return WorkerReport(address, role, 0, 0, **known)  # type: ignore[arg-type]


def test_a_worker_that_has_measured_nothing_is_as_fast_as_others_are() -> None:
    placer = Placer(CONDITIONAL)
    slow = report("p1", prefill_tokens_per_s=100.0)
    decision = placer.place("r", list(range(1000)), [slow, report("d1")])
    assert decision is not None
    [at_decode] = [one for one in decision.considered if one.prefill is None]
    assert at_decode.compute_s == 10.0, "and not what is taken for granted before anybody has measured"
    for _ in range(100):
        decision = placer.place("r", list(range(1000)), [slow._replace(prefill_tokens_per_s=200.0)])
    decision = placer.place("r", list(range(1000)), [report("d2")])
    assert decision is not None
    assert 5.0 <= decision.chosen.compute_s < 5.5 + 0.05, "what is usual follows, to a tenth"


def test_all_that_are_compared_are_compared_with_the_same() -> None:
    placer = Placer(CONDITIONAL)
    fast = [report(f"p{i}", prefill_tokens_per_s=8000.0) for i in range(8)]
    alike = [report(f"d{i}", prefill_tokens_per_s=3000.0) for i in range(16)]
    placer.place("r", [1, 2, 3], fast + alike)
    before = dict(placer._estimates._known)
    assert len({before[one.address].token_s for one in alike}) == 1
    placer.place("r", [1, 2, 3], fast + alike)
    assert all(placer._estimates._known[address] is standing for address, standing in before.items()), (
        "no news"
    )


def test_a_worker_that_is_gone_is_forgotten() -> None:
    placer = Placer(CONDITIONAL)
    placer.place("r", [1, 2, 3], [report("d1"), report("p1")])
    placer.left("d1")
    assert set(placer._estimates._known) == {"p1"}


def test_standings_follow_whoever_is_at_which_place() -> None:
    draw = random.Random(7)
    estimates = Estimates(CONDITIONAL)
    workers = [report(f"{role}{i}", prefill_tokens_per_s=3000.0) for role in "pd" for i in range(6)]
    for _ in range(300):
        match draw.randrange(5):
            case 0:
                at = draw.randrange(len(workers))
                workers[at] = workers[at]._replace(sequences=draw.randrange(9))
            case 1:
                workers = draw.sample(workers, len(workers))
            case 2:
                at = draw.randrange(len(workers))
                workers[at] = report(f"d{draw.randrange(99, 999)}", step_base_s=draw.choice([0.01, 0.1]))
            case 3:
                estimates.forget(draw.choice(workers).address)
        shown = draw.sample(workers, draw.randrange(1, 12)) if draw.random() < 0.3 else list(workers)
        found = estimates.of(shown)
        assert [each.report for each in found] == shown
        fresh = [Estimate.of(each, CONDITIONAL, estimates._usual) for each in shown]
        assert [(each.token_s, each.itl_s) for each in found] == [
            (each.token_s, each.itl_s) for each in fresh
        ]
