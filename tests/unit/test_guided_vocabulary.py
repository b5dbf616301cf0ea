"""A token that is known by name also stands for its text: in a vocabulary built as Qwen3's is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import Kind, StructuredOutput, choice_text
from baton.engine.sampling.guidance import Guide
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.table import TokenTable
from baton.grammar.trial import GrammarTrial, try_out
from baton.text.tokenizer import Tokenizer
from tests.support.qwen_tokenizer import MARKERS, SPECIAL, qwen_backend, save_qwen_tokenizer

PADDED = 512
"""The size of the logits: a few more than the tokenizer has tokens, as in published models."""
END = 381
"""``<|im_end|>``."""
ANY = r"(.|\n)*"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_qwen_tokenizer(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(partial(table_of, tokenizer))
    yield compiler
    compiler.close()


def table_of(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable.of(tokenizer, PADDED, [only(tokenizer, "<|im_end|>")])


def only(tokenizer: Tokenizer, text: str) -> int:
    [token] = tokenizer.encode(text)
    return token


def guide_of(compiler: GrammarCompiler, tokenizer: Tokenizer, output: StructuredOutput) -> Guide:
    grammar = compiler.compile(output).result(120)
    return Guide(grammar, ResolvedSampling(max_tokens=99), frozenset({only(tokenizer, "<|im_end|>")}))


def allowed(guide: Guide, output_ids: list[int]) -> set[int]:
    """The tokens of the mask behind ``output_ids``."""
    words = guide.mask(output_ids)
    assert len(words) == PADDED // 32
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def written(guide: Guide) -> list[int]:
    """The output whose every token is the one of the least id that may come."""
    output: list[int] = []
    while len(output) < 60 and output[-1:] != [END]:
        output.append(min(allowed(guide, output)))
    return output


def form(text: str) -> list[tuple[Kind, str]]:
    return [
        ("choice", choice_text([text])),
        ("regex", text.replace("|", r"\|")),
        ("json_schema", json.dumps({"const": text})),
        ("json_schema", json.dumps({"enum": [text]})),
        ("grammar", f"start: {json.dumps(text)}"),
        ("grammar", f"root ::= {json.dumps(text)}"),
    ]


@pytest.mark.parametrize("marker", ["<tool_call>", "</think>", "<|fim_prefix|>", "<|im_end|>"])
@pytest.mark.parametrize("around", ["{}", "a {} b{}"])
def test_a_form_with_the_text_of_a_token_is_followed(
    compiler: GrammarCompiler, tokenizer: Tokenizer, marker: str, around: str
) -> None:
    text = around.format(marker, marker)
    for kind, source in form(text):
        guide = guide_of(compiler, tokenizer, StructuredOutput(kind, source))
        *output, end = written(guide)
        assert end == only(tokenizer, "<|im_end|>")
        told = tokenizer.decode(output, skip_special_tokens=True)
        assert (json.loads(told) if kind == "json_schema" else told) == text
        assert (only(tokenizer, marker) in output) == (marker in MARKERS), "a special token is no text"


def test_a_token_may_come_where_its_text_may(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for kind, source in (("regex", ANY), ("json_schema", '{"type": "string"}')):
        guide = guide_of(compiler, tokenizer, StructuredOutput(kind, source))  # type: ignore[arg-type]
        before = tokenizer.encode('"a') if kind == "json_schema" else []
        may = allowed(guide, before)
        assert {only(tokenizer, marker) for marker in MARKERS} <= may
        assert not {only(tokenizer, text) for text in SPECIAL[:2]} & may
        after = [*before, only(tokenizer, "<think>"), only(tokenizer, "</think>")]
        assert {only(tokenizer, marker) for marker in MARKERS} <= allowed(guide, after)


def test_a_named_token_is_nothing_but_itself(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for name in ("<tool_call>", f"<[{only(tokenizer, '<tool_call>')}]>", "<|im_start|>"):
        token = only(tokenizer, "<|im_start|>" if "im_start" in name else "<tool_call>")
        guide = guide_of(compiler, tokenizer, StructuredOutput("grammar", f'start: {name} "x"'))
        assert allowed(guide, []) == {token}
        assert allowed(guide, [token]) == {only(tokenizer, "x")}


def test_named_and_text_at_once_are_taken_as_named(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    call = only(tokenizer, "<tool_call>")
    source = f'start: <[{call}]> "1" | TEXT\nTEXT: /[^0-9]*/'
    guide = guide_of(compiler, tokenizer, StructuredOutput("grammar", source))
    assert {call, only(tokenizer, "<"), only(tokenizer, "x")} <= allowed(guide, [])
    assert allowed(guide, [call]) == {only(tokenizer, "1")}
    guide = guide_of(compiler, tokenizer, StructuredOutput("grammar", source))
    assert call in allowed(guide, [only(tokenizer, "x"), call, call]), "where it is no name, it is text"


def test_drafts_are_read_as_outputs_are(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = StructuredOutput("choice", choice_text(["a<think>b</think><tool_call>c"]))
    *output, _ = written(guide_of(compiler, tokenizer, text))
    guide = guide_of(compiler, tokenizer, text)
    guide.mask([])
    ahead = guide.masks_ahead(output)
    assert len(ahead) == len(output)
    for at, words in enumerate(ahead, start=1):
        assert np.array_equal(words, guide_of(compiler, tokenizer, text).mask(output[:at]))


def test_tokens_far_apart_are_folded_into_the_mask(tmp_path: Path) -> None:
    backend = qwen_backend()
    markers = [f"<m{number}>" for number in range(70)]
    for at, marker in enumerate(markers):
        backend.add_tokens([marker])
        if at % 9 == 0:
            backend.add_special_tokens([f"<|gap {at}|>"])
    tokenizer = save_qwen_tokenizer(tmp_path, backend)
    compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, PADDED, [only(tokenizer, "<|im_end|>")]))
    try:
        wanted = markers[::3]
        guide = guide_of(compiler, tokenizer, StructuredOutput("choice", choice_text(wanted)))
        may = allowed(guide, [])
        assert {only(tokenizer, marker) for marker in wanted} < may
        assert not {only(tokenizer, marker) for marker in set(markers) - set(wanted)} & may
        everything = guide_of(compiler, tokenizer, StructuredOutput("regex", ANY))
        assert {only(tokenizer, marker) for marker in markers} <= allowed(everything, [])
    finally:
        compiler.close()


def test_an_end_is_never_text(tokenizer: Tokenizer) -> None:
    """A configuration may name any token as an end."""
    end = only(tokenizer, "</tool_call>")
    table = TokenTable.of(tokenizer, PADDED, [end])
    assert end not in table.text_token_ids and only(tokenizer, "<tool_call>") in table.text_token_ids
    assert (
        try_out(table.build().tokenizer, GrammarTrial("choice", choice_text(["</tool_call>"]))).error is None
    )
