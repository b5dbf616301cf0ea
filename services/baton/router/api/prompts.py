"""The conversion of a client's prompts to checked token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

from baton.request.errors import invalid
from baton.request.limits import ModelInfo
from baton.request.prompts import check_ids, check_length, check_text, render_chat, too_long
from baton.request.truncation import Truncation
from baton.text.config import Json
from baton.text.errors import TextTooLongError, TooManyTokensError
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer to it repeats it."""

    text: str
    offsets: tuple[int, ...] = ()
    """The character of ``text`` at which each of the prompt's tokens begins; empty if not needed."""


class NotHereError(Exception):
    """A request that may not be processed where it is read: it has too much text, or messages for a chat
    template."""


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """How the chat template of a model may be used."""

    refused: str | None = None
    """Why no chat is rendered; None if chats are."""
    bounded: Callable[[], AbstractContextManager[None]] = nullcontext
    """Bounds the time of what is done within."""


class PromptReader:
    """Turns the texts, messages or ids of one request into prompts that fit the model."""

    def __init__(
        self, tokenizer: Tokenizer, max_chars: int | None = None, templates: TemplateRules | None = None
    ) -> None:
        """``max_chars``: the most characters of all texts together, above which NotHereError is raised; None:
        any number. ``templates``: None if no chat template may be rendered here, which raises NotHereError
        too."""
        self._tokenizer = tokenizer
        self._left = max_chars
        self._templates = templates

    def from_text(
        self,
        text: str,
        model: ModelInfo,
        param: str,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Return the ids of ``text``, cut if ``truncation`` says so. Raises RequestError if the text is empty
        or longer than the context, or too long to be cut."""
        if truncation is not None:
            return check_length(self._cut(text, param, truncation, add_special_tokens), model, param)
        check_text(text, self._tokenizer, model, param)
        try:
            ids = self.encode(
                text, param, add_special_tokens=add_special_tokens, most=max(0, model.max_model_len - 1)
            )
        except TooManyTokensError as error:
            raise too_long(error.told, model, param) from None
        return check_length(ids, model, param)

    def _cut(self, text: str, param: str, truncation: Truncation, add_special_tokens: bool) -> list[int]:
        try:
            ids = self.encode(text, param, add_special_tokens=add_special_tokens, most=truncation.most)
        except TooManyTokensError as error:
            raise invalid(
                param,
                f"{param} has {error.told} tokens; a text of at most {truncation.most} is cut by "
                "truncate_prompt_tokens.",
                "string_above_max_length",
            ) from None
        return truncation.cut(ids)

    def from_ids(
        self, ids: list[int], model: ModelInfo, param: str, truncation: Truncation | None = None
    ) -> list[int]:
        """Return ``ids`` as given, or cut if ``truncation`` says so. Raises RequestError for an id outside
        the vocabulary, no ids, or too many."""
        if truncation is not None:
            check_ids(ids, model.vocab_size, param)
            return check_length(truncation.cut(ids), model, param)
        check_length(ids, model, param)
        check_ids(ids, model.vocab_size, param)
        return ids

    def encode(self, text: str, param: str, *, add_special_tokens: bool, most: int) -> list[int]:
        """Return the ids of ``text``. Raises RequestError for a text with too many characters, and
        TooManyTokensError for one with more than ``most`` tokens."""
        self._use(len(text))
        try:
            return self._tokenizer.encode(text, add_special_tokens, most=most)
        except TextTooLongError as error:
            raise invalid(param, f"{param}: {error}.", "string_above_max_length") from error

    def echo(
        self,
        given: str | list[int],
        *,
        add_special_tokens: bool,
        skip_special_tokens: bool,
        with_offsets: bool,
    ) -> Echo:
        """Return what repeats a prompt: a text as it was given, token ids by their text."""
        if isinstance(given, str):
            if not with_offsets:
                return Echo(given)
            self._use(len(given))
            return Echo(given, tuple(self._tokenizer.offsets(given, add_special_tokens)))
        self._use(len(given))
        stream = self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        pieces = [stream.push((id_,)) for id_ in given]
        offsets = accumulate(map(len, pieces[:-1]), initial=0) if with_offsets else ()
        return Echo("".join(pieces) + stream.finish(), tuple(offsets))

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Json]] | None = None,
        arguments: Mapping[str, Json] | None = None,
    ) -> str:
        """Return the chat template's text for ``messages``; see `render_chat`."""
        if self._templates is None:
            raise NotHereError
        if self._templates.refused is not None:
            raise invalid("messages", self._templates.refused, "chat_template_error")
        with self._templates.bounded():
            return render_chat(
                self._tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                arguments=arguments,
            )

    def _use(self, chars: int) -> None:
        if self._left is None:
            return
        self._left -= chars
        if self._left < 0:
            raise NotHereError
