"""Bodies of ``/tokenize`` and ``/detokenize``, in vLLM's shapes, and texts that come without a body."""

from __future__ import annotations

import array

import orjson

from baton.request.limits import check_at_most
from baton.request.messages import check_messages, template_messages
from baton.request.prompts import check_ids
from baton.request.template_arguments import template_arguments
from baton.request.tools import definitions_of
from baton.router.api.errors import invalid
from baton.router.api.http.openai.schemas import DetokenizeRequest, TextRequest, TokenizeRequest
from baton.router.api.http.preparing.common import Chosen
from baton.router.api.prepared import ID_TYPE, Document
from baton.router.api.settings import ApiSettings
from baton.text.errors import TooManyTokensError
from baton.text.tokenizer import Tokenizer


class TokensPreparer:
    """The tokenizer of one model, for clients. No answer is generated, so a text may be longer than the
    context."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def tokenize(self, body: TokenizeRequest, chosen: Chosen) -> Document:
        """Return the tokens of a text, or of the prompt that messages make. Raises RequestError."""
        text, param, special_by_default = self._text(body, chosen)
        size, most = len(text.encode()), self._settings.max_tokenize_bytes
        if size > most:
            raise invalid(
                param,
                f"{param} has a text of {size} bytes; at most {most} are tokenized for a client.",
                "string_above_max_length",
            )
        special = special_by_default if body.add_special_tokens is None else body.add_special_tokens
        most = self._settings.max_tokenize_tokens
        try:
            ids = chosen.prompts.encode(text, param, add_special_tokens=special, most=most)
        except TooManyTokensError:
            raise invalid(
                param,
                f"{param} has a text of more than {most} tokens; so many are told to a client at most.",
                "string_above_max_length",
            ) from None
        document: dict[str, object] = {
            "count": len(ids),
            "max_model_len": chosen.model.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            document["token_strs"] = [self._tokenizer.token(id_) for id_ in ids]
        return Document(orjson.dumps(document))

    def detokenize(self, body: DetokenizeRequest, chosen: Chosen) -> Document:
        """Return the text of tokens, special tokens included. Raises RequestError."""
        check_at_most("tokens", "ids", len(body.tokens), self._settings.max_detokenize_tokens)
        check_ids(body.tokens, chosen.model.vocab_size, "tokens")
        return Document(orjson.dumps({"prompt": self._tokenizer.decode(body.tokens, False)}))

    def text(self, body: TextRequest, chosen: Chosen) -> Document:
        """Return the ids of a prompt, as an array of ``ID_TYPE``. Raises RequestError."""
        ids = chosen.prompts.from_text(body.text, chosen.model, "text", truncation=body.truncation)
        return Document(array.array(ID_TYPE, ids).tobytes())

    def _text(self, body: TokenizeRequest, chosen: Chosen) -> tuple[str, str, bool]:
        """Return the text to tokenize, its field, and whether special tokens are added to it by default."""
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "Give either prompt or messages.", "missing_required_parameter")
        if body.prompt is not None:
            return body.prompt, "prompt", True
        messages = body.messages or []
        check_messages(messages, self._settings.conversation)
        text = chosen.prompts.render(
            template_messages(messages),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            tools=definitions_of(body.tools or [], self._settings.tools) or None,
            arguments=template_arguments(body.chat_template_kwargs),
        )
        return text, "messages", False
