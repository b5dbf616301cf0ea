"""Letting requests in by their tenant's limits, before any work is spent on them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

OPEN_PART = 0.5
"""Of what its prompt leaves of a limit of tokens, that the answers to a request without max_tokens may have
together. With all of it, each would have to wait for a minute in which its tenant has made no other."""
LEAST_ANSWER = 16
"""Tokens, if the context has room for them: a request without max_tokens whose answers could not have as many
is refused, rather than answered with less than anybody wants."""


class Ticket:
    """One request's way through its tenant's limits, as an async context manager around its answer.

    Raises ApiError (429) on entering when a limit is reached. Nothing is held before that.
    """

    def __init__(self, shared: SharedState, tenant: Tenant, job: Job) -> None:
        self._shared = shared
        self.tenant = tenant
        self._reserved = reservation(job)
        self._prompt_tokens = sum(map(len, job.prompts))
        self._generated = 0
        self._computed, self._told = computed_answers(job), job.choices
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
            self._shared.settle(self._lease, self._used() if self._begun else 0)

    def _used(self) -> int:
        """Tokens read and written, those of beams that nobody is told of included."""
        return self._prompt_tokens + self._generated * self._computed // self._told


def reservation(job: Job) -> int:
    """The tokens to count until it is known how many there are: the prompts and the longest answers."""
    return sum(map(len, job.prompts)) + computed_answers(job) * job.params.max_tokens


def computed_answers(job: Job) -> int:
    """How many answers are generated for ``job``: a beam search follows more than it tells."""
    beams = job.params.beam_search
    return job.choices if beams is None else max(job.choices, beams.width * len(job.prompts))


def fitted(job: Job, tenant: Tenant, *, prompt_param: str, max_tokens_param: str = "max_tokens") -> Job:
    """``job``, its answers no longer than its tenant's limits of tokens allow where that was left open.

    Raises ApiError (429, request_too_large), which names the field at fault, if what is asked for could never
    fit into a limit.
    """
    given: dict[Measure, int | None] = {
        "tokens": tenant.limits.tokens_per_minute,
        "quota": tenant.limits.tokens_per_day,
    }
    bounds = [(limit, measure) for measure, limit in given.items() if limit is not None]
    if not bounds:
        return job
    limit, measure = min(bounds)
    prompts, answers = sum(map(len, job.prompts)), computed_answers(job)
    if job.open_ended:
        most = _open_answer(job, limit - prompts, answers)
        job = replace(job, open_ended=False, params=replace(job.params, max_tokens=most))
    needed = reservation(job)
    if needed <= limit:
        return job
    longest = job.params.max_tokens
    if prompts + min(longest, LEAST_ANSWER) > limit:
        param = prompt_param
    elif prompts + longest > limit:
        param = max_tokens_param
    else:
        param = _number_param(job, prompt_param)
    raise ApiError(
        429,
        f"{param}: {prompts} tokens of prompt and {answers} answers of up to {longest} tokens make {needed}, "
        f"and the limit of {tenant.name} is {limit} {_LIMITS[measure]}.",
        param=param,
        code="request_too_large",
    )


def _open_answer(job: Job, room: int, answers: int) -> int:
    """How long each of so many answers may be, which was left open, if a limit has ``room`` for all."""
    least = max(job.params.min_tokens, LEAST_ANSWER)
    return min(job.params.max_tokens, max(int(OPEN_PART * room) // answers, least))


def _number_param(job: Job, prompt_param: str) -> str:
    """The field by which there are so many answers."""
    beams = job.params.beam_search
    if beams is not None and beams.width > job.n:
        return "best_of"
    return prompt_param if job.n == 1 else "n"


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
