"""A job's turn in the queue in front of the ring."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from baton.router.admission.gate import Gate, Turn, retry_after
from baton.router.admission.queue import Asked, RefusedError
from baton.router.api.errors import ApiError
from baton.router.shared.limits import Tenant
from baton.router.traces.record import RequestTrace

if TYPE_CHECKING:
    from baton.router.api.service import Job

PRIORITY_S = 30.0
"""So much waiting is worth one level of priority, as it is on the workers by default: nobody starves."""


def asked_of(job: Job, tenant: Tenant) -> Asked:
    """What ``job`` wants of the ring."""
    beams = job.params.beam_search
    return Asked(
        tenant=tenant.name,
        weight=tenant.weight,
        answers=max(job.choices, 0 if beams is None else beams.width * len(job.prompts)),
        prompt_tokens=sum(map(len, job.prompts)),
        most_outputs=job.choices * job.params.max_tokens,
        turn=job.urgency.since + PRIORITY_S * job.urgency.priority,
        deadline=job.urgency.deadline,
    )


def check_room(gate: Gate, tenant: Tenant) -> None:
    """Raises ApiError if the least that ``tenant`` could ask would be refused now."""
    least = Asked(
        tenant=tenant.name, weight=tenant.weight, prompt_tokens=1, most_outputs=1, turn=time.monotonic()
    )
    try:
        gate.check(least)
    except RefusedError as error:
        raise refused(tenant.name, error) from None


class Queued:
    """Waits for the job's turn, as an async context manager around its answer. ``gate``: None, and it is its
    turn at once.

    Raises ApiError on entering: 429 when its tenant has more waiting than its share, 503 when all have too
    much, with ``Retry-After`` by how long the queue is.
    """

    def __init__(self, gate: Gate | None, asked: Asked, trace: RequestTrace) -> None:
        self._asked = asked
        self._trace = trace
        self._turn: Turn | None = None if gate is None else gate.turn(asked)

    def generated(self, tokens: int) -> None:
        if self._turn is not None:
            self._turn.generated(tokens)

    async def __aenter__(self) -> Queued:
        if self._turn is not None:
            try:
                await self._turn.__aenter__()
            except RefusedError as error:
                raise refused(self._asked.tenant, error) from None
        self._trace.turn = time.perf_counter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._turn is not None:
            await self._turn.__aexit__(kind, error, trace)


def refused(tenant: str, error: RefusedError) -> ApiError:
    seconds = retry_after(error.retry_after_s)
    headers = {"retry-after": str(seconds)}
    if error.blame == "tenant":
        message = (
            f"{tenant} has more requests waiting than its share ({error.reason}). Try again in {seconds} s."
        )
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)
    message = f"The server is overloaded: {error.reason}. Try again in {seconds} s."
    return ApiError(503, message, code="overloaded", headers=headers)
