"""A digest of the meaning of a model's token ids, which workers and routers compare.

Files of equal meaning differ in their bytes: the order of a vocabulary, the way merges are written, settings
of padding. So the digest covers the vocabulary and the rules that cut texts: merges, or scores. Parts that
only one side uses (templates, normalizers, decoders, which tokens are special) are left out: a new revision
of a model may change those.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from baton.text.errors import TokenizerError

NO_TOKENIZER = "none"
"""The digest of a directory without a tokenizer.json."""
DIGITS = 16


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Ids by token, or tokens with their scores in the order of their ids."""
    merges: list[str | list[str]] = []
    """Merges, the first applied first; "a b" and ["a", "b"] are the same one."""


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def tokenizer_digest(directory: Path) -> str:
    """Return 16 hex digits, or ``NO_TOKENIZER``. Raises TokenizerError, in one line, for a tokenizer.json
    that cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return NO_TOKENIZER
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
    told = msgspec.json.encode((_ids(file), _cuts(file.model)))
    return hashlib.sha256(told).hexdigest()[:DIGITS]


def _ids(file: _File) -> list[tuple[int, str]]:
    """Return each id with its tokens, in order."""
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        meant = {(at, token) for token, at in vocab.items()}
    else:
        meant = {(at, token) for at, (token, _) in enumerate(vocab)}
    return sorted(meant.union((added.id, added.content) for added in file.added_tokens))


def _cuts(model: _Model) -> list[list[str]] | list[float]:
    """Return the rules that cut texts into tokens: merges or scores."""
    if not isinstance(model.vocab, dict):
        return [score for _, score in model.vocab]
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.merges]
