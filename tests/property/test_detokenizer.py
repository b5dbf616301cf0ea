"""However tokens are cut into pushes, their text is that of decoding them all at once."""

from __future__ import annotations

import itertools
import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.detokenizer import Detokenizer, TokenPieces
from tests.support.tiny_tokenizers import (
    byte_fallback,
    byte_level,
    split_byte_level,
    unstripped_byte_fallback,
    word_piece,
)

BYTE_LEVEL = byte_level()
FALLBACK = byte_fallback()
SPLIT = split_byte_level()
UNSTRIPPED = unstripped_byte_fallback()
WORD_PIECE = word_piece()
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


def special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special)


def ids_of(backend: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    # A few ids beyond the vocabulary: models pad their embeddings.
    return st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=60)


def cut(items: list[int], points: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(point % (len(items) + 1) for point in points), len(items)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


def stream(backend: tokenizers.Tokenizer, ids: list[int], points: list[int], *, skip: bool) -> str:
    pieces = TokenPieces(backend, special_ids(backend))
    detokenizer = Detokenizer(pieces, skip_special_tokens=skip)
    return "".join([*(detokenizer.push(part) for part in cut(ids, points)), detokenizer.finish()])


POINTS = st.lists(st.integers(0, 60), max_size=60)


@given(ids=ids_of(BYTE_LEVEL), points=POINTS, skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_byte_level_equals_the_whole(ids: list[int], points: list[int], skip: bool) -> None:
    assert stream(BYTE_LEVEL, ids, points, skip=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(ids=ids_of(SPLIT), points=POINTS, skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_level_of_tiktoken_equals_the_whole(ids: list[int], points: list[int], skip: bool) -> None:
    assert stream(SPLIT, ids, points, skip=skip) == SPLIT.decode(ids, skip_special_tokens=skip)


@given(
    texts=st.lists(
        st.sampled_from(["<think>", "née là", "  ", "\n\n", "<table>", "the", " fox", "東", "é🙂0"])
    ),
    points=POINTS,
)
@settings(max_examples=200, deadline=None)
def test_added_tokens_and_leading_spaces_equal_the_whole(texts: list[str], points: list[int]) -> None:
    for backend in (SPLIT, UNSTRIPPED):
        ids = backend.encode("".join(texts)).ids
        assert TokenPieces(backend, special_ids(backend)).as_bytes
        assert stream(backend, ids, points, skip=True) == backend.decode(ids) == "".join(texts)


@given(text=TEXTS, points=POINTS)
@settings(max_examples=200, deadline=None)
def test_text_survives_whole_and_each_push_is_whole_characters(text: str, points: list[int]) -> None:
    for backend in (BYTE_LEVEL, FALLBACK, UNSTRIPPED):
        ids = backend.encode(text).ids
        expected = backend.decode(ids, skip_special_tokens=False)
        assert stream(backend, ids, points, skip=False) == expected
        assert stream(backend, ids, list(range(len(ids))), skip=False) == expected
        if "�" not in text:
            assert "�" not in expected


def fallback_reference(ids: list[int]) -> str:
    """The decoding of the whole, where a malformed run of byte tokens keeps its complete characters."""
    tokens = [FALLBACK.id_to_token(id_) or "" for id_ in ids]
    run, text = b"", ""
    for token in [*tokens, "end"]:
        byte = re.fullmatch("<0x(..)>", token)
        if byte:
            run += bytes([int(byte[1], 16)])
        elif token:
            text += "".join(
                "�" if 0xDC80 <= ord(character) <= 0xDCFF else character
                for character in run.decode("utf-8", "surrogateescape")
            )
            run = b""
            text += token.replace("▁", " ")
    text = text.removesuffix("end")
    return text.removeprefix(" ")


@given(ids=ids_of(FALLBACK), points=POINTS)
@settings(max_examples=400, deadline=None)
def test_byte_fallback_however_it_is_cut(ids: list[int], points: list[int]) -> None:
    text = stream(FALLBACK, ids, points, skip=False)
    assert text == fallback_reference(ids)
    whole = FALLBACK.decode(ids, skip_special_tokens=False)
    if "�" not in whole:
        assert text == whole


WELL_FORMED = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"]).map(
            lambda c: [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in c.encode()]
        ),
        st.integers(259, FALLBACK.get_vocab_size() - 1).map(lambda id_: [id_]),
    ),
    max_size=30,
).map(lambda parts: [id_ for part in parts for id_ in part])


@given(ids=WELL_FORMED, points=POINTS)
@settings(max_examples=200, deadline=None)
def test_byte_fallback_equals_the_whole_when_bytes_are_well_formed(ids: list[int], points: list[int]) -> None:
    assert stream(FALLBACK, ids, points, skip=False) == FALLBACK.decode(ids, skip_special_tokens=False)


@given(ids=ids_of(WORD_PIECE), points=POINTS)
@settings(max_examples=100, deadline=None)
def test_other_decoders_equal_the_whole(ids: list[int], points: list[int]) -> None:
    assert stream(WORD_PIECE, ids, points, skip=True) == WORD_PIECE.decode(ids, skip_special_tokens=True)


def test_ids_without_a_token_are_no_context() -> None:
    assert stream(WORD_PIECE, [0, 9, 9, 9, 9, 0], [], skip=True) == "[UNK] [UNK]"


def fallback_id(token: str) -> int:
    found = FALLBACK.token_to_id(token)
    assert found is not None
    return found


def test_a_character_comes_with_the_token_that_completes_it() -> None:
    ids = [fallback_id(f"<0x{byte:02X}>") for byte in "🙂🙃".encode()]
    detokenizer = Detokenizer(TokenPieces(FALLBACK, frozenset()))
    assert [detokenizer.push([id_]) for id_ in ids] == ["", "", "", "🙂", "", "", "", "🙃"]
    assert detokenizer.finish() == ""


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    for backend, expected in ((BYTE_LEVEL, "�"), (FALLBACK, "���")):
        ids = backend.encode("🙂").ids
        pieces = TokenPieces(backend, frozenset())
        detokenizer = Detokenizer(pieces)
        held = ids[:-1] if backend is BYTE_LEVEL else ids[-4:-1]
        assert detokenizer.push(held) == ""
        assert detokenizer.finish() == expected


@pytest.mark.parametrize(("after", "expected"), [([], "the"), ([1], "the"), ([1, 300], " the")])
def test_a_leading_space_is_kept_only_after_text(after: list[int], expected: str) -> None:
    after = [fallback_id("▁fox") if id_ == 300 else id_ for id_ in after]
    detokenizer = Detokenizer(TokenPieces(FALLBACK, frozenset({0, 1, 2})), after=after)
    assert detokenizer.push([fallback_id("▁the")]) == expected
