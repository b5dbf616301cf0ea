"""A router's HTTP API in a process of its own that measures the turns of its event loop:
``python -m tests.support.turns_server MODEL_DIRECTORY``. It prints its URL, and serves until it is
killed.

``GET /turns`` tells the longest turn since it was asked last, in seconds of CPU time of the loop's thread,
which others on the machine do not lengthen, and the most memory that the process has had, in bytes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import orjson
import uvloop
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import ModelInfo
from baton.router.preparation.frames import ModelSetup
from baton.router.preparation.pool import PreparationPool
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.preparation import PreparationMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving_app
from tests.support.fake_ring import FakeRing

TICK_S = 0.002
CONTEXT = 131_072


class Turns:
    """The longest time in which nothing else could run, within two milliseconds."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._last = time.thread_time()
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self) -> None:
        now = time.thread_time()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        self._loop.call_later(TICK_S, self._tick)

    def take(self) -> float:
        """The longest so far; another begins."""
        longest, self._longest = self._longest, 0.0
        return longest


def max_memory() -> int:
    """In bytes. Not by getrusage, which counts what the process that started this one had."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


async def serve(directory: Path) -> None:
    tokenizer = Tokenizer.from_dir(directory)
    settings = ApiSettings()
    metrics = RouterMetrics(CollectorRegistry())
    pool = PreparationPool(
        [ModelSetup(str(directory), settings)], PreparationMetrics(metrics.registry), shared=False
    )
    model = ModelInfo("tiny", "0123456789abcdef", CONTEXT, tokenizer.vocab_size, frozenset({0}))
    ring = FakeRing(lambda call: [10, 11, 12], model=model)
    app = app_for(CompletionService(ring, tokenizer, settings, metrics, elsewhere=pool))
    turns = Turns()

    async def told(request: Request) -> Response:
        return Response(orjson.dumps({"max_s": turns.take(), "memory": max_memory()}))

    app.add_route("/turns", told)
    async with serving_app(app) as url:
        print(url, flush=True)
        await asyncio.Event().wait()  # until this process is killed


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
