"""Bodies of ``/v1/chat/completions``, and of all protocols that have chats: each makes a `ChatRequest` of its
bodies, so that all have the same features."""

from __future__ import annotations

from baton.core.structured_output import StructuredOutput
from baton.request.messages import check_messages, template_messages
from baton.request.sampling import resolve
from baton.request.sizes import check_json_bytes
from baton.request.template_arguments import MAX_BYTES as TEMPLATE_BYTES
from baton.request.template_arguments import template_arguments
from baton.request.tools import NAME_CHARS as TOOL_NAME_CHARS
from baton.request.tools import ToolUse
from baton.request.truncation import truncation_of
from baton.router.api.errors import invalid
from baton.router.api.http.openai.reasoning import Thinking
from baton.router.api.http.openai.schemas import ChatRequest
from baton.router.api.http.openai.structured import form_asked
from baton.router.api.http.openai.tool_calls import CallPolicy
from baton.router.api.http.preparing.common import (
    Chosen,
    check_choices,
    check_told,
    client_id_of,
    telling_of,
)
from baton.router.api.prepared import PreparedJob
from baton.router.api.priority import check_priority
from baton.router.api.prompts import Echo
from baton.router.api.settings import ApiSettings
from baton.text.config import Json
from baton.text.errors import TooManyTokensError
from baton.text.tokenizer import Tokenizer


class ChatPreparer:
    """Reads the chats for one model: template, tools, reasoning, form of the answer, sampling."""

    def __init__(
        self, tokenizer: Tokenizer, settings: ApiSettings, tool_name_chars: int = TOOL_NAME_CHARS
    ) -> None:
        """``tool_name_chars``: the most characters of a function's name."""
        self._tokenizer = tokenizer
        self._settings = settings
        self.calls = CallPolicy(settings, tokenizer, tool_name_chars)
        self.thinking = Thinking(tokenizer, self.calls)

    def prepare(self, body: ChatRequest, chosen: Chosen) -> PreparedJob:
        """Return the request in ``body``. Raises RequestError, by the names of the body's fields."""
        settings = self._settings
        n = 1 if body.n is None else body.n
        check_choices(n, 1, settings)
        use = self.calls.use_of(body)
        text = self._text(body, use, chosen)
        # The template writes the special tokens itself.
        prompt = chosen.prompts.from_text(
            text,
            chosen.model,
            "messages",
            add_special_tokens=bool(body.add_special_tokens),
            truncation=truncation_of(body, chosen.model),
        )
        form = form_asked(body)
        asked = self.calls.asked(body, use, text, form=form is not None)
        max_tokens_param = "max_tokens"
        if body.max_completion_tokens is not None:
            max_tokens_param, body.max_tokens = "max_completion_tokens", body.max_completion_tokens
        params = resolve(
            body,
            chosen.model,
            settings,
            self._tokenizer,
            prompt_tokens=len(prompt),
            default_max_tokens=None,
            max_tokens_param=max_tokens_param,
            logprobs=_top_logprobs(body),
            logprobs_param="top_logprobs",
            choices=n,
            n=n,
            structured_output=None if form is None else form.output,
            defaults=settings.defaults,
        )
        params = self.calls.constrained(params, use, self.calls.format_of(asked))
        grammars: list[tuple[str, StructuredOutput]] = [] if form is None else [(form.param, form.output)]
        if params.structured_output is not None and use is not None:
            grammars.append(("tools", params.structured_output))
        echoes = _echo(body) if body.echo else []
        check_told(body, [prompt], echoes, settings)
        return PreparedJob(
            model=chosen.place,
            prompts=[prompt],
            params=params,
            n=n,
            priority=check_priority(body.priority),
            cache_salt=body.cache_salt,
            seeded=body.seed is not None,
            skip_special_tokens=body.skip_special_tokens is not False,
            echoes=echoes,
            prompt_logprobs=body.prompt_logprobs,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            grammars=grammars,
            format=asked,
            open_ended=body.max_tokens is None,
            prompt_param="messages",
            max_tokens_param=max_tokens_param,
            telling=telling_of(body),
            client_id=client_id_of(body),
            ignored=[] if self.thinking.heeds(body.reasoning_effort) else ["reasoning_effort"],
        )

    def count(self, body: ChatRequest, chosen: Chosen) -> int:
        """Return how many tokens the prompt of ``body`` has, even if that is more than the context. Raises
        RequestError."""
        text = self._text(body, self.calls.use_of(body), chosen)
        most = max(chosen.model.max_model_len, self._settings.max_counted_tokens)
        try:
            return len(chosen.prompts.encode(text, "messages", add_special_tokens=False, most=most))
        except TooManyTokensError as error:
            raise invalid(
                "messages",
                f"The prompt has {error.told} tokens; at most {most} are counted.",
                "string_above_max_length",
            ) from None

    def _text(self, body: ChatRequest, use: ToolUse | None, chosen: Chosen) -> str:
        check_messages(body.messages, self._settings.conversation)
        return chosen.prompts.render(
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            tools=None if use is None else use.definitions,
            arguments=self._arguments(body),
        )

    def _arguments(self, body: ChatRequest) -> dict[str, Json] | None:
        given = template_arguments(body.chat_template_kwargs)
        if body.documents is not None:
            check_json_bytes("documents", body.documents, TEMPLATE_BYTES)
            given = {**(given or {}), "documents": body.documents}  # type: ignore[dict-item]
        if body.reasoning_effort is None:
            return given
        return {**self.thinking.graded(body.reasoning_effort, "reasoning_effort"), **(given or {})}


def _top_logprobs(body: ChatRequest) -> int | None:
    """Return how many likeliest tokens to tell with each token's log-probability; None: neither is told."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true.")
    return None


def _echo(body: ChatRequest) -> list[Echo]:
    """Return the turn that the answer goes on with: the last message, if it is the assistant's."""
    [last] = template_messages(body.messages[-1:])
    return [Echo(str(last["content"]) if last["role"] == "assistant" else "")]
