"""Letting requests in by their tenant's limits, before any work is spent on them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from baton.router.api.errors import ApiError
from baton.router.shared.limits import Decision, Measure, Room, Tenant
from baton.router.shared.state import Lease, SharedState
from baton.router.traces.record import RequestTrace

if TYPE_CHECKING:
    from baton.router.api.service import Job

_LIMITS: Mapping[Measure, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "concurrent requests",
    "quota": "tokens per day",
}


class Ticket:
    """One request's way through its tenant's limits, as an async context manager around its answer.

    Raises ApiError (429) on entering when a limit is reached. Nothing is held before that.
    """

    def __init__(self, shared: SharedState, tenant: Tenant, job: Job) -> None:
        self._shared = shared
        self.tenant = tenant
        self._reserved = reservation(tenant, job)
        self._prompt_tokens = sum(map(len, job.prompts))
        self._generated = 0
        self._begun = False
        self._lease: Lease | None = None
        self.headers: Mapping[str, str] = {}
        """What the client is told of its limits, once the request is admitted."""
        self.trace: RequestTrace | None = None
        """Of the request, once it runs."""

    def begin(self) -> None:
        """Something is done for it from now on: its prompt counts. What is refused or given up before it is
        its turn has used nothing."""
        self._begun = True

    def generated(self, token_ids: Sequence[int]) -> None:
        self._generated += len(token_ids)

    async def __aenter__(self) -> Ticket:
        decision, self._lease = await self._shared.admit(self.tenant, self._reserved)
        self.headers = limit_headers(decision)
        if self.trace is not None:
            self.trace.admitted = time.perf_counter()
        if decision.refused_by is not None:
            raise refusal(self.tenant, decision, self._reserved)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            used = self._prompt_tokens + self._generated if self._begun else 0
            self._shared.settle(self._lease, used)


def reservation(tenant: Tenant, job: Job) -> int:
    """The tokens to count until it is known how many there are: the prompts and the longest answers.

    An answer that may fill the context counts no more than would leave the request room in the limits, or no
    chat without max_tokens could ever pass small ones.
    """
    prompts = sum(map(len, job.prompts))
    limits = tenant.limits
    bounds = [b for b in (limits.tokens_per_minute, limits.tokens_per_day) if b is not None]
    return max(prompts, min([prompts + job.choices * job.params.max_tokens, *bounds]))


def refusal(tenant: Tenant, decision: Decision, tokens: int) -> ApiError:
    assert decision.refused_by is not None
    limit = dict(zip(("requests", "tokens", "concurrent", "quota"), tenant.limits.in_order(), strict=True))[
        decision.refused_by
    ]
    what = _LIMITS[decision.refused_by]
    if decision.wait_ms < 0:
        message = f"The request needs {tokens} tokens, and the limit of {tenant.name} is {limit} {what}."
        return ApiError(429, message, code="request_too_large", headers=limit_headers(decision))
    seconds = max(1, math.ceil(decision.wait_ms / 1000))
    message = f"The limit of {tenant.name} is reached: {limit} {what}. Try again in {seconds} s."
    return ApiError(
        429,
        message,
        code="rate_limit_exceeded",
        headers={**limit_headers(decision), "retry-after": str(seconds)},
    )


def limit_headers(decision: Decision) -> dict[str, str]:
    """OpenAI's headers of what is left, for the limits that the tenant has."""
    headers: dict[str, str] = {}
    for name, room in (("requests", decision.requests), ("tokens", decision.tokens)):
        if room is not None:
            headers |= _of(name, room)
    return headers


def _of(name: str, room: Room) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(room.limit),
        f"x-ratelimit-remaining-{name}": str(room.remaining),
        f"x-ratelimit-reset-{name}": _duration(room.reset_ms),
    }


def _duration(ms: int) -> str:
    """As OpenAI writes it: 120ms, 6.5s, 1m0s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    return f"{minutes}m{rest // 1000}s" if minutes else f"{rest / 1000:.3g}s"
