"""Each role killed and drained once under requests of all kinds; ``python -m loadtest.lost_streams`` does it
many times."""

from __future__ import annotations

from pathlib import Path

from tests.support.chaos.streams import EVENTS, Plan, run


def test_a_client_notices_a_pause_at_most(tmp_path: Path) -> None:
    report = run(tmp_path, Plan(seed=3, events=len(EVENTS), clients=12, questions=20, longest=120))
    assert not report.violations, "\n".join(report.violations)
    assert sorted(report.events) == sorted(EVENTS)
    assert report.interrupted.total() > 0, "nobody was interrupted: this shows nothing"
    assert report.answers > report.questions
    assert report.resumes["baton_attempts_total"] >= report.answers
