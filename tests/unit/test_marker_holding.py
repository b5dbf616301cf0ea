"""The start says what is unlike published tokenizers about a format's markers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from baton.router.config import RouterConfig
from baton.router.main import _load
from baton.text.tokenizer import SpecialTokens, Tokenizer
from baton.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from baton.tools.holding import marker_faults
from tests.support.qwen_tokenizer import save_qwen_tokenizer
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer, word_piece

HERMES, LLAMA = TOOL_FORMATS["hermes"], TOOL_FORMATS["llama3_json"]
THINK = REASONING_FORMATS["think"]
CALLS, THOUGHTS = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")


def test_nothing_is_said_of_tokenizers_as_they_are_published(tmp_path: Path) -> None:
    assert not marker_faults(save_qwen_tokenizer(tmp_path / "qwen"), HERMES, THINK, None)
    llama = byte_level_tokenizer(tmp_path / "llama", markers=["<|python_tag|>"])
    assert not marker_faults(llama, LLAMA, HERMES, THINK), "markers may be several tokens"
    special = byte_level_tokenizer(tmp_path / "special", markers=[*CALLS, *THOUGHTS])
    assert not marker_faults(special, HERMES, THINK)


def test_a_marker_that_is_half_a_token(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path, texts=["<tool_call>", *THOUGHTS])
    [fault] = marker_faults(tokenizer, HERMES, THINK)
    assert "a token for the marker <tool_call>, but not for </tool_call>" in fault


def test_a_marker_that_should_be_special(tmp_path: Path) -> None:
    for texts in ([], ["<|python_tag|>"]):
        [fault] = marker_faults(byte_level_tokenizer(tmp_path, texts=texts), LLAMA)
        assert "<|python_tag|> is not a special token" in fault


def test_a_marker_that_cannot_be_written() -> None:
    tokenizer = Tokenizer(word_piece(), SpecialTokens({}, frozenset(), None, None))
    faults = marker_faults(tokenizer, HERMES)
    assert len(faults) == 2 and all("cannot write the marker" in fault for fault in faults)


def test_the_router_says_so_when_it_loads_a_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    byte_level_tokenizer(tmp_path, template=TOOL_TEMPLATE, texts=["<think>"])
    with caplog.at_level(logging.WARNING):
        _load(RouterConfig(model=str(tmp_path), workers=("127.0.0.1:1",)))
    [record] = caplog.records
    assert "<think>, but not for </think>" in record.getMessage()
