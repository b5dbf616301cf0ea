"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

import asyncio

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.request.messages import template_messages
from baton.request.prompts import check_ids
from baton.request.template_arguments import template_arguments
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import invalid
from baton.router.api.http.authentication import client_of
from baton.router.api.http.body import read_request
from baton.router.api.http.schemas import DetokenizeRequest, TokenizeRequest
from baton.router.api.service import CompletionService

_MANY_TOKENS = 4096


class Tokens:
    """The tokenizer, for clients. Nothing is generated, so a text may be longer than the context."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, or of the prompt that messages make."""
        body = await read_request(request, TokenizeRequest, self._catalogue.settings)
        service = self._catalogue.service(body.model)
        model = service.model(body.model, client_of(request))
        text, param, special_by_default = _text(body, service)
        special = special_by_default if body.add_special_tokens is None else body.add_special_tokens
        ids = await service.prompts.encode(text, param, add_special_tokens=special)
        document: dict[str, object] = {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            document["token_strs"] = [service.tokenizer.token(id_) for id_ in ids]
        return Response(orjson.dumps(document), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""
        body = await read_request(request, DetokenizeRequest, self._catalogue.settings)
        service = self._catalogue.service(body.model)
        model = service.model(body.model, client_of(request))
        check_ids(body.tokens, model.vocab_size, "tokens")
        if len(body.tokens) <= _MANY_TOKENS:
            text = service.tokenizer.decode(body.tokens, False)
        else:
            text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, False)
        return Response(orjson.dumps({"prompt": text}), media_type="application/json")


def _text(body: TokenizeRequest, service: CompletionService) -> tuple[str, str, bool]:
    """What to tokenize, the field it came in, and whether special tokens are added to it by default."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Give either prompt or messages.", "missing_required_parameter")
    if body.prompt is not None:
        return body.prompt, "prompt", True
    text = service.prompts.render(
        template_messages(body.messages or []),
        add_generation_prompt=body.add_generation_prompt is not False,
        arguments=template_arguments(body.chat_template_kwargs),
    )
    return text, "messages", False
