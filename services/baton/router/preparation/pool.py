"""The pool of processes that read large bodies, shared fairly among tenants."""

from __future__ import annotations

import array
import asyncio
import logging
import signal
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from baton.router.admission.capacity import Capacity
from baton.router.admission.gate import Gate
from baton.router.admission.queue import QueueBounds, QueuedRequest, QueueEntry, RefusedError
from baton.router.api.admission import refused
from baton.router.api.errors import ApiError
from baton.router.api.prepared import ID_TYPE, Assignment, Document, PreparedJob
from baton.router.preparation.frames import ModelSetup, Packed, RefusedBody, Said, Setup, frame
from baton.router.preparation.limits import (
    ADDRESS_BYTES,
    BYTES_PER_S,
    CPU_S,
    IDLE_S,
    IDS_AT_ONCE,
    LARGE_BYTES,
    MAX_PROCESSES,
    MAX_WAIT_S,
    MIN_PROCESSES,
    OUT_OF_MEMORY,
    PROCESSES_PER_LARGE,
    QUEUED_BODIES,
    QUEUED_BYTES,
    TOO_MUCH_MEMORY,
    WALL_S,
)
from baton.router.preparation.process import BodyProcess, DiedError
from baton.router.shared.limits import Tenant
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.preparation import PreparationMetrics

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV)
"""Exit statuses of a process whose address space was too small: tokenizers abort then, and the JSON decoder
dereferences the allocation that failed."""


class PreparationPool:
    """Reads bodies in processes of its own, which beyond the first are started as needed. Event loop's thread
    only.

    Bodies wait in a fair queue by tenant, measured in bytes and by the time they take. Large bodies wait in a
    queue of their own, and few are read at a time since they take much memory. So large bodies never hold up
    smaller ones. Where tenants share more than two processes, no tenant may occupy all: a body that has begun
    is not interrupted for another.
    """

    def __init__(
        self,
        models: Sequence[ModelSetup],
        metrics: PreparationMetrics,
        *,
        shared: bool,
        cores: int = 1,
        cpu_s: float = CPU_S,
        address_bytes: int = ADDRESS_BYTES,
    ) -> None:
        """``models`` are in the order of all menus. ``shared``: whether tenants share the processes. There
        are fewer processes than ``cores``, within bounds; ``cpu_s`` is for one body, ``address_bytes`` for
        one process."""
        seats = max(MIN_PROCESSES, min(MAX_PROCESSES, cores - 1))
        large = max(1, seats // PROCESSES_PER_LARGE)
        self._large = _gate(large, shared=shared)
        self._small = _gate(seats - large, shared=shared)
        self._setup = frame(Setup(tuple(models), cpu_s, address_bytes))
        self._cpu_s = cpu_s
        self._metrics = metrics
        self._idle: list[BodyProcess] = []
        self._busy: set[BodyProcess] = set()
        self._reading: set[asyncio.Task[Said]] = set()
        self._cleaning: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        metrics.watch(lambda: len(self._idle) + len(self._busy))

    async def start(self) -> None:
        """Start a process for the first body, which would otherwise wait a third of a second for it."""
        try:
            self._idle.append(await BodyProcess.start(self._setup))
        except OSError as error:
            log.error("no process to read bodies can be started yet: %s", error)

    async def prepare(self, tenant: Tenant, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        """See `ElsewhereReader.prepare`."""
        gate = self._large if len(body) > LARGE_BYTES else self._small
        asked = QueuedRequest(
            tenant=tenant.name,
            weight=tenant.weight,
            prompt_tokens=len(body),
            max_outputs=1,
            turn=time.monotonic(),
        )
        began = time.perf_counter()
        try:
            entry = await gate.enter(asked)
        except RefusedError as error:
            self._metrics.refused.labels(tenant.name, error.blame).inc()
            raise refused(tenant.name, error) from None
        # A task of its own: a process ends what it has begun, and until then it takes no other body.
        reading = asyncio.create_task(self._read(gate, entry, assignment, body))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        said = await asyncio.shield(reading)
        self._metrics.seconds.observe(time.perf_counter() - began)
        return await _unpacked(said)

    async def close(self) -> None:
        """End all processes, whatever they read."""
        if self._cleaning is not None:
            self._cleaning.cancel()
        processes = [*self._idle, *self._busy]
        self._idle.clear()
        await asyncio.gather(*(process.end() for process in processes))
        await asyncio.gather(*self._reading, *self._ending, return_exceptions=True)

    async def _read(self, gate: Gate, entry: QueueEntry, assignment: Assignment, body: bytes) -> Said:
        began = time.monotonic()
        try:
            return await self._ask(await self._process(), assignment, body)
        except OSError as error:
            log.error("no process to read bodies can be started: %s", error)
            raise _overloaded() from None
        finally:
            # Bytes say little about how long a body takes. So the request is not "completed", which would
            # begin estimates of waits from bytes, and its tenant is charged the time it took instead.
            took = round((time.monotonic() - began) * BYTES_PER_S)
            gate.leave(entry, took, completed=False)

    async def _ask(self, process: BodyProcess, assignment: Assignment, body: bytes) -> Said:
        self._busy.add(process)
        ends = True
        try:
            async with asyncio.timeout(WALL_S):
                said = await process.ask(assignment, body)
            ends = said.ends
            return said
        except TimeoutError:
            self._metrics.lost.labels("too_long").inc()
            log.error("process %d read a body for %.0f s: it is ended", process.pid, WALL_S)
            raise _overloaded() from None
        except DiedError as error:
            raise self._died(process, error) from None
        finally:
            self._busy.discard(process)
            if ends:
                self._end(process)
            else:
                self._idle.append(process)
                self._clean_later()

    async def _process(self) -> BodyProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
        return await BodyProcess.start(self._setup)

    def _died(self, process: BodyProcess, error: DiedError) -> ApiError:
        """Return the error for the client whose body was the end of ``process``."""
        if error.status == -signal.SIGPROF:
            self._metrics.lost.labels("too_complex").inc()
            message = (
                f"The request takes more than {self._cpu_s:g} s to be read; send less, or simpler values."
            )
            return ApiError(400, message, code="request_too_complex")
        if error.status in _OUT_OF_MEMORY:
            self._metrics.lost.labels("too_complex").inc()
            log.warning("process %d, which read a body, has ended with status %s", process.pid, error.status)
            return ApiError(400, TOO_MUCH_MEMORY, code="request_too_complex")
        self._metrics.lost.labels("died").inc()
        log.error("process %d, which read a body, has ended with status %s", process.pid, error.status)
        if error.status == -signal.SIGKILL:  # sent by an operator, or by a system short of memory
            return ApiError(
                503,
                "The server is overloaded: the process that read the request was ended.",
                code="overloaded",
            )
        message = "The process that read the request has ended; the request may be too large or too complex."
        return ApiError(500, message, code="request_not_read")

    def _end(self, process: BodyProcess) -> None:
        ending = asyncio.create_task(process.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _clean_later(self) -> None:
        if self._cleaning is None and len(self._idle) > 1:
            self._cleaning = asyncio.get_running_loop().call_later(IDLE_S, self._clean)

    def _clean(self) -> None:
        """End an idle process if there is another."""
        self._cleaning = None
        if len(self._idle) > 1:
            self._end(self._idle.pop(0))
        self._clean_later()


def _gate(seats: int, *, shared: bool) -> Gate:
    """Return a queue for bodies of which ``seats`` are read at a time."""
    bounds = QueueBounds(
        requests=QUEUED_BODIES,
        prompt_tokens=QUEUED_BYTES,
        max_wait_s=MAX_WAIT_S,
        shared=shared,
        max_open=max(1, seats - 1) if shared else None,
    )
    # This gate counts bytes, where the ring's counts tokens: its own metrics are exported nowhere.
    return Gate(bounds, lambda: Capacity(seats), AdmissionMetrics(CollectorRegistry()))


async def _unpacked(said: Said) -> PreparedJob | Document:
    """Return the result of ``said``, its prompts' ids unpacked over several turns of the event loop. Raises
    ApiError for a refused body."""
    result = said.result
    if isinstance(result, RefusedBody):
        raise ApiError(result.status, result.message, param=result.param, code=result.code)
    if isinstance(result, Packed):
        taken = 0
        for packed in result.prompts:
            ids = array.array(ID_TYPE)
            ids.frombytes(packed)
            result.job.prompts.append(ids.tolist())
            taken += len(ids)
            if taken > IDS_AT_ONCE:
                taken = 0
                await asyncio.sleep(0)
        return result.job
    return result


def _overloaded() -> ApiError:
    return ApiError(
        503, "The server is overloaded: the request could not be read in time.", code="overloaded"
    )
