"""``POST /v1/chat/completions``, and from any chat to the job that answers it."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from baton.request.messages import template_messages
from baton.request.sampling import resolve
from baton.request.template_arguments import template_arguments
from baton.request.tools import NAME_CHARS as TOOL_NAME_CHARS
from baton.request.tools import ToolUse
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import invalid
from baton.router.api.http.answer import Answerer
from baton.router.api.http.authentication import cache_salt, client_of
from baton.router.api.http.body import read_request
from baton.router.api.http.calls import CallPolicy
from baton.router.api.http.envelope import origin_of, record_of, request_id_of
from baton.router.api.http.schemas import ChatRequest
from baton.router.api.http.structured import form_asked
from baton.router.api.http.thinking import Thinking
from baton.router.api.http.timeout import TIMEOUT_HEADER, timeout_of
from baton.router.api.prompts import Echo
from baton.router.api.service import CompletionService, Job
from baton.router.api.urgency import resolve_urgency
from baton.text.config import Json


class ChatCompletions:
    """Answers chats, through the model's chat template."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._settings = catalogue.settings
        self._chats = catalogue.each(ChatJobs)
        self._answerers = catalogue.each(lambda service: Answerer(service, chat=True))

    async def create(self, request: Request) -> Response:
        """Answer one chat."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        body = await read_request(request, ChatRequest, self._settings)
        request_id = f"chatcmpl-{request_id_of(request)}"
        job = await self._chats.of(body.model).job(
            request, body, request_id=request_id, endpoint="/v1/chat/completions", started=started
        )
        return await self._answerers.of(body.model).answer(request, job, body)


class ChatJobs:
    """Turns the chats for one model into jobs: template, tools, reasoning, form of the answer, sampling.

    Every protocol that has chats makes a `ChatRequest` of them, so that all can do the same.
    """

    def __init__(self, service: CompletionService, tool_name_chars: int = TOOL_NAME_CHARS) -> None:
        self.service = service
        self.calls = CallPolicy(service.settings, service.tokenizer, tool_name_chars)
        self._thinking = Thinking(service, self.calls)

    async def job(
        self, request: Request, body: ChatRequest, *, request_id: str, endpoint: str, started: float
    ) -> Job:
        """The job that answers ``body``. Raises RequestError or ApiError, by the names of its fields."""
        service = self.service
        model = service.model(body.model, client_of(request))
        n = 1 if body.n is None else body.n
        service.check_choices(n, 1)
        use = self.calls.use_of(body)
        text = self._text(body, use)
        # The template writes the special tokens itself.
        prompt = await service.prompts.from_text(
            text, model, "messages", add_special_tokens=bool(body.add_special_tokens)
        )
        format_ = self.calls.format_of(body, use, text)
        form = form_asked(body)
        max_tokens_param = "max_tokens"
        if body.max_completion_tokens is not None:
            max_tokens_param, body.max_tokens = "max_completion_tokens", body.max_completion_tokens
        params = resolve(
            body,
            model,
            service.settings,
            service.tokenizer,
            prompt_tokens=len(prompt),
            default_max_tokens=None,
            max_tokens_param=max_tokens_param,
            logprobs=_top_logprobs(body),
            logprobs_param="top_logprobs",
            choices=n,
            n=n,
            structured_output=None if form is None else form.output,
            defaults=service.settings.defaults,
        )
        params = self.calls.constrained(params, use, format_)
        if form is not None:
            await service.grammars.check(*form, service.tenant(client_of(request)))
        if params.structured_output is not None and use is not None:
            tenant = service.tenant(client_of(request))
            await service.grammars.check("tools", params.structured_output, tenant)
        job = Job(
            request_id=request_id,
            endpoint=endpoint,
            started=started,
            model=model,
            prompts=[prompt],
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
            echoes=_echo(body) if body.echo else (),
            prompt_logprobs=body.prompt_logprobs,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            open_ended=body.max_tokens is None,
            format=format_,
        )
        return service.fitted(job, prompt_param="messages", max_tokens_param=max_tokens_param)

    async def count(self, body: ChatRequest) -> int:
        """How many tokens the prompt of ``body`` has, even if that is more than the context."""
        text = self._text(body, self.calls.use_of(body))
        return len(await self.service.prompts.encode(text, "messages", add_special_tokens=False))

    def _text(self, body: ChatRequest, use: ToolUse | None) -> str:
        return self.service.prompts.render(
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=None if use is None else use.definitions,
            arguments=self._arguments(body),
        )

    def _arguments(self, body: ChatRequest) -> dict[str, Json] | None:
        given = template_arguments(body.chat_template_kwargs)
        if body.reasoning_effort is None:
            return given
        return {**self._thinking.graded(body.reasoning_effort, "reasoning_effort"), **(given or {})}


def _top_logprobs(body: ChatRequest) -> int | None:
    """How many likeliest tokens to tell with each token's log-probability; None: neither."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true.")
    return None


def _echo(body: ChatRequest) -> list[Echo]:
    """The turn that the answer goes on with: the last message, if it is the assistant's own."""
    [last] = template_messages(body.messages[-1:])
    return [Echo(str(last["content"]) if last["role"] == "assistant" else "")]
