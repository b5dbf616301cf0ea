"""One attack at a time, each on a ring of its own: calm, attack, recovery."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.hostile import ring, verdict
from loadtest.hostile.honest import ENDING_S, Recorded
from loadtest.hostile.ring import HONEST, Attacked, environment
from loadtest.hostile.verdict import Phases, Row, Samples
from loadtest.hostile.vocabulary import Attack, Felt, Found, Trial, Watched
from loadtest.hostile.watch import Watch
from loadtest.trees import HERE
from tests.support.ring import scrape

WARM_S = 1.5
CALM_S = 3.0
BESIDE = 3.0
"""The factor on both times where the machine has other work: honest clients get less done meanwhile."""
RECOVERY_S = 2.5
STREAMS_S = 120.0
"""The time until honest streams must flow, in seconds."""
FLOWING = 200
"""The tokens after which they do."""
_TOKENS = "baton_generated_tokens_total"
LATE_S = 5.0
"""The time beyond an attack's ``max_s`` after which the attacker is killed, in seconds."""


@dataclass(frozen=True)
class Round:
    """An attack, once."""

    found: Found
    watched: Watched
    felt: Felt
    times: Samples
    worked: bool


def run(
    attack: Attack,
    tree: Path,
    tmp: Path,
    calm_s: float = CALM_S,
    *,
    rounds: int = 1,
    beside: bool = False,
) -> Row:
    """Run one attack ``rounds`` times, each on a ring of its own. ``beside``: whether the machine has other
    work. Raises RuntimeError or TimeoutError when a ring does not start."""
    longer = BESIDE if beside else 1.0
    done = []
    for number in range(rounds):
        folder = tmp / str(number)
        folder.mkdir()
        done.append(_once(attack, tree, folder, (longer * WARM_S, longer * calm_s)))
    times, got = Samples(), Counter[str]()
    for each in done:
        times.add(each.times)
        got.update(each.found.got)
    watched = verdict.all_watched([each.watched for each in done])
    felt = verdict.all_felt([each.felt for each in done], times)
    return Row(
        name=attack.name,
        finding=attack.finding,
        aim=attack.aim,
        worked=any(each.worked for each in done),
        broken=verdict.broken(watched, felt, got, loads=attack.loads, beside=beside),
        found=msgspec.structs.replace(done[-1].found, got=dict(got)),
        watched=watched,
        felt=felt,
    )


def _once(attack: Attack, tree: Path, tmp: Path, before_s: tuple[float, float]) -> Round:
    with ring.running(tmp, tree, attack.setup) as attacked:
        record = tmp / "record.json"
        honest = _start("honest", tree, str(record), *HONEST)
        try:
            return _under(attack, tree, attacked, Clients(honest, record), before_s)
        finally:
            honest.kill()
            honest.wait()


@dataclass(frozen=True)
class Clients:
    """The process of the honest clients."""

    process: subprocess.Popen[bytes]
    record: Path

    def begin(self, target: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(target + b"\n")
        self.process.stdin.flush()

    def end(self) -> Recorded:
        """End the clients, and return their record. Raises RuntimeError if they fail."""
        self.process.communicate(b"over\n", timeout=ENDING_S + 30)
        if self.process.returncode:
            raise RuntimeError(f"the honest clients ended with {self.process.returncode}")
        return msgspec.json.decode(self.record.read_bytes(), type=Recorded)


def _under(
    attack: Attack, tree: Path, attacked: Attacked, honest: Clients, before_s: tuple[float, float]
) -> Round:
    warm_s, calm_s = before_s
    target = msgspec.json.encode(attacked.target)
    honest.begin(target)
    _await_streams(attacked)
    time.sleep(warm_s)
    calm = time.monotonic()
    time.sleep(calm_s)
    before = _page(attacked)
    workers = {worker.name: worker.process.pid for worker in attacked.workers}
    with Watch(attacked.router.process.pid, workers, attacked.router.log) as watch:
        began = time.monotonic()
        found = _attack(attack, tree, target)
        time.sleep(RECOVERY_S)
        phases = Phases(calm, began, time.monotonic())
    turns = verdict.max_turns(before, _page(attacked))
    recorded = honest.end()
    felt = verdict.felt(recorded, phases, turns)
    worked = attack.reached(found, watch.seen, felt)
    return Round(found, watch.seen, felt, verdict.samples(recorded, phases), worked)


def _await_streams(attacked: Attacked) -> None:
    """Wait until honest streams flow: on a busy machine that may take long. Raises TimeoutError."""
    until = time.monotonic() + STREAMS_S
    while sum(value for name, value in _page(attacked).items() if name.startswith(_TOKENS)) < FLOWING:
        if time.monotonic() > until:
            raise TimeoutError(f"no {FLOWING} tokens came within {STREAMS_S:g} s")
        time.sleep(0.05)


def _start(module: str, tree: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a process of this harness, which speaks the protocol of the tree under attack."""
    return subprocess.Popen(
        [sys.executable, "-m", f"loadtest.hostile.{module}", *arguments],
        cwd=HERE,
        env=environment(tree),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _attack(attack: Attack, tree: Path, target: bytes) -> Found:
    """Have a process of its own carry out the attack. Raises RuntimeError if it fails."""
    process = _start("attacker", tree, attack.name, str(attack.max_s))
    try:
        said, _ = process.communicate(target, timeout=attack.max_s + LATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return Found(said=f"the attacker was killed after {attack.max_s + LATE_S:g} s")
    if process.returncode:
        raise RuntimeError(f"the attacker of {attack.name} ended with {process.returncode}")
    return msgspec.json.decode(said, type=Found)


def _page(attacked: Attacked) -> Mapping[str, float]:
    """Return the router's metrics; none where it does not answer."""
    with suppress(OSError):
        return scrape(f"http://{attacked.target.http}/metrics")
    return {}


def attempt(trial: Trial, tree: Path, tmp: Path) -> Row:
    """Run a trial, which needs no ring."""
    if trial.needs and shutil.which(trial.needs) is None:
        why = f"{trial.needs} is not installed"
        row = Row(name=trial.name, finding=trial.finding, aim=trial.aim, worked=False, found=Found())
        return msgspec.structs.replace(row, skipped=why)
    found = trial.run(tree, tmp)
    return Row(
        name=trial.name, finding=trial.finding, aim=trial.aim, worked=trial.reached(found), found=found
    )
