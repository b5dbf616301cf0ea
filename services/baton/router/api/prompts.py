"""From a client's prompt to checked token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.router.api.errors import ApiError, invalid, shown
from baton.router.api.settings import ApiSettings
from baton.router.types import ModelInfo
from baton.text.config import Json
from baton.text.errors import ChatTemplateError, TextTooLongError
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer to it repeats it."""

    text: str
    offsets: Sequence[int] = ()
    """The character of ``text`` in which each of the prompt's tokens begins, where that matters."""


class PromptReader:
    """Turns text, messages or ids into a prompt that fits the model. Long texts are tokenized in a thread."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._thread_above = settings.thread_above_chars

    async def from_text(
        self, text: str, model: ModelInfo, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of ``text``. Raises ApiError when it is empty or longer than the context."""
        # No token is longer than the longest one, so this much text cannot fit: say so without tokenizing it.
        least = -(-len(text) // self._tokenizer.max_token_chars)
        if least >= model.max_model_len:
            raise _too_long(f"at least {least}", model, param)
        ids = await self.encode(text, param, add_special_tokens=add_special_tokens)
        return _fitting(ids, model, param)

    def from_ids(self, ids: list[int], model: ModelInfo, param: str) -> list[int]:
        """``ids`` as given. Raises ApiError for an id outside the vocabulary, none, or too many."""
        check_ids(ids, model.vocab_size, param)
        return _fitting(ids, model, param)

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of ``text``, however many."""
        try:
            if len(text) <= self._thread_above:
                return self._tokenizer.encode(text, add_special_tokens)
            return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens)
        except TextTooLongError as error:
            raise invalid(param, f"{param}: {error}.", "string_above_max_length") from error

    async def echo(
        self,
        given: str | list[int],
        *,
        add_special_tokens: bool,
        skip_special_tokens: bool,
        with_offsets: bool,
    ) -> Echo:
        """What repeats a prompt: a text as it was given, token ids by their text."""
        if isinstance(given, str):
            if not with_offsets:
                return Echo(given)
            if len(given) <= self._thread_above:
                return Echo(given, self._tokenizer.offsets(given, add_special_tokens))
            return Echo(given, await asyncio.to_thread(self._tokenizer.offsets, given, add_special_tokens))
        stream = self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        pieces = [stream.push((id_,)) for id_ in given]
        offsets = accumulate(map(len, pieces[:-1]), initial=0) if with_offsets else ()
        return Echo("".join(pieces) + stream.finish(), tuple(offsets))

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, Json] | None,
    ) -> str:
        """The chat template's text for ``messages``. Raises ApiError without a template, or if it refuses."""
        template = self._tokenizer.chat_template
        if template is None:
            raise invalid(
                "messages",
                "This model has no chat template, so it cannot answer messages; use /v1/completions.",
                "no_chat_template",
            )
        try:
            return template.render(messages, add_generation_prompt=add_generation_prompt, arguments=arguments)
        except (ChatTemplateError, TextTooLongError) as error:
            raise invalid("messages", f"{error}.", "chat_template_error") from error


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError for the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index = next(index for index, id_ in enumerate(ids) if not 0 <= id_ < vocab_size)
        raise invalid(param, f"{param}[{index}] is {shown(ids[index])}; token ids are 0 to {vocab_size - 1}.")


def _fitting(ids: list[int], model: ModelInfo, param: str) -> list[int]:
    if not ids:
        raise invalid(param, f"{param} is empty; it must hold at least one token.", "empty_prompt")
    if len(ids) >= model.max_model_len:
        raise _too_long(str(len(ids)), model, param)
    return ids


def _too_long(tokens: str, model: ModelInfo, param: str) -> ApiError:
    return invalid(
        param,
        f"This model's context is {model.max_model_len} tokens, but the prompt has {tokens}, which leaves "
        "no room for an answer.",
        "context_length_exceeded",
    )
