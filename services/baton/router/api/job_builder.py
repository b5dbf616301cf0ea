"""The building of a job from a request and its sender, the same for every protocol."""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.api.admission import fitted
from baton.router.api.audit import AuditRecord
from baton.router.api.errors import invalid
from baton.router.api.job import Job
from baton.router.api.prepared import PreparedJob
from baton.router.api.priority import resolve_priority
from baton.router.api.service import CompletionService
from baton.router.dispatch.types import ModelInfo
from baton.router.security.client import Client
from baton.router.traces.origin import Origin
from baton.tools.answer import AnswerFormat

MAX_SALT = 256
"""The most characters of a cache salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requester:
    """The sender of a request, and what its protocol says besides the request itself."""

    request_id: str
    """The request's id, minted here, never a client's."""
    told_id: str = ""
    """The id that the answer tells, with the client's own; empty: the minted one."""
    endpoint: str
    started: float  # time.perf_counter() when the request arrived
    client: Client
    origin: Origin
    record: AuditRecord | None
    """The request's record in the audit log; None: there is no log."""
    timeout_s: float | None
    """How long the client waits for its answer, in seconds; None: for as long as it takes."""
    timeout_param: str = "timeout"
    """The name of the field that gave the timeout."""


async def build_job(
    service: CompletionService,
    prepared: PreparedJob,
    requester: Requester,
    format_: AnswerFormat | None = None,
) -> Job:
    """Return the job that ``requester`` asks of ``service``. If the request leaves the length of its answers
    open, they are no longer than its tenant's limits of tokens allow.

    Raises RequestError and ApiError: for a model that may not be asked, a priority, timeout or salt out of
    range, a grammar that cannot be followed, and what `fitted` raises.
    """
    client = requester.client
    model = service.model(None, client)
    priority = resolve_priority(
        prepared.priority,
        requester.timeout_s,
        model,
        started=requester.started,
        timeout_param=requester.timeout_param,
        client=client,
    )
    salt = client.cache_salt(_checked_salt(prepared.cache_salt))
    for param, output in prepared.grammars:
        await service.grammars.check(param, output, client.tenant)
    job = Job(
        request_id=requester.request_id,
        endpoint=requester.endpoint,
        started=requester.started,
        model=model,
        prompts=prepared.prompts,
        params=prepared.params,
        priority=priority,
        n=prepared.n,
        client=client,
        record=requester.record,
        origin=requester.origin,
        cache_salt=salt,
        seeded=prepared.seeded,
        skip_special_tokens=prepared.skip_special_tokens,
        echoes=prepared.echoes,
        only_echo=prepared.only_echo,
        prompt_logprobs=prepared.prompt_logprobs,
        tokens_as_ids=prepared.tokens_as_ids,
        open_ended=prepared.open_ended,
        format=format_,
        told_id=requester.told_id,
        ignored=_ignored(prepared, model),
    )
    return fitted(
        job,
        client.tenant,
        prompt_param=prepared.prompt_param,
        max_tokens_param=prepared.max_tokens_param,
    )


def _ignored(prepared: PreparedJob, model: ModelInfo) -> list[str]:
    """Return the fields that are not acted on, which the model's workers decide too."""
    without_effect = prepared.priority and not model.takes_priorities
    return [*prepared.ignored, "priority"] if without_effect else prepared.ignored


def _checked_salt(given: str | None) -> str | None:
    if given is not None and not 1 <= len(given) <= MAX_SALT:
        raise invalid("cache_salt", f"cache_salt must have 1 to {MAX_SALT} characters, not {len(given)}.")
    return given
