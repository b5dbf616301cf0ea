"""From a request that is read to the job that answers it."""

from __future__ import annotations

from starlette.requests import Request

from baton.router.api.http.authentication import cache_salt, client_of
from baton.router.api.http.envelope import origin_of, record_of
from baton.router.api.http.timeout import TIMEOUT_HEADER, timeout_of
from baton.router.api.prepared import PreparedJob
from baton.router.api.service import CompletionService, Job
from baton.router.api.urgency import resolve_urgency
from baton.tools.answer import AnswerFormat


async def job_of(
    service: CompletionService,
    request: Request,
    prepared: PreparedJob,
    *,
    request_id: str,
    endpoint: str,
    started: float,
    format_: AnswerFormat | None = None,
) -> Job:
    """The job that answers ``request``, of whose body ``prepared`` was made. Raises RequestError and
    ApiError."""
    client = client_of(request)
    model = service.model(None, client)
    urgency = resolve_urgency(
        prepared.priority,
        timeout_of(request),
        model,
        started=started,
        timeout_param=TIMEOUT_HEADER,
        client=client,
    )
    salt = cache_salt(request, prepared.cache_salt)
    tenant = service.tenant(client)
    for param, output in prepared.grammars:
        await service.grammars.check(param, output, tenant)
    job = Job(
        request_id=request_id,
        endpoint=endpoint,
        started=started,
        model=model,
        prompts=prepared.prompts,
        params=prepared.params,
        urgency=urgency,
        n=prepared.n,
        client=client,
        record=record_of(request),
        origin=origin_of(request),
        cache_salt=salt,
        seeded=prepared.seeded,
        skip_special_tokens=prepared.skip_special_tokens,
        echoes=prepared.echoes,
        only_echo=prepared.only_echo,
        prompt_logprobs=prepared.prompt_logprobs,
        tokens_as_ids=prepared.tokens_as_ids,
        open_ended=prepared.open_ended,
        format=format_,
    )
    return service.fitted(job, prompt_param=prepared.prompt_param, max_tokens_param=prepared.max_tokens_param)
