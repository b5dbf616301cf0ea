"""Random clusters behind a failing API server: the router's view is right again within 5 s of each change.

    BATON_DISCOVERY_SCRIPTS=500 .venv/bin/python -m pytest tests/property/test_discovery_scripts.py

Clocks run 5 times faster here; ``python -m loadtest.discovery --factor 1`` runs scripts on the real one.
"""

from __future__ import annotations

import os

import pytest

from tests.support.discovery_scripts import Outcome, run_scripts

SCRIPTS = int(os.environ.get("BATON_DISCOVERY_SCRIPTS", "12"))


@pytest.mark.deep
@pytest.mark.timeout(3600)
async def test_no_deleted_pod_is_given_requests_for_longer_than_5_s() -> None:
    seen: list[Outcome] = []
    await run_scripts(range(SCRIPTS), 5.0, 15.0, 6, seen.append)
    assert [line for outcome in seen for line in outcome.wrong] == []
    assert sum(outcome.changes for outcome in seen) > 10 * SCRIPTS, "the scripts changed next to nothing"
