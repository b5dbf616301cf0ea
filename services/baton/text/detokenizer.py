"""Turns tokens back into text, a few at a time, at a constant cost per token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

import msgspec
import tokenizers

from baton.text.config import Json

REPLACEMENT = "\ufffd"
"""The character in place of bytes that are no text."""

_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
"""The characters that Python's ``surrogateescape`` makes of bytes that are not UTF-8."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """The text that each token of a vocabulary adds, as bytes where the tokenizer's decoder allows it.

    Almost every model's decoder is either byte-level (GPT-2 and its many followers) or SentencePiece with
    byte fallback. For both a token's bytes do not depend on its neighbours, so text is the concatenation of
    the bytes, decoded as it arrives. Other decoders go through the library with a few tokens of context.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self.backend = backend
        self.special_ids = special_ids
        decoder = _decoder_of(backend)
        self._byte_level = _is_byte_level(decoder)
        replacements = None if self._byte_level else _byte_fallback_replacements(decoder)
        self._replacements = replacements or ()
        self.as_bytes = self._byte_level or replacements is not None
        # Byte-level decoders put one replacement for a malformed sequence, byte fallback one for each byte.
        self.replaces_each_byte = not self._byte_level
        self.strips_spaces = 0 if self._byte_level else _leading_spaces_stripped(decoder)
        self._bytes_of_character = _byte_level_alphabet()
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an id outside the vocabulary. They are kept: a vocabulary
        is small."""
        piece = self._cache.get(token_id)
        if piece is None:
            token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return b""
            piece = self._cache[token_id] = self._bytes_of(token)
        return piece

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(self._bytes_of_character[character] for character in token)
            except KeyError:  # an added token, spelled as text
                return token.encode()
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()


class _Stream(Protocol):
    """A way to turn the tokens of one stream into text."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Turns one stream of tokens into text, never splitting a character.

    The pushes, however the tokens are cut, concatenate to the decoding of all the tokens at once. The
    exception is a malformed run of byte-fallback tokens: the library replaces the whole run, which is known
    only at the run's end; here a complete character is sent at once and only malformed bytes are replaced.

    ``after`` are the tokens before the stream (a prompt). They are not repeated; but if they hold text, a
    leading space of the stream is kept, while at the very start SentencePiece decoders drop it. ``kept`` are
    special tokens that are not skipped with the others.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        *,
        skip_special_tokens: bool = True,
        kept: Set[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> None:
        self._skipped = pieces.special_ids - kept if skip_special_tokens else frozenset[int]()
        self._stream: _Stream = (
            _ByteStream(pieces, after) if pieces.as_bytes else _WindowStream(pieces, after)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is now complete."""
        if self._skipped:
            token_ids = [id_ for id_ in token_ids if id_ not in self._skipped]
        return self._stream.push(token_ids)

    def finish(self) -> str:
        """Return the rest at the end of the tokens: replacement characters for an incomplete character."""
        return self._stream.finish()


class NoText:
    """Takes the place of a `Detokenizer` where no text is wanted."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


class _ByteStream:
    """Text as the incremental decoding of the tokens' bytes."""

    __slots__ = ("_decoder", "_escapes", "_pieces", "_spaces_to_strip")

    def __init__(self, pieces: TokenPieces, after: Sequence[int]) -> None:
        self._pieces = pieces
        self._escapes = pieces.replaces_each_byte
        errors = "surrogateescape" if self._escapes else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        at_start = all(id_ in pieces.special_ids for id_ in after)
        self._spaces_to_strip = pieces.strips_spaces if at_start else 0

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._clean(self._decoder.decode(b"".join([pieces[id_] for id_ in token_ids])))

    def finish(self) -> str:
        return self._clean(self._decoder.decode(b"", True))

    def _clean(self, text: str) -> str:
        if self._escapes and not text.isascii():
            text = _ESCAPED_BYTE.sub(REPLACEMENT, text)
        if self._spaces_to_strip and text:
            spaces = len(text) - len(text.lstrip(" "))
            stripped = min(spaces, self._spaces_to_strip)
            self._spaces_to_strip = self._spaces_to_strip - stripped if spaces == len(text) else 0
            text = text[stripped:]
        return text


class _WindowStream:
    """Text as the difference that new tokens make to the decoding of a few tokens before them."""

    _CONTEXT = 4
    _MAX_HELD = 16
    """Tokens held back at most: an incomplete character is at most four tokens; anything longer is malformed
    and sent as it is."""

    def __init__(self, pieces: TokenPieces, after: Sequence[int]) -> None:
        self._backend = pieces.backend
        self._context = [id_ for id_ in after[-self._MAX_HELD :] if id_ not in pieces.special_ids]
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(id_) for id_ in token_ids])

    def finish(self) -> str:
        return self._take(self._new_text()) if self._held else ""

    def _push_one(self, token_id: int) -> str:
        if self._backend.id_to_token(token_id) is None:  # no text, and no context for later tokens
            return ""
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) < self._MAX_HELD:
            return ""
        return self._take(text)

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _take(self, text: str) -> str:
        self._context = (self._context + self._held)[-self._CONTEXT :]
        self._held = []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def _decoder_of(backend: tokenizers.Tokenizer) -> list[dict[str, Json]]:
    """Return the steps of the tokenizer's decoder, as ``tokenizer.json`` spells them; a sequence is
    flattened."""
    if backend.decoder is None:
        return []
    step: dict[str, Json] = msgspec.json.decode(backend.decoder.__getstate__())
    return list(_flattened(step))


def _flattened(step: dict[str, Json]) -> Iterable[dict[str, Json]]:
    inner = step.get("decoders")
    if step.get("type") != "Sequence" or not isinstance(inner, list):
        yield step
        return
    for entry in inner:
        if isinstance(entry, dict):
            yield from _flattened(entry)


def _is_byte_level(decoder: list[dict[str, Json]]) -> bool:
    return [step.get("type") for step in decoder] == ["ByteLevel"]


def _byte_fallback_replacements(decoder: list[dict[str, Json]]) -> tuple[tuple[str, str], ...] | None:
    """Return the texts to replace in a token, or None when the decoder is not SentencePiece with byte
    fallback."""
    kinds = [step.get("type") for step in decoder]
    allowed = ["Replace"] * kinds.count("Replace") + ["ByteFallback", "Fuse"]
    if kinds not in (allowed, [*allowed, "Strip"]):
        return None
    if kinds[-1] == "Strip" and (decoder[-1].get("content") != " " or decoder[-1].get("stop")):
        return None
    replacements: list[tuple[str, str]] = []
    for step in decoder[: kinds.count("Replace")]:
        pattern, content = step.get("pattern"), step.get("content")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(text, str) or not isinstance(content, str):
            return None
        replacements.append((text, content))
    return tuple(replacements)


def _leading_spaces_stripped(decoder: list[dict[str, Json]]) -> int:
    start = decoder[-1].get("start") if decoder and decoder[-1].get("type") == "Strip" else 0
    return start if isinstance(start, int) else 0


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves; the others, in order, are written from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
