"""One attack at a time, each on a ring of its own: calm, attack, recovery."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.hostile import ring, verdict
from loadtest.hostile.honest import ENDING_S, Recorded
from loadtest.hostile.ring import HONEST, Attacked, environment
from loadtest.hostile.verdict import Phases, Row
from loadtest.hostile.vocabulary import Attack, Found, Trial
from loadtest.hostile.watch import Watch
from loadtest.trees import HERE
from tests.support.ring import scrape

Said = TypeVar("Said", Recorded, Found)

WARM_S = 1.5
CALM_S = 3.0
RECOVERY_S = 2.5
LATE_S = 5.0
"""An attacker that does not end by itself is killed."""


def run(attack: Attack, tree: Path, tmp: Path, calm_s: float = CALM_S) -> Row:
    """Raises RuntimeError or TimeoutError when the ring does not start."""
    with ring.running(tmp, tree, attack.setup) as attacked:
        honest = _start("honest", tree, *HONEST)
        try:
            return _under(attack, tree, attacked, honest, calm_s)
        finally:
            honest.kill()
            honest.wait()


def _under(
    attack: Attack, tree: Path, attacked: Attacked, honest: subprocess.Popen[bytes], calm_s: float
) -> Row:
    target = msgspec.json.encode(attacked.target)
    assert honest.stdin is not None
    honest.stdin.write(target + b"\n")
    honest.stdin.flush()
    time.sleep(WARM_S)
    calm = time.monotonic()
    time.sleep(calm_s)
    before = _page(attacked)
    workers = {worker.name: worker.process.pid for worker in attacked.workers}
    with Watch(attacked.router.process.pid, workers, attacked.router.log) as watch:
        began = time.monotonic()
        found = _attack(attack, tree, target)
        time.sleep(RECOVERY_S)
        phases = Phases(calm, began, time.monotonic())
    turn = verdict.longest_turn(before, _page(attacked))
    felt = verdict.felt(_record(honest), phases, turn)
    return Row(
        name=attack.name,
        finding=attack.finding,
        aim=attack.aim,
        worked=attack.reached(found, watch.seen, felt),
        broken=verdict.broken(watch.seen, felt),
        found=found,
        watched=watch.seen,
        felt=felt,
    )


def _start(module: str, tree: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A process of this harness, which speaks the protocol of the tree under attack."""
    return subprocess.Popen(
        [sys.executable, "-m", f"loadtest.hostile.{module}", *arguments],
        cwd=HERE,
        env=environment(tree),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _attack(attack: Attack, tree: Path, target: bytes) -> Found:
    """Carried out by a process of its own. RuntimeError if that does not end as it should."""
    process = _start("attacker", tree, attack.name, str(attack.most_s))
    try:
        said, _ = process.communicate(target, timeout=attack.most_s + LATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return Found(said=f"the attacker was killed after {attack.most_s + LATE_S:g} s")
    return _decoded(said, Found, process, "attacker")


def _record(honest: subprocess.Popen[bytes]) -> Recorded:
    said, _ = honest.communicate(b"over\n", timeout=ENDING_S + 30)
    return _decoded(said, Recorded, honest, "honest clients")


def _decoded(said: bytes, what: type[Said], process: subprocess.Popen[bytes], who: str) -> Said:
    """What a process of this harness has said at its end. RuntimeError if that is not what it should be."""
    try:
        return msgspec.json.decode(said, type=what)
    except msgspec.DecodeError as error:
        told = f"the {who} ended with {process.returncode} after {len(said)} bytes: {error}"
        raise RuntimeError(told) from error


def _page(attacked: Attacked) -> Mapping[str, float]:
    """The router's metrics; none where it does not answer."""
    with suppress(OSError):
        return scrape(f"http://{attacked.target.http}/metrics")
    return {}


def attempt(trial: Trial, tree: Path, tmp: Path) -> Row:
    """What needs no ring."""
    if trial.needs and shutil.which(trial.needs) is None:
        why = f"{trial.needs} is not installed"
        row = Row(name=trial.name, finding=trial.finding, aim=trial.aim, worked=False, found=Found())
        return msgspec.structs.replace(row, skipped=why)
    found = trial.run(tree, tmp)
    return Row(
        name=trial.name, finding=trial.finding, aim=trial.aim, worked=trial.reached(found), found=found
    )
