"""Attacks of `loadtest.hostile`, end to end, on rings of real processes: few and quick. Latencies are for a
machine left alone and not looked at here."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.hostile import campaign
from loadtest.hostile.catalogue import ATTACKS
from loadtest.hostile.probing import CHECKS, REQUESTS
from loadtest.hostile.trials import TRIALS
from loadtest.hostile.verdict import Row
from loadtest.hostile.work import CHATS
from loadtest.trees import HERE

pytestmark = pytest.mark.deep


def run(name: str, tmp: Path) -> Row:
    row = campaign.run(ATTACKS[name], HERE, tmp, calm_s=1.5)
    assert row.watched is not None and row.felt is not None
    assert row.watched.rss_before > 20 and row.watched.rss_peak >= row.watched.rss_before
    assert row.felt.requests >= 10 and not row.felt.failed, row.felt
    assert row.felt.itl_calm > 0.01 and row.felt.ttft_calm > 0
    assert not row.watched.ended
    return row


def test_strangers_at_the_data_port_hurt_nobody(tmp_path: Path) -> None:
    row = run("data-port", tmp_path)
    assert not row.worked
    assert row.found.got == {"still open": 0, "closed": 200}


def test_a_key_that_looks_like_a_path_is_a_bad_request(tmp_path: Path) -> None:
    row = run("key-500", tmp_path)
    assert row.found.got == {"400": 2} and not row.worked


def test_a_template_that_loops_stops_no_other_tenant(tmp_path: Path) -> None:
    row = run("template-loop", tmp_path)
    assert row.found.got["chat: 200"] == 2 * CHATS and not row.found.figure("failed")


def test_strangers_deny_nobody_a_health_check(tmp_path: Path) -> None:
    row = run("health-watch", tmp_path)
    assert row.found.got == {"checked": 2 * CHECKS}


def test_strangers_do_not_choose_how_long_the_audit_log_is(tmp_path: Path) -> None:
    row = run("audit-lines", tmp_path)
    assert row.found.got == {"401": REQUESTS} and not row.worked


def test_a_worker_starts_on_ipv6(tmp_path: Path) -> None:
    row = campaign.attempt(TRIALS["ipv6"], HERE, tmp_path)
    assert not row.worked, row.found.said
