"""The pool of processes that read large bodies and chats, shared fairly among tenants, or models without
keys."""

from __future__ import annotations

import array
import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from baton.router.admission.capacity import Capacity
from baton.router.admission.gate import Gate
from baton.router.admission.queue import QueueBounds, QueuedRequest, QueueEntry, RefusedError
from baton.router.api.admission import refused
from baton.router.api.errors import ApiError
from baton.router.api.menu import Menu, place_of
from baton.router.api.prepared import ID_TYPE, Assignment, Document, PreparedJob
from baton.router.preparation.deaths import death_of, refused_by_trial
from baton.router.preparation.frames import (
    ModelSetup,
    Packed,
    Question,
    RefusedBody,
    Said,
    Setup,
    TemplateTrial,
    Tried,
    frame,
)
from baton.router.preparation.limits import (
    BYTES_PER_S,
    GROW_S,
    IDS_AT_ONCE,
    LARGE_BYTES,
    MAX_PROCESSES,
    MAX_WAIT_S,
    MIN_PROCESSES,
    NICENESS,
    PROCESSES_PER_LARGE,
    QUEUED_BODIES,
    QUEUED_BYTES,
    QUICK,
    QUICK_BYTES,
    QUICK_SEATS,
    START_S,
    USUAL,
    BodyLimits,
)
from baton.router.preparation.process import BodyProcess, DiedError
from baton.router.preparation.processes import Processes, ReadyProcesses, StartedProcesses
from baton.router.shared.limits import Tenant
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.preparation import PreparationMetrics

log = logging.getLogger(__name__)

Kept = TypeVar("Kept", Said, None)

_TRIAL = "\0trial"
"""The name under which trials wait, which is no tenant's."""


class _TooLongError(Exception):
    """A process that was not there in time, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """A queue of bodies, and the processes that read them."""

    gate: Gate
    processes: Processes
    limits: BodyLimits


class _Named(msgspec.Struct):
    """The field of a body that says which model it asks."""

    model: str | None = None


class PreparationPool:
    """Reads bodies in processes of its own. Event loop's thread only.

    Small bodies, most of them chats, have processes that are ready before they come. Larger ones have others,
    which beyond the first are started as needed; large ones, of which few are read at a time since they take
    much memory, have a queue of their own. So no body holds up smaller ones.

    Bodies wait in a fair queue by tenant, measured in bytes and by the time they take: without keys by model,
    where there are several. Where tenants or models share more than one process, none may occupy all: a body
    that has begun is not interrupted for another.
    """

    def __init__(
        self,
        models: Sequence[ModelSetup],
        metrics: PreparationMetrics,
        *,
        shared: bool,
        cores: int = 1,
        usual: BodyLimits = USUAL,
        quick: BodyLimits = QUICK,
    ) -> None:
        """``models`` are in the order of all menus. ``shared``: whether tenants share the processes. There
        are fewer processes than ``cores``, within bounds; ``quick`` holds for small bodies, ``usual`` for
        others."""
        seats = max(MIN_PROCESSES, min(MAX_PROCESSES, cores - 1))
        large = max(1, seats // PROCESSES_PER_LARGE)
        several = shared or len(models) > 1
        started = StartedProcesses(frame(Setup(tuple(models), usual, NICENESS)))
        self._large = _Lane(_gate(lambda: large, _all_but_one(several)), started, usual)
        self._small = _Lane(_gate(lambda: seats - large, _all_but_one(several)), started, usual)
        ready = ReadyProcesses(
            frame(Setup(tuple(models), quick, eager=True)),
            stay=2 if several else 1,
            most=QUICK_SEATS,
            changed=lambda: self._quick.gate.look(),
        )
        self._quick = _Lane(_gate(lambda: max(1, ready.count), _half(several)), ready, quick)
        self._models = models
        self._shared = shared
        self._metrics = metrics
        self._refused_templates: dict[int, str] = {}
        self._started, self._ready = started, ready
        self._running: set[asyncio.Task[Said] | asyncio.Task[None]] = set()
        metrics.watch(lambda: started.count + ready.count)

    async def start(self) -> None:
        """Start the processes that stay, and try all chat templates in them."""
        self._ready.fill()
        await self._started.start_first()
        self._keep(asyncio.create_task(self._try_templates()))

    async def prepare(self, tenant: Tenant, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        """See `ElsewhereReader.prepare`."""
        lane = self._lane(len(body))
        asked = _queued(self._flow(tenant, assignment.menu, body), tenant.weight, len(body))
        if self._refused_templates:
            assignment = msgspec.structs.replace(assignment, refused_templates=self._refused_templates)
        began = time.perf_counter()
        waits = asyncio.get_running_loop().call_later(GROW_S, lane.processes.grow)
        try:
            entry = await lane.gate.enter(asked)
        except RefusedError as error:
            self._metrics.refused.labels(tenant.name, error.blame).inc()
            raise self._refusal(tenant, error) from None
        finally:
            waits.cancel()
        # A task of its own: a process ends what it has begun, and until then it takes no other body.
        reading = self._keep(asyncio.create_task(self._read(lane, entry, assignment, body)))
        said = await asyncio.shield(reading)
        self._metrics.seconds.observe(time.perf_counter() - began)
        return await _unpacked(said)

    async def close(self) -> None:
        """End all processes, whatever they read."""
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(self._started.close(), self._ready.close())
        await asyncio.gather(*running, return_exceptions=True)

    def _keep(self, task: asyncio.Task[Kept]) -> asyncio.Task[Kept]:
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _lane(self, size: int) -> _Lane:
        if size <= QUICK_BYTES:
            return self._quick
        return self._large if size > LARGE_BYTES else self._small

    def _flow(self, tenant: Tenant, menu: Menu, body: bytes) -> str:
        """Return the name under which a body waits: its tenant's, or its model's where all are one tenant. To
        look for that in a large body would take too long."""
        if self._shared or len(menu.offers) == 1 or len(body) > LARGE_BYTES:
            return tenant.name
        try:
            model = msgspec.json.decode(body, type=_Named).model
            return str(place_of(model, [offer.names for offer in menu.offers], keyed=False))
        except (msgspec.MsgspecError, ValueError, RecursionError, ApiError):
            return ""  # it will be refused

    def _refusal(self, tenant: Tenant, error: RefusedError) -> ApiError:
        if not self._shared:
            error = RefusedError("overall", error.reason, error.retry_after_s)
        return refused(tenant.name, error)

    async def _read(self, lane: _Lane, entry: QueueEntry, assignment: Assignment, body: bytes) -> Said:
        try:
            return await self._ask(lane, entry, assignment, body)
        except OSError as error:
            log.error("no process to read bodies can be started: %s", error)
            raise _overloaded() from None
        except _TooLongError:
            raise _overloaded() from None
        except DiedError as error:
            death = death_of(error.status, lane.limits)
            self._metrics.lost.labels(death.reason).inc()
            tell = log.error if death.reason == "died" else log.warning
            tell("a process that read a body of %s has ended: %s", entry.asked.tenant, death.error.message)
            raise death.error from None

    async def _ask(self, lane: _Lane, entry: QueueEntry, question: Question, body: bytes) -> Said:
        """Return the answer of a process to ``question``. Raises OSError, DiedError and _TooLongError."""
        began = time.monotonic()
        try:
            process = await self._process(lane)
            ends = True
            try:
                async with asyncio.timeout(lane.limits.wall_s):
                    said = await process.ask(question, body)
                ends = said.ends
                return said
            except TimeoutError:
                self._metrics.lost.labels("too_long").inc()
                log.error("process %d read a body for %.0f s: it is ended", process.pid, lane.limits.wall_s)
                raise _TooLongError from None
            finally:
                lane.processes.give(process, ends=ends)
        finally:
            # Bytes say little about how long a body takes. So the request is not "completed", which would
            # begin estimates of waits from bytes, and its tenant is charged the time it took instead.
            took = round((time.monotonic() - began) * BYTES_PER_S)
            lane.gate.leave(entry, took, completed=False)

    async def _process(self, lane: _Lane) -> BodyProcess:
        try:
            async with asyncio.timeout(START_S):
                return await lane.processes.take()
        except TimeoutError:
            raise _TooLongError from None

    async def _try_templates(self) -> None:
        """Have each model's template render one short message. Chats of a model whose template is a
        process's end are refused from then on."""
        for place, model in enumerate(self._models):
            entry = await self._quick.gate.enter(_queued(_TRIAL, 1.0, 0))
            try:
                said = await self._ask(self._quick, entry, TemplateTrial(place), b"")
            except (OSError, _TooLongError):
                continue  # which tells nothing of the template
            except DiedError as error:
                does = refused_by_trial(error.status, self._quick.limits)
                if does is not None:
                    self._refuse_chats(place, model, does)
            else:
                if isinstance(said.result, RefusedBody):
                    self._refuse_chats(place, model, "takes too much memory")
                elif isinstance(said.result, Tried) and said.result.error is not None:
                    log.warning(
                        "%s: the chat template in %s does not render one short message: %s",
                        model.name,
                        model.directory,
                        said.result.error,
                    )

    def _refuse_chats(self, place: int, model: ModelSetup, does: str) -> None:
        log.error(
            "%s: the chat template in %s %s for one short message: chats are refused",
            model.name,
            model.directory,
            does,
        )
        self._refused_templates[place] = (
            f"The chat template of the model {model.name} {does} for one short message, so that chats are "
            "refused; use /v1/completions."
        )


def _queued(flow: str, weight: float, size: int) -> QueuedRequest:
    return QueuedRequest(tenant=flow, weight=weight, prompt_tokens=size, max_outputs=1, turn=time.monotonic())


def _gate(seats: Callable[[], int], most_seats: Callable[[int], int] | None) -> Gate:
    """Return a queue for bodies, of which ``seats`` are read at a time. ``most_seats``: see `QueueBounds`;
    None if nobody shares them."""
    bounds = QueueBounds(
        requests=QUEUED_BODIES,
        prompt_tokens=QUEUED_BYTES,
        max_wait_s=MAX_WAIT_S,
        shared=most_seats is not None,
        most_seats=most_seats,
    )
    # This gate counts bytes, where the ring's counts tokens: its own metrics are exported nowhere.
    return Gate(bounds, lambda: Capacity(seats()), AdmissionMetrics(CollectorRegistry()))


def _all_but_one(several: bool) -> Callable[[int], int] | None:
    return (lambda seats: max(1, seats - 1)) if several else None


def _half(several: bool) -> Callable[[int], int] | None:
    """Return the rule for small bodies: they take so little that nobody needs more than half of the seats,
    and what one tenant has in them that takes long leaves room for others."""
    return (lambda seats: max(1, seats // 2)) if several else None


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
    assert isinstance(result, Document)
    return result


def _overloaded() -> ApiError:
    return ApiError(
        503, "The server is overloaded: the request could not be read in time.", code="overloaded"
    )
