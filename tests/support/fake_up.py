"""``baton up`` with fake services: fake_up.py PORT WORKER_ACTION... runs one worker and one router."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from baton.cli.child import ChildSpec
from baton.cli.client import Question
from baton.cli.ring import RingPlan
from baton.cli.up import UpOptions, up
from baton.process.options import UserError
from baton.router.config import RouterConfig

SERVICE = str(Path(__file__).with_name("fake_service.py"))


@dataclasses.dataclass(frozen=True, slots=True)
class FakeRing(RingPlan):
    actions: tuple[str, ...] = ()

    def specs(self) -> list[ChildSpec]:
        tied = (sys.executable, SERVICE, "fake", "--parent", str(os.getpid()))
        router = f"serve:{self.router.port}"
        return [
            ChildSpec("worker", (*tied, *self.actions)),
            ChildSpec("router", (*tied, router)),
        ]

    def describe(self) -> str:
        return "a fake ring"


if __name__ == "__main__":
    config = RouterConfig(workers=("127.0.0.1:1",), port=int(sys.argv[1]), grpc_port=-1)
    try:
        status = up(
            FakeRing({}, config, tuple(sys.argv[2:])), UpOptions(Question(prompt="What?", model="fake"))
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)
