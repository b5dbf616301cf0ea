"""A few rounds of chaos over every connector at once; ``python -m loadtest.chaos`` does many over each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.chaos import connections
from tests.support.chaos.campaign import SHARES, Plan, run
from tests.support.chaos.catalogue import record
from tests.support.nixl import needs_nixl

pytestmark = pytest.mark.deep

UCXX = importlib.util.find_spec("ucxx") is not None


# ``auto`` offers NIXL only where there is RDMA, so that it has a ring of its own.
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("tcp", "ucx", "gloo") if UCXX else ("tcp", "gloo"), id="all"),
        pytest.param(("nixl",), id="nixl", marks=needs_nixl),
    ],
)
def test_whatever_is_done_no_answer_is_wrong_and_nothing_is_kept(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    uncut = connections.why_not()
    # A worker's start is what costs time here: one is killed.
    faults = {name: share for name, share in SHARES.items() if uncut is None or name != "cut"} | {"kill": 0}
    plan = Plan(kind="+".join(kinds), seed=1, rounds=10, clients=8, faults=faults, pace=uncut is None)
    report = run(tmp_path / "ring", record(tmp_path, plan.seed), plan)
    assert not report.violations, "\n".join(map(str, report.violations))
    assert sum(report.faults.values()) == plan.rounds
    assert report.completed > 0
    if uncut is not None:
        pytest.skip(f"connections were NOT CUT, everything else was done: {uncut}")
    if kinds == ("tcp", "gloo"):
        pytest.skip("tcp and gloo were tested, ucx was NOT: ucxx is not installed (pip install 'baton[ucx]')")
