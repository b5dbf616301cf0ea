"""Five times what the ring can answer, on simulated time: its goodput stays, in fair shares."""

from __future__ import annotations

import pytest

from baton.router.admission.queue import QueueBounds
from tests.support.overload import Load, Simulation

SECONDS = 120.0
WARM_UP_S = 20.0


def goodput(factor: float, patience_s: float | None, seed: int = 1) -> tuple[float, Simulation]:
    """Answers in time, per second, under so many times what the ring can answer."""
    at_capacity = Simulation({"t": Load(1.0)}).capacity_per_second(Load(1.0))
    simulation = Simulation({"t": Load(factor * at_capacity, patience_s=patience_s)}, seed=seed)
    simulation.run(SECONDS, WARM_UP_S)
    return simulation.accounts["t"].in_time / (SECONDS - WARM_UP_S), simulation


@pytest.mark.parametrize("patience_s", [None, 8.0])
def test_goodput_stays_at_five_times_capacity(patience_s: float | None) -> None:
    found = {factor: goodput(factor, patience_s) for factor in (0.5, 0.8, 1.0, 1.3, 2.0, 5.0)}
    peak = max(rate for rate, _ in found.values())
    rate, simulation = found[5.0]
    assert rate >= 0.9 * peak, {factor: round(rate, 2) for factor, (rate, _) in found.items()}
    account = simulation.accounts["t"]
    assert sum(account.refused.values()) > 0.7 * account.asked, "the rest is refused at once"
    # Answers have random lengths: some take longer than any estimate could have said.
    max_late = 0.02 if patience_s is None else 0.15
    assert account.late < max_late * account.answered, "little is begun, or waits, for nothing"


def test_a_ring_that_is_not_full_refuses_nobody() -> None:
    _, simulation = goodput(0.8, None)
    account = simulation.accounts["t"]
    assert not account.refused
    assert sum(account.waits) / len(account.waits) < 0.5


@pytest.mark.deep
@pytest.mark.parametrize(
    "loads",
    [
        {"a": Load(20), "b": Load(20)},
        {"a": Load(20, weight=3), "b": Load(20), "c": Load(20, weight=2)},
        {"a": Load(60), "b": Load(12, mean_outputs=300, mean_prompt=50)},
        {"many": Load(200), "few": Load(8)},
    ],
    ids=["equals", "weights", "long and short", "a flood"],
)
def test_tenants_get_their_shares_of_tokens(loads: dict[str, Load]) -> None:
    simulation = Simulation(loads, seed=3)
    simulation.run(400.0, 50.0)
    total = sum(account.tokens for account in simulation.accounts.values())
    weights = sum(load.weight for load in loads.values())
    for name, load in loads.items():
        share, due = simulation.accounts[name].tokens / total, load.weight / weights
        assert abs(share - due) <= 0.1 * due, {n: a.tokens / total for n, a in simulation.accounts.items()}


def test_what_one_tenant_leaves_goes_to_the_others() -> None:
    loads = {"busy": Load(40.0), "quiet": Load(1.0)}
    simulation = Simulation(loads, seed=5)
    simulation.run(200.0, 20.0)
    quiet, busy = simulation.accounts["quiet"], simulation.accounts["busy"]
    assert not quiet.refused and not quiet.late, "it asks for less than its share"
    assert sum(quiet.waits) / len(quiet.waits) < 1.0
    assert busy.in_time / 180 > 0.8 * (simulation.capacity_per_second(loads["busy"]) - 1)
    assert "tenant" in busy.refused, "it hears that it asks for more than its share"


def test_the_queue_is_bounded_and_leaves_room_for_others() -> None:
    bounds = QueueBounds(requests=50, prompt_tokens=1_000_000, max_wait_s=1e6)
    simulation = Simulation({"flood": Load(500.0)}, bounds=bounds)
    simulation.run(20.0)
    assert 35 <= simulation.max_waiting <= 45, "4/5 of the queue"
    alone = Simulation(
        {"flood": Load(500.0)},
        bounds=QueueBounds(requests=50, prompt_tokens=10**6, max_wait_s=1e6, shared=False),
    )
    alone.run(20.0)
    assert alone.max_waiting == 50
    assert set(alone.accounts["flood"].refused) == {"overall"}
