"""The checks of prompts against the model's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.request.errors import RequestError, in_short, invalid, shown
from baton.request.limits import ModelInfo
from baton.text.config import Json
from baton.text.errors import ChatTemplateError, TextTooLongError
from baton.text.tokenizer import Tokenizer


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError for the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index = next(index for index, id_ in enumerate(ids) if not 0 <= id_ < vocab_size)
        raise invalid(param, f"{param}[{index}] is {shown(ids[index])}; token ids are 0 to {vocab_size - 1}.")


def check_text(text: str, tokenizer: Tokenizer, model: ModelInfo, param: str) -> None:
    """Raise RequestError for a text that cannot fit the context, without tokenizing it: no token is longer
    than the longest one."""
    least = -(-len(text) // tokenizer.max_token_chars)
    if least >= model.max_model_len:
        raise too_long(f"at least {least}", model, param)


def check_length(ids: list[int], model: ModelInfo, param: str) -> list[int]:
    """Return ``ids``. Raises RequestError when there are none, or too many to leave room for an answer."""
    check_count(len(ids), model, param)
    return ids


def check_count(tokens: int, model: ModelInfo, param: str) -> None:
    """Raise RequestError for a prompt of no tokens, or of too many to leave room for an answer."""
    if not tokens:
        raise invalid(param, f"{param} is empty; it must hold at least one token.", "empty_prompt")
    if tokens >= model.max_model_len:
        raise too_long(str(tokens), model, param)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Json]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Json]] | None = None,
    arguments: Mapping[str, Json] | None = None,
) -> str:
    """Return the chat template's text for ``messages``, with the beginning of an answer unless
    ``add_generation_prompt`` is False, or the last message is gone on with.

    Raises RequestError without a template, if the template refuses, or if there is nothing to go on with.
    """
    template = tokenizer.chat_template
    if template is None:
        raise invalid(
            "messages",
            "This model has no chat template, so it cannot answer messages; use /v1/completions.",
            "no_chat_template",
        )
    if continue_final_message:
        _check_continued(messages, add_generation_prompt)
    try:
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt is not False,
            continue_final_message=continue_final_message,
            tools=tools,
            arguments=arguments,
        )
    except (ChatTemplateError, TextTooLongError) as error:
        raise invalid("messages", f"{in_short(str(error))}.", "chat_template_error") from error


def _check_continued(messages: Sequence[Mapping[str, Json]], add_generation_prompt: bool | None) -> None:
    if add_generation_prompt:
        raise invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true; an answer either goes on with "
            "the last message or begins a new one.",
        )
    at, last = f"messages[{len(messages) - 1}]", messages[-1]
    if last.get("tool_calls"):
        raise invalid(f"{at}.tool_calls", f"{at} has tool_calls; only a text can be gone on with.")
    if not last["content"]:
        raise invalid(f"{at}.content", f"{at}.content is empty; there is nothing to go on with.")


def too_long(tokens: str, model: ModelInfo, param: str) -> RequestError:
    """Return the error of a prompt that has ``tokens`` tokens."""
    return invalid(
        param,
        f"This model's context is {model.max_model_len} tokens, but the prompt has {tokens}, which leaves "
        "no room for an answer.",
        "context_length_exceeded",
    )
