"""Rings on this machine for ``baton bench sweep``: those that ``baton up`` would start."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from baton.bench.sweep.candidate import RingCandidate
from baton.cli import client
from baton.cli.ring import plan, roles_wanted
from baton.cli.supervisor import Patience, Supervisor
from baton.cli.up import url_of
from baton.process import ready
from baton.process.fields import to_argv
from baton.worker.config import WorkerConfig

_POLL_SECONDS = 0.1


class _Quiet:
    """A view of children of whom only the errors matter."""

    def starting(self, name: str) -> None: ...

    def progress(self, name: str, progress: ready.Progress) -> None: ...

    def ready(self, name: str, address: str, seconds: float) -> None: ...

    def log(self, name: str, level: int, line: str) -> None:
        if level >= logging.ERROR:
            print(f"{name}: {line}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRings:
    """Starts rings like ``worker``, but with a candidate's settings."""

    worker: WorkerConfig
    devices: Sequence[str]

    @asynccontextmanager
    async def running(self, candidate: RingCandidate) -> AsyncIterator[str]:
        """The address of a ring whose router has met its workers. Raises StartError when one cannot start,
        or when it dies before."""
        split = candidate.split
        worker = dataclasses.replace(
            self.worker,
            threads=candidate.threads,
            max_num_seqs=candidate.max_num_seqs,
            max_num_batched_tokens=candidate.max_num_batched_tokens,
            prefill_chunk=candidate.prefill_chunk,
        )
        router = {
            "model": worker.model,
            "served_model_name": (worker.model_name,),
            "port": 0,
            "grpc_port": -1,
        }
        ring = plan(worker, roles_wanted(split.prefill, split.decode, split.both), self.devices, router)
        # A ring that loses a worker while it is measured is no candidate.
        supervisor = Supervisor(ring.specs(), _Quiet(), Patience(deaths=1))
        supervised = asyncio.create_task(supervisor.run())
        serving = asyncio.create_task(_ready(supervisor))
        try:
            await asyncio.wait((supervised, serving), return_when=asyncio.FIRST_COMPLETED)
            if supervised.done():
                supervised.result()  # raises
            yield await serving
        finally:
            serving.cancel()
            await supervisor.stop()
            if supervised.done() and not supervised.cancelled():
                supervised.exception()  # told already, or of a ring that is no longer wanted
            supervised.cancel()

    def command(self, candidate: RingCandidate) -> str:
        """The ``baton up`` that starts this ring."""
        default = WorkerConfig(role="both").device
        parts = ["baton", "up", *to_argv(dataclasses.replace(self.worker, device=default))]
        if tuple(self.devices) != (default,):
            parts += ["--device", ",".join(self.devices)]
        return " ".join([*parts, *candidate.options()])


async def _ready(supervisor: Supervisor) -> str:
    messages = await supervisor.all_ready()
    url = url_of(messages["router"])
    while not await asyncio.to_thread(client.is_ready, url):  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(_POLL_SECONDS)
    return url
