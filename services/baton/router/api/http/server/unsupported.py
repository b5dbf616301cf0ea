"""Fields of OpenAI's and vLLM's APIs that this server, or one of its endpoints, does not act on.

Ignoring a field that changes the answer would give a wrong answer, so the field is refused by name, unless
its value asks for what happens anyway.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from baton.router.api.errors import RequestError, invalid, shown
from baton.text.config import Json

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""The fields that never change the text of an answer."""

NOT_YET: Mapping[str, tuple[Json, ...]] = MappingProxyType(
    {
        # By field: the values, besides null, that ask for nothing.
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "function_call": ("none",),
        "functions": ([],),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "include_reasoning": (True,),
        "include_stop_str_in_output": (False,),
        "kv_transfer_params": (),
        "logits_processors": ([],),
        "mm_processor_kwargs": (),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_embeds": (),
        "reasoning_effort": (),
        "request_id": (),
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "tool_choice": ("none",),
        "tools": ([],),
        "truncate_prompt_tokens": (),
        "verbosity": (),
        "vllm_xargs": (),
        "web_search_options": (),
    }
)


def refuse_unsupported(body: Mapping[str, Json], fields: Iterable[str], *, ignore_unknown: bool) -> None:
    """Raise RequestError for a field of ``body`` that would have to be ignored to answer.

    ``fields`` are those that the endpoint acts on.
    """
    known = set(fields)
    for name, value in body.items():
        if name in known or name in HARMLESS:
            continue
        if name in NOT_YET:
            if value is not None and not any(_same(value, neutral) for neutral in NOT_YET[name]):
                raise invalid(
                    name, f"{name} is not supported by this server yet (got {shown(value)}).", "unsupported"
                )
        elif not ignore_unknown:
            raise _unknown(name, known)


def _same(value: Json, neutral: Json) -> bool:
    """Whether the values are equal and of one type: in Python ``1 == True``, but to a client they differ."""
    return type(value) is type(neutral) and value == neutral


def _unknown(name: str, known: set[str]) -> RequestError:
    near = difflib.get_close_matches(name[:60], known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return invalid(name[:60], f"Unknown field {shown(name)}.{hint}", "unknown_parameter")
