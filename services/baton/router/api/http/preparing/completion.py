"""Bodies of ``/v1/completions``."""

from __future__ import annotations

from baton.request.limits import check_at_most
from baton.request.sampling import resolve
from baton.request.truncation import Truncation, truncation_of
from baton.router.api.errors import invalid, shown
from baton.router.api.http.openai.schemas import CompletionRequest
from baton.router.api.http.openai.structured import form_asked
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
from baton.text.tokenizer import Tokenizer


class CompletionPreparer:
    """Reads the bodies for one model."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def prepare(self, body: CompletionRequest, chosen: Chosen) -> PreparedJob:
        """Return the request in ``body``. Raises RequestError, by the names of the body's fields."""
        settings = self._settings
        given = _separate(body.prompt)
        n = 1 if body.n is None else body.n
        check_choices(n, len(given), settings)
        form = form_asked(body)
        several = not isinstance(body.prompt, str) and len(given) > 1
        truncation = truncation_of(body, chosen.model)
        prompts = [
            _read(prompt, chosen, f"prompt[{index}]" if several else "prompt", body, truncation)
            for index, prompt in enumerate(given)
        ]
        if truncation is not None:
            given = [*prompts]  # what is cut off is not echoed either
        if several:
            check_at_most("prompt", "tokens in all", sum(map(len, prompts)), settings.max_prompt_tokens)
        only_echo = bool(body.echo) and body.max_tokens == 0
        if only_echo:
            body.max_tokens = 1  # the engine always generates something, which is dropped
        params = resolve(
            body,
            chosen.model,
            settings,
            self._tokenizer,
            # The longest prompt decides what there is room for.
            prompt_tokens=max(map(len, prompts)),
            default_max_tokens=settings.default_max_tokens,
            logprobs=body.logprobs,
            echo=bool(body.echo),
            choices=n * len(prompts),
            n=n,
            structured_output=None if form is None else form.output,
            defaults=settings.defaults,
        )
        echoes = [_echo(prompt, chosen, body) for prompt in given] if body.echo else []
        check_told(body, prompts, echoes, settings)
        return PreparedJob(
            model=chosen.place,
            prompts=prompts,
            params=params,
            n=n,
            priority=check_priority(body.priority),
            cache_salt=body.cache_salt,
            seeded=body.seed is not None,
            skip_special_tokens=body.skip_special_tokens is not False,
            echoes=echoes,
            only_echo=only_echo,
            prompt_logprobs=body.prompt_logprobs,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            grammars=[] if form is None else [(form.param, form.output)],
            prompt_param="prompt",
            telling=telling_of(body),
            client_id=client_id_of(body),
        )


def _read(
    prompt: str | list[int],
    chosen: Chosen,
    param: str,
    body: CompletionRequest,
    truncation: Truncation | None,
) -> list[int]:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        return chosen.prompts.from_text(
            prompt, chosen.model, param, add_special_tokens=special, truncation=truncation
        )
    return chosen.prompts.from_ids(prompt, chosen.model, param, truncation)


def _echo(prompt: str | list[int], chosen: Chosen, body: CompletionRequest) -> Echo:
    return chosen.prompts.echo(
        prompt,
        add_special_tokens=body.add_special_tokens is not False,
        skip_special_tokens=body.skip_special_tokens is not False,
        with_offsets=body.logprobs is not None,
    )


def _separate(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """Return the single prompts: a text, texts, one list of ids, or lists of ids; nothing mixed. Raises
    RequestError."""
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
