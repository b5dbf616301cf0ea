"""``POST /v1/completions``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from baton.request.sampling import resolve
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import invalid, shown
from baton.router.api.http.answer import Answerer
from baton.router.api.http.authentication import cache_salt, client_of
from baton.router.api.http.body import read_request
from baton.router.api.http.envelope import origin_of, record_of, request_id_of
from baton.router.api.http.schemas import CompletionRequest
from baton.router.api.http.structured import form_asked
from baton.router.api.http.timeout import TIMEOUT_HEADER, timeout_of
from baton.router.api.prompts import Echo
from baton.router.api.service import CompletionService, Job
from baton.router.api.urgency import resolve_urgency
from baton.router.types import ModelInfo


class Completions:
    """Completes prompts given as text or token ids."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._settings = catalogue.settings
        self._jobs = catalogue.each(_CompletionJobs)
        self._answerers = catalogue.each(lambda service: Answerer(service, chat=False))

    async def create(self, request: Request) -> Response:
        """Complete the prompts of one request."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        body = await read_request(request, CompletionRequest, self._settings)
        job = await self._jobs.of(body.model).job(request, body, started)
        return await self._answerers.of(body.model).answer(request, job, body)


class _CompletionJobs:
    """Turns the requests for one model into jobs."""

    def __init__(self, service: CompletionService) -> None:
        self._service = service

    async def job(self, request: Request, body: CompletionRequest, started: float) -> Job:
        """The job that answers ``body``. Raises RequestError or ApiError, by the names of its fields."""
        model = self._service.model(body.model, client_of(request))
        given = _separate(body.prompt)
        n = 1 if body.n is None else body.n
        self._service.check_choices(n, len(given))
        form = form_asked(body)
        if form is not None:
            await self._service.grammars.check(*form, self._service.tenant(client_of(request)))
        several = not isinstance(body.prompt, str) and len(given) > 1
        prompts = [
            await self._read(prompt, model, f"prompt[{index}]" if several else "prompt", body)
            for index, prompt in enumerate(given)
        ]
        only_echo = bool(body.echo) and body.max_tokens == 0
        if only_echo:
            body.max_tokens = 1  # the engine always generates something; it is not told
        params = resolve(
            body,
            model,
            self._service.settings,
            self._service.tokenizer,
            # The longest prompt decides what there is room for.
            prompt_tokens=max(map(len, prompts)),
            default_max_tokens=self._service.settings.default_max_tokens,
            logprobs=body.logprobs,
            echo=bool(body.echo),
            choices=n * len(prompts),
            n=n,
            structured_output=None if form is None else form.output,
            defaults=self._service.settings.defaults,
        )
        job = Job(
            request_id=f"cmpl-{request_id_of(request)}",
            endpoint="/v1/completions",
            started=started,
            model=model,
            prompts=prompts,
            params=params,
            urgency=resolve_urgency(
                body.priority,
                timeout_of(request),
                model,
                started=started,
                timeout_param=TIMEOUT_HEADER,
                client=client_of(request),
            ),
            n=n,
            client=client_of(request),
            record=record_of(request),
            origin=origin_of(request),
            cache_salt=cache_salt(request, body.cache_salt),
            seeded=body.seed is not None,
            skip_special_tokens=body.skip_special_tokens is not False,
            echoes=[await self._echo(prompt, body) for prompt in given] if body.echo else (),
            only_echo=only_echo,
            prompt_logprobs=body.prompt_logprobs,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        )
        return self._service.fitted(job, prompt_param="prompt")

    async def _read(
        self, prompt: str | list[int], model: ModelInfo, param: str, body: CompletionRequest
    ) -> list[int]:
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            return await self._service.prompts.from_text(prompt, model, param, add_special_tokens=special)
        return self._service.prompts.from_ids(prompt, model, param)

    async def _echo(self, prompt: str | list[int], body: CompletionRequest) -> Echo:
        return await self._service.prompts.echo(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            skip_special_tokens=body.skip_special_tokens is not False,
            with_offsets=body.logprobs is not None,
        )


def _separate(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """The single prompts: a text, texts, one list of ids, or lists of ids; nothing mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "prompt is empty; it must hold at least one token.", "empty_prompt")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise invalid(
                "prompt",
                f"prompt[{index}] is {shown(item)}; a list must hold only texts, only token ids, or only "
                "lists of token ids.",
                "invalid_type",
            )
    if kind is int:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]
