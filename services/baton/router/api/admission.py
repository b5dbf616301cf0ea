"""Admission of requests by their tenants' limits, before any work is spent on them."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.router.admission.gate import Gate, retry_after
from baton.router.admission.queue import QueuedRequest, RefusedError
from baton.router.api.errors import ApiError
from baton.router.api.job import Job
from baton.router.shared.limits import LimitDecision, Measure, RemainingLimit, Tenant
from baton.router.shared.state import SharedState

_LIMITS: Mapping[Measure, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "concurrent requests",
    "quota": "tokens per day",
}

OPEN_PART = 0.5
"""The part of what its prompt leaves of a limit of tokens that the answers to a request without max_tokens
may have together. With all of it, each such request would have to wait for a minute in which its tenant has
made no other."""
MIN_ANSWER = 16
"""The least tokens of an answer, if the context has room for them: a request without max_tokens whose answers
could not have as many is refused, as a shorter answer is of no use."""


def reservation(job: Job) -> int:
    """Return the tokens to count until the actual number is known: the prompts and the longest answers."""
    return job.prompt_tokens + computed_answers(job) * job.params.max_tokens


def used_tokens(job: Job, generated: int) -> int:
    """Return the tokens read and written for ``job`` if its client got ``generated`` tokens, including those
    of beams that no client gets."""
    return job.prompt_tokens + generated * computed_answers(job) // job.choices


def computed_answers(job: Job) -> int:
    """Return how many answers are generated for ``job``: a beam search follows more than it returns."""
    beams = job.params.beam_search
    return job.choices if beams is None else max(job.choices, beams.width * len(job.prompts))


def fitted(job: Job, tenant: Tenant, *, prompt_param: str, max_tokens_param: str = "max_tokens") -> Job:
    """Return ``job`` with its answers no longer than its tenant's limits of tokens allow, where the request
    left the length open.

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
    prompts, answers = job.prompt_tokens, computed_answers(job)
    if job.open_ended:
        most = _open_answer(job, limit - prompts, answers)
        job = replace(job, open_ended=False, params=replace(job.params, max_tokens=most))
    needed = reservation(job)
    if needed <= limit:
        return job
    longest = job.params.max_tokens
    if prompts + min(longest, MIN_ANSWER) > limit:
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
    """Return the most tokens of each of ``answers`` answers of open length, if a limit has ``room`` for
    all."""
    least = max(job.params.min_tokens, MIN_ANSWER)
    return min(job.params.max_tokens, max(int(OPEN_PART * room) // answers, least))


def _number_param(job: Job, prompt_param: str) -> str:
    """Return the field that asks for this many answers."""
    beams = job.params.beam_search
    if beams is not None and beams.width > job.n:
        return "best_of"
    return prompt_param if job.n == 1 else "n"


@asynccontextmanager
async def counted(shared: SharedState, tenant: Tenant) -> AsyncIterator[Mapping[str, str]]:
    """Count one request of ``tenant`` that generates nothing, for as long as the context is open. Yields the
    headers that tell what is left of the tenant's limits. Raises ApiError (429) if a limit is reached."""
    decision, lease = await shared.admit(tenant, 0)
    try:
        if decision.refused_by is not None:
            raise refusal(tenant, decision, 0)
        yield limit_headers(decision)
    finally:
        if lease is not None:
            shared.settle(lease, 0)


def refusal(tenant: Tenant, decision: LimitDecision, tokens: int) -> ApiError:
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


def limit_headers(decision: LimitDecision) -> dict[str, str]:
    """Return OpenAI's headers of what is left, for the limits that the tenant has."""
    headers: dict[str, str] = {}
    for name, room in (("requests", decision.requests), ("tokens", decision.tokens)):
        if room is not None:
            headers |= _of(name, room)
    return headers


def _of(name: str, room: RemainingLimit) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(room.limit),
        f"x-ratelimit-remaining-{name}": str(room.remaining),
        f"x-ratelimit-reset-{name}": _duration(room.reset_ms),
    }


def _duration(ms: int) -> str:
    """Return a duration as OpenAI writes it: 120ms, 6.5s, 1m0s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    return f"{minutes}m{rest // 1000}s" if minutes else f"{rest / 1000:.3g}s"


PRIORITY_S = 30.0
"""The waiting time that is worth one level of priority, in seconds, as on the workers by default: no request
starves."""


def asked_of(job: Job, tenant: Tenant) -> QueuedRequest:
    """Return what ``job`` asks of the queue in front of the ring."""
    return QueuedRequest(
        tenant=tenant.name,
        weight=tenant.weight,
        answers=computed_answers(job),
        prompt_tokens=job.prompt_tokens,
        max_outputs=job.choices * job.params.max_tokens,
        turn=job.priority.since + PRIORITY_S * job.priority.level,
        deadline=job.priority.deadline,
    )


def check_room(gate: Gate, tenant: Tenant) -> None:
    """Raise ApiError if the least that ``tenant`` could ask would be refused now."""
    least = QueuedRequest(
        tenant=tenant.name, weight=tenant.weight, prompt_tokens=1, max_outputs=1, turn=time.monotonic()
    )
    try:
        gate.check(least)
    except RefusedError as error:
        raise refused(tenant.name, error) from None


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
