"""A new revision is rolled out under load, prefill first; ``python -m loadtest.rollout`` does more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rollout.run import Plan, carried_out, total

pytestmark = [pytest.mark.beside, pytest.mark.deep]


async def test_no_request_fails_and_no_kv_crosses_while_prefill_and_decode_are_rolled_out(
    tmp_path: Path,
) -> None:
    plan = Plan(
        scenarios=("prefill, then decode",),
        replicas=1,
        routers=1,
        clients=6,
        longest=48,
        step_ms=10,
        calm_s=0.3,
        pre_stop_s=0,
        hurry=25,
        lag_s=(0.05, 0.2),
        sync_s=0.1,
    )
    report = await carried_out(tmp_path, plan)
    assert report.violations == []
    assert report.pods == 4
    assert report.handoffs.pairs.keys() == {("r0", "r0"), ("r1", "r1")}
    assert total(report.stages).answers > 20
