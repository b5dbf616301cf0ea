"""What the router keeps between decisions."""

from __future__ import annotations

from baton.router.placement import PlacementOptions, WorkerReport
from baton.router.placer import Placer

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
    before = dict(placer._standings)
    assert len({before[one.address].token_s for one in alike}) == 1
    placer.place("r", [1, 2, 3], fast + alike)
    assert all(placer._standings[address] is standing for address, standing in before.items()), "no news"


def test_a_worker_that_is_gone_is_forgotten() -> None:
    placer = Placer(CONDITIONAL)
    placer.place("r", [1, 2, 3], [report("d1"), report("p1")])
    placer.left("d1")
    assert set(placer._standings) == {"p1"}
