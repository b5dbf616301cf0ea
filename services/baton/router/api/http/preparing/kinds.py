"""What becomes of the fields of each path's body, beside vLLM's: the tables that bodies are read by, and that
docs/reference/fields.md is written from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.router.api.http.anthropic.fields import CountRequest, MessageRequest
from baton.router.api.http.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
)
from baton.router.api.http.responses.fields import ResponseRequest
from baton.router.api.http.server.field_rules import (
    OWN_TEMPLATE,
    TEXT_ONLY,
    BodyKind,
    FieldRule,
    different,
    ignored,
    refused,
)
from baton.router.api.prepared import Endpoint

_STATELESS = "this server keeps no responses; send the whole conversation as input"
_NO_TOOLS = "this server calls no tools by itself"
_TEMPLATE_KWARGS = different(
    "at most 256 KiB of JSON, and neither special tokens nor fields of the request itself"
)

_OLDER = different("an older name of a form in structured_outputs, which vLLM ignores")

_SAMPLING: Mapping[str, FieldRule] = MappingProxyType(
    {
        "best_of": different("the beams of a beam search, and n without one; vLLM ignores it"),
        "early_stopping": different("of a beam search, as in transformers; vLLM ignores it"),
        "guided_choice": _OLDER,
        "guided_grammar": _OLDER,
        "guided_json": _OLDER,
        "guided_json_object": _OLDER,
        "guided_regex": _OLDER,
        "detokenize": different(
            "heeded, while vLLM heeds it in programs alone: the answer is its token ids, without a text"
        ),
        "length_penalty": different("another value than 1 needs use_beam_search"),
        "logit_bias": different("a bias beyond -100 to 100 is refused, and not cut; at most 1,024 tokens"),
        "max_tokens": different("more than the context has room for is refused, and not cut"),
        "min_p": different("applied after top_k and top_p, as in transformers, and not before them"),
        "bad_words": different("at most 500 of 128 characters"),
        "n": different("at most 128, and 256 choices in all"),
        "priority": different("-100 to 100; ignored where workers do not schedule by priority"),
        "prompt_logprobs": different("0 to 20, in a stream too; -1 is refused"),
        "repetition_penalty": different("0.01 to 100"),
        "request_id": different(
            "at most 128 of A-Z a-z 0-9 . _ : / + = -; the answer's `id` has it, x-request-id too if the "
            "client sends none"
        ),
        "response_format": different("text, json_object or json_schema; no structural_tag"),
        "seed": different("-1 is a seed like others"),
        "stop": different("at most 16 strings of 1,024 characters"),
        "stop_token_ids": different("at most 1,024 ids"),
        "structured_outputs": different(
            "one form, and no other field that asks for one; its own fields are at the end of this page"
        ),
        "truncate_prompt_tokens": different(
            "at most the context less 1, as -1 means too: room for a token is left; max_tokens is then cut "
            "to the room, as in vLLM"
        ),
        "use_beam_search": different("`best_of` is the number of beams; nothing else is drawn or penalized"),
    }
)

_CHAT: Mapping[str, FieldRule] = MappingProxyType(
    {
        "chat_template_kwargs": _TEMPLATE_KWARGS,
        "continue_final_message": different("add_generation_prompt need not be false beside it"),
        "messages": different(
            "text alone; roles are system, developer, user, assistant and tool; at most 10,000"
        ),
        "max_completion_tokens": different("more than the context has room for is refused, and not cut"),
        "reasoning_effort": different(
            "a grade that the chat template does not know is ignored, but none is refused where it cannot be "
            "heeded"
        ),
        "tool_choice": different("none leaves the tools out of the prompt"),
        "tools": different(
            "functions with names of at most 64 of A-Z a-z 0-9 _ -; at most 128, of 256 KiB together"
        ),
        "top_logprobs": different("0 to 20; -1 is refused"),
    }
)

_COMPLETION: Mapping[str, FieldRule] = MappingProxyType(
    {
        **_SAMPLING,
        "logprobs": different("0 to 20; -1 is refused"),
        "prompt": different("at most 256 choices in all, and 1,048,576 tokens"),
    }
)

_RESPONSE: Mapping[str, FieldRule] = MappingProxyType(
    {
        **{
            name: _SAMPLING[name] for name in ("logit_bias", "priority", "repetition_penalty", "seed", "stop")
        },
        "background": refused(_STATELESS, False),
        "chat_template_kwargs": _TEMPLATE_KWARGS,
        "conversation": refused(_STATELESS),
        "include": different("message.output_text.logprobs and reasoning.encrypted_content"),
        "input": different("text, calls of functions, their results, and reasoning; at most 10,000 items"),
        "max_output_tokens": different("more than the context has room for is refused, and not cut"),
        "max_tool_calls": refused(_NO_TOOLS),
        "previous_input_messages": refused(_STATELESS, []),
        "previous_response_id": refused(_STATELESS),
        "prompt": refused("this server keeps no prompts; send instructions and input"),
        "reasoning": different(
            "an effort that the chat template does not know is ignored, but none is refused where it cannot "
            "be heeded; no summaries"
        ),
        "request_id": different(
            "at most 128 of A-Z a-z 0-9 . _ : / + = -; it is the answer's `id`, and x-request-id too if the "
            "client sends none"
        ),
        "stop_token_ids": _SAMPLING["stop_token_ids"],
        "store": refused(_STATELESS, False),
        "structured_outputs": _SAMPLING["structured_outputs"],
        "text": different("`verbosity` is medium alone"),
        "tool_choice": different("none leaves the tools out of the prompt; functions alone"),
        "tools": different("functions alone, which the client runs"),
        "top_logprobs": different("0 to 20; needs `include`"),
        "truncation": refused("this server never drops input", "disabled"),
    }
)

_COUNT: Mapping[str, FieldRule] = MappingProxyType(
    {
        "chat_template_kwargs": _TEMPLATE_KWARGS,
        "container": refused("this server runs nothing for a model", {}, ""),
        "context_management": different("edits that keep everything alone"),
        "mcp_servers": refused(_NO_TOOLS, []),
        "messages": different(
            "text, calls of tools and their results; a last message of the assistant's is gone on with, "
            "while vLLM begins a new one"
        ),
        "output_config": different("`effort` is a wish"),
        "thinking": different("`budget_tokens` is checked, and not enforced"),
        "tools": different("those that the client runs; names of at most 128 characters"),
        "cache_control": ignored("equal beginnings of prompts are found by themselves"),
    }
)

_MESSAGE: Mapping[str, FieldRule] = MappingProxyType(
    {
        **_COUNT,
        "inference_geo": refused("this server is where it is", ""),
        "max_tokens": different("more than the context has room for is refused, and not cut"),
        "stop_sequences": _SAMPLING["stop"],
        "temperature": different("0 to 1, as Anthropic says"),
    }
)

_TOKENIZE: Mapping[str, FieldRule] = MappingProxyType(
    {
        "chat_template": refused(OWN_TEMPLATE),
        "chat_template_kwargs": _TEMPLATE_KWARGS,
        "continue_final_message": _CHAT["continue_final_message"],
        "documents": refused("chat_template_kwargs may have it", []),
        "media_io_kwargs": refused(TEXT_ONLY, {}),
        "messages": _CHAT["messages"],
        "mm_processor_kwargs": refused(TEXT_ONLY, {}),
        "prompt": different("at most 1 MiB"),
        "reasoning_effort": refused("chat_template_kwargs may have it"),
        "tools": _CHAT["tools"],
    }
)

KINDS: Mapping[Endpoint, BodyKind] = MappingProxyType(
    {
        "completion": BodyKind("/v1/completions", CompletionRequest, _COMPLETION),
        "chat": BodyKind("/v1/chat/completions", ChatRequest, MappingProxyType({**_SAMPLING, **_CHAT})),
        "response": BodyKind("/v1/responses", ResponseRequest, _RESPONSE),
        "message": BodyKind("/v1/messages", MessageRequest, _MESSAGE),
        "count": BodyKind("/v1/messages/count_tokens", CountRequest, _COUNT, generates=False),
        "tokenize": BodyKind("/tokenize", TokenizeRequest, _TOKENIZE, generates=False),
        "detokenize": BodyKind(
            "/detokenize",
            DetokenizeRequest,
            MappingProxyType({"tokens": different("at most 1,048,576 ids")}),
            generates=False,
        ),
        "text": BodyKind("", TextRequest, MappingProxyType({}), generates=False),
    }
)
"""The bodies of all paths. ``text`` is a prompt of gRPC's."""

GENERATING = frozenset(
    name for kind in KINDS.values() if kind.generates for name in kind.type.__struct_fields__
)
"""The fields that some path heeds when it generates an answer."""
