"""The rules by which the fields of a body are taken, ignored or refused.

Ignoring a field that changes the answer would give a wrong answer, so the field is refused by name, unless
its value asks for what happens anyway. A field that cannot change the answer is ignored, and the answer tells
so in the header ``x-baton-ignored-fields``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from baton.router.api.errors import RequestError, invalid, shown
from baton.router.api.ignored import can_be_told
from baton.text.config import Json

Verdict = Literal["taken", "different", "ignored", "refused"]
"""``taken``: as in vLLM. ``different``: taken, with a difference that the rule tells. ``ignored``: taken,
told, and not acted on. ``refused``: an error names the field."""

MISSPELLED = 0.9
"""How similar an unknown field's name is at least to a field's, from 0 to 1, to count as its misspelling."""
MAX_UNKNOWN = 32
"""The most fields of a body that no path knows."""

_ELSEWHERE = 0.6


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What becomes of one field of a body."""

    verdict: Verdict
    why: str = ""
    """The difference or the reason: a clause that begins in lower case and has no full stop."""
    neutral: tuple[Json, ...] = ()
    """The values of a refused field, besides null, that ask for nothing."""


TAKEN = FieldRule("taken")


def different(why: str) -> FieldRule:
    return FieldRule("different", why)


def ignored(why: str) -> FieldRule:
    return FieldRule("ignored", why)


def refused(why: str, *neutral: Json) -> FieldRule:
    return FieldRule("refused", why, neutral)


OWN_TEMPLATE = "the model's own template is used, as by vLLM without --trust-request-chat-template"
TEXT_ONLY = "this server reads and writes text alone"
_KV = "this server's workers pass KV blocks to each other by themselves; ask the router"
_NOT_HERE = "only chats have it"
_OLD_CALLS = "send tools and tool_choice, their successors"

EVERYWHERE: Mapping[str, FieldRule] = MappingProxyType(
    {
        # OpenAI's.
        "audio": refused(TEXT_ONLY),
        "function_call": refused(_OLD_CALLS, "none"),
        "functions": refused(_OLD_CALLS, []),
        "logits_processors": refused("no code of a client's runs here", []),
        "metadata": ignored("nothing is stored"),
        "modalities": refused(TEXT_ONLY, ["text"]),
        "parallel_tool_calls": ignored(_NOT_HERE),
        "prediction": ignored("a prediction would only make the answer come sooner"),
        "prompt_cache_key": ignored("equal beginnings of prompts are found by themselves"),
        "prompt_cache_retention": ignored("KV blocks are kept as long as there is room"),
        "reasoning_effort": refused(_NOT_HERE),
        "safety_identifier": ignored("tenants are told apart by their keys"),
        "service_tier": ignored("`priority` says whose turn it is"),
        "store": ignored("nothing is stored"),
        "suffix": refused("no model of this server fills in the middle of a text", ""),
        "tool_choice": refused(_NOT_HERE, "none"),
        "tools": refused(_NOT_HERE, []),
        "user": ignored("tenants are told apart by their keys"),
        "verbosity": refused("no chat template of this server knows it", "medium"),
        "web_search_options": refused("this server calls no tools itself"),
        # vLLM's.
        "chat_template": refused(OWN_TEMPLATE),
        "documents": refused(_NOT_HERE, []),
        "ec_transfer_params": refused(TEXT_ONLY),
        "guided_decoding_backend": ignored("there is one, and it follows every form"),
        "guided_whitespace_pattern": refused("white space in JSON is the model's choice"),
        "include_reasoning": refused(_NOT_HERE, True),
        "kv_transfer_params": refused(_KV, {}),
        "logprob_token_ids": refused("log-probabilities are told of the likeliest tokens", []),
        "media_io_kwargs": refused(TEXT_ONLY, {}),
        "mm_payload": ignored("there are no images to tell of"),
        "mm_processor_kwargs": refused(TEXT_ONLY, {}),
        "prompt_embeds": refused("prompts are text or tokens", []),
        "repetition_detection": refused(
            "an answer ends where the model, a stop string or max_tokens ends it", {}, {"max_pattern_size": 0}
        ),
        "return_mm_kwargs": ignored("there are no images to tell of"),
        "return_prompt_text": refused("/tokenize and /detokenize tell a chat's prompt", False),
        "return_token_offsets": ignored("vLLM heeds it where a prompt is only rendered"),
        "routed_experts_prompt_start": ignored("answers do not tell of experts"),
        "session_id": ignored("requests go where their prompt's beginning is cached"),
        "spaces_between_special_tokens": ignored("no spaces are put between tokens, whatever it says"),
        "stream_interval": ignored("a stream tells tokens as they come"),
        "thinking_token_budget": refused("a model reasons until it is done or max_tokens is used up", -1),
        "vllm_xargs": ignored("there are no extensions that would read it"),
        "watermarking": refused("answers carry no watermark", False),
    }
)
"""The rules of fields that no path acts on, and of those that only some act on, for the others."""


@dataclass(frozen=True, slots=True)
class BodyKind:
    """The bodies of one path."""

    path: str
    type: type[msgspec.Struct]
    own: Mapping[str, FieldRule]
    """The rules of this path alone. They go before those for all paths."""
    generates: bool = True
    """Whether something is generated, which other paths' fields would change."""

    def rule(self, name: str, elsewhere: Set[str]) -> FieldRule | None:
        """Return the rule of the field ``name``; None if no path knows it. ``elsewhere`` are the fields that
        paths which generate something act on."""
        if name in self.own:
            return self.own[name]
        if name in self.type.__struct_fields__:
            return TAKEN
        if name in EVERYWHERE:
            rule = EVERYWHERE[name]
            return rule if self.generates else FieldRule("ignored", "nothing is generated")
        if name in elsewhere:
            return refused("another path has it") if self.generates else ignored("nothing is generated")
        return None


def check_fields(body: Mapping[str, Json], kind: BodyKind, elsewhere: Set[str]) -> list[str]:
    """Return the fields of ``body`` that are ignored, to be told. Raises RequestError for a field that would
    have to be ignored to answer, and for one that looks like a misspelling."""
    told, unknown = [], 0
    for name, value in body.items():
        if value is None:
            continue
        rule = kind.rule(name, elsewhere)
        if rule is None:
            unknown += 1
            _check_unknown(name, kind, unknown)
        elif rule.verdict == "refused" and not any(_same(value, each) for each in rule.neutral):
            if name in elsewhere and name not in kind.own and name not in EVERYWHERE:
                raise _unknown(name, kind, _ELSEWHERE)
            raise invalid(name, f"{name} is not supported (got {shown(value)}): {rule.why}.", "unsupported")
        if (rule is None or rule.verdict == "ignored") and can_be_told(name):
            told.append(name)
    return told


def _same(value: Json, neutral: Json) -> bool:
    """Whether the values are equal and of one type: in Python ``1 == True``, but to a client they differ."""
    return type(value) is type(neutral) and value == neutral


def _check_unknown(name: str, kind: BodyKind, count: int) -> None:
    if count > MAX_UNKNOWN:
        raise invalid(
            name[:60],
            f"Unknown field {shown(name)}: the body has more than {MAX_UNKNOWN} of them.",
            "unknown_parameter",
        )
    if difflib.get_close_matches(name[:60], kind.type.__struct_fields__, n=1, cutoff=MISSPELLED):
        raise _unknown(name, kind, MISSPELLED)


def _unknown(name: str, kind: BodyKind, cutoff: float) -> RequestError:
    near = difflib.get_close_matches(name[:60], kind.type.__struct_fields__, n=1, cutoff=cutoff)
    hint = f" Did you mean {near[0]}?" if near else ""
    return invalid(name[:60], f"Unknown field {shown(name)}.{hint}", "unknown_parameter")
