"""Each worker of a ring says where its start went, in a line of its log and as a metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.ring import Service, running_ring


@pytest.mark.deep
def test_a_worker_tells_where_its_start_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(warm.ADDRESS)  # a whole start, with its imports
    with running_ring(tmp_path) as ring:
        for worker in ring.workers:
            tells_where_its_start_went(worker)


def tells_where_its_start_went(worker: Service) -> None:
    role = worker.name.partition("-")[0]
    pattern = re.compile(rf'baton_startup_seconds\{{phase="(\w+)",role="{role}"\}}')
    samples = {pattern.fullmatch(name): seconds for name, seconds in worker.metrics().items()}
    phases = {match[1]: seconds for match, seconds in samples.items() if match}
    assert {"import", "config", "kernels", "weights", "pack", "pool", "warm_up", "connector"} < set(phases)
    assert phases["import"] > 0.1  # torch
    lines = re.findall(r"ready at \S+ after ([\d.]+) s \((.*)\)", worker.log.read_text())
    total, told = lines[-1]
    assert sum(phases.values()) == pytest.approx(float(total), abs=0.01)
    for part in told.split(", "):
        name, seconds = part.split()
        assert phases[name] == pytest.approx(float(seconds), abs=0.01)
    assert phases["other"] < 0.3 * float(total) + 0.3
