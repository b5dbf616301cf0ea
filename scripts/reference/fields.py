"""The reference of request fields: vLLM's listing beside the tables that bodies are read by."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from baton.request.params import SamplingParams
from baton.request.structured import FORMS, REFUSED
from baton.router.api.http.preparing.kinds import GENERATING, KINDS
from baton.router.api.http.server.field_rules import (
    EVERYWHERE,
    TAKEN,
    BodyKind,
    FieldRule,
    Verdict,
    different,
    refused,
)
from scripts.reference.markdown import code, plain, table
from scripts.site.pages import ROOT

LISTING = ROOT / "scripts/from_vllm/vllm.json"
VERDICTS: tuple[Verdict, ...] = ("taken", "different", "ignored", "refused")

HEAD = """\
# Request fields beside vLLM's

What becomes of each field that vLLM {version} takes, path by path. The tables are those by which the router
reads bodies; a test sends every field.

- **taken**: as in vLLM.
- **different**: taken, with a difference.
- **ignored**: it cannot change the answer, and is not acted on. The answer names it in the header
  `x-baton-ignored-fields`.
- **refused**: 400, with the field's name, value and why. Null, and a value that asks for what happens anyway,
  are taken.

A field that nobody knows is ignored and told too, as vLLM ignores it; 32 of them at most. One whose name is a
letter or two off a field's is refused as a misspelling, and so is a field of another path that would change
the answer.

Numbers may be texts (`"4"`, `"0.5"`), and integers may have a fraction of zero (`4.0`), as in vLLM; true and
false may be 1 and 0. Strings are never made of numbers. What the fields mean is in
[sampling](../sampling.md), [tools](../tools.md), [structured outputs](../structured-outputs.md) and
[the APIs](../api.md).
"""
ALSO = """\
## Fields that vLLM's classes do not have

Fields of OpenAI's and of earlier releases of vLLM, on each path that generates an answer and does not act on
them.
"""
OFFLINE = """\
## SamplingParams

The class of [programs](../offline.md), which has the fields of requests. A refused field is no keyword of it.
"""
STRUCTURED = """\
## structured_outputs

The object of that name, in requests and in `SamplingParams`: one form, and nothing beside it.
"""

_INTERNAL = "it is vLLM's own, and no setting"
_OFFLINE_ONLY: Mapping[str, FieldRule] = {
    "detokenize": TAKEN,
    "extra_args": refused("there are no extensions that would read it"),
    "flat_logprobs": refused("log-probabilities are flat always"),
    "n": different("at most 128"),
    "output_kind": refused("`generate` returns whole answers"),
    "output_text_buffer_length": refused(_INTERNAL),
    "prompt_logprobs": different("0 to 20; -1 is refused"),
    "prompt_logprob_start": refused("log-probabilities of a prompt are told from its beginning"),
    "prompt_logprob_token_ids": refused("log-probabilities are told of the likeliest tokens"),
    "skip_clone": refused(_INTERNAL),
    "skip_reading_prefix_cache": refused("prompts whose log-probabilities are told are computed whole"),
    "trace_decode_token_ids": refused("tokens are chosen, and not replayed"),
    "max_tokens": different("a chat fills the context by default; more than it has room for is refused"),
}


def listed() -> Mapping[str, Sequence[str]]:
    """Return vLLM's fields, in its order, by path or class."""
    content = json.loads(LISTING.read_text(encoding="utf-8"))
    return {entry["of"]: entry["names"] for entry in content["fields"]}


def rule_on(kind: BodyKind, name: str) -> FieldRule:
    """Return what becomes of a field of vLLM's. Raises KeyError if no table says."""
    rule = kind.rule(name, GENERATING)
    if rule is None:
        raise KeyError(f"{kind.path} has no rule for {name}")
    return rule


def offline_rule(name: str) -> FieldRule:
    """Return what becomes of a field of vLLM's ``SamplingParams``. Raises KeyError if no table says."""
    if name not in SamplingParams.__struct_fields__:
        rule = _OFFLINE_ONLY.get(name) or EVERYWHERE[name]
        return refused(rule.why)
    if name in _OFFLINE_ONLY:
        return _OFFLINE_ONLY[name]
    return rule_on(KINDS["completion"], name)


def structured_rule(name: str) -> FieldRule:
    """Return what becomes of a field of vLLM's ``StructuredOutputsParams``. Raises KeyError if no table
    says."""
    return TAKEN if name in FORMS else refused(REFUSED[name])


def page() -> str:
    """Return the page: a table for each path, for fields that vLLM does not have, and for its classes."""
    content = json.loads(LISTING.read_text(encoding="utf-8"))
    names = listed()
    parts = [HEAD.format(version=content["vllm"])]
    for kind in KINDS.values():
        if kind.path:
            rows = [(name, rule_on(kind, name)) for name in names[kind.path]]
            parts.append(f"## {kind.path}\n\n{_counted(rows)}\n\n{_rows(rows)}")
            besides = dict.fromkeys((*kind.type.__struct_fields__, *kind.own))
            own = [(name, rule_on(kind, name)) for name in besides if name not in names[kind.path]]
            if own:
                parts.append(f"Fields that vLLM does not have there:\n\n{_rows(own)}")
    known = {name for each in names.values() for name in each}
    parts.append(ALSO + "\n" + _rows((name, rule) for name, rule in EVERYWHERE.items() if name not in known))
    offline = [(name, offline_rule(name)) for name in names["SamplingParams"]]
    parts.append(OFFLINE + "\n" + _rows(offline))
    parts.append(STRUCTURED + "\n" + _rows((n, structured_rule(n)) for n in names["structured_outputs"]))
    return "\n".join(parts).rstrip() + "\n"


def _counted(rows: Iterable[tuple[str, FieldRule]]) -> str:
    counts = Counter(rule.verdict for _, rule in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]) + "."


def _rows(rows: Iterable[tuple[str, FieldRule]]) -> str:
    return table(
        ("field", "verdict", "what is different, or why"),
        ((code(name), rule.verdict, plain(rule.why)) for name, rule in rows),
    )
