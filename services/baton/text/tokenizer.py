"""The tokenizer of a model directory, without transformers: the part that the router needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from baton.text.chat import ChatTemplate
from baton.text.config import TokenizerFiles, read_tokenizer_files
from baton.text.detokenizer import Detokenizer, TokenPieces
from baton.text.errors import TextTooLongError, TokenizerError, TooManyTokensError

DEFAULT_MAX_CHARS = 16 * 1024 * 1024
"""Most characters of a text; longer ones are refused before they are tokenized."""

SHORT_TEXT_CHARS = 16 * 1024
"""Most characters of a text for which a plain call is fastest; longer texts take the batch call, which
releases the interpreter lock (the plain one does not)."""


PIECE_CHARS = 64 * 1024
"""Characters of one piece of a text whose tokens are only counted: the encoding of one piece at a time is in
memory."""
PIECE_SLACK = 64
"""Most tokens that a text has more in pieces than whole, for each cut."""
MAX_BEYOND = 64 * 1024
"""Most tokens beyond the limit that a text may turn out to have when it is encoded whole: 270 bytes each."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens by name (``bos_token``, ...), as chat templates see them, and by id."""

    by_name: dict[str, str]
    ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None


class Tokenizer:
    """Encodes and decodes text for one model. Immutable after construction; safe to call from threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: ChatTemplate | None = None,
        *,
        add_bos: bool | None = None,
        max_chars: int = DEFAULT_MAX_CHARS,
        directory: Path | None = None,
    ) -> None:
        """``add_bos`` overrides the backend's post-processor on whether a first token is added; None keeps
        it."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special = special
        self.directory = directory
        """The directory that the tokenizer was loaded from, and can be again; None: it was made in memory."""
        self.chat_template = chat_template
        self._max_chars = max_chars
        self._prepend_bos, self._drop_bos = _bos_repair(backend, special.bos_id, add_bos)
        self._pieces = TokenPieces(backend, special.ids)
        self.bracketed_ids = _bracketed(backend) - special.ids
        """Added tokens of the form ``<…>`` that are no special tokens: markers, as a rule."""
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.max_token_chars = max((len(token) for token in vocabulary), default=1)

    @classmethod
    def from_dir(cls, path: str | Path, *, max_chars: int = DEFAULT_MAX_CHARS) -> Tokenizer:
        """Load ``tokenizer.json`` and the files beside it.

        Raises TokenizerError, in one line, when a file is missing or broken.
        """
        files = read_tokenizer_files(Path(path))
        backend = _load_backend(files.tokenizer_json)
        template = None
        if files.chat_template:
            template = ChatTemplate(files.chat_template, files.special, tool_source=files.tool_template)
        special = _special_tokens(backend, files)
        return cls(
            backend, special, template, add_bos=files.add_bos, max_chars=max_chars, directory=Path(path)
        )

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        """Return the ids of ``text``. Raises TextTooLongError, before any work, for a text over the limit,
        and TooManyTokensError for one of more than ``most`` tokens (None: any number), before it is encoded
        whole if it has many more."""
        if len(text) > self._max_chars:
            raise TextTooLongError(len(text), self._max_chars)
        if most is not None and len(text) > PIECE_CHARS:
            self._count_to(text, most)
        ids = self._encode(text, add_special_tokens)
        if most is not None and len(ids) > most:
            raise TooManyTokensError(most, len(ids))
        return ids

    def _count_to(self, text: str, most: int) -> None:
        """Raise TooManyTokensError if ``text`` certainly has more than ``most`` tokens. The text is counted
        in pieces until the rest cannot be too many tokens for memory: each token is at least one byte."""
        affordable = min(4 * most, most + MAX_BEYOND)
        counted, left = 0, len(text.encode("utf-8", "surrogatepass"))
        for cuts, start in enumerate(range(0, len(text), PIECE_CHARS)):
            if counted + left <= affordable:
                return
            if counted > most + cuts * PIECE_SLACK:
                raise TooManyTokensError(most)
            piece = text[start : start + PIECE_CHARS]
            counted += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            left -= len(piece.encode("utf-8", "surrogatepass"))
        if counted > affordable:
            raise TooManyTokensError(most)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= SHORT_TEXT_CHARS:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens:
            return ids
        if self._prepend_bos is not None:
            ids.insert(0, self._prepend_bos)
        elif self._drop_bos:
            del ids[0]
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of all ``token_ids`` at once, by the batch call, which releases the interpreter
        lock."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(
        self, *, skip_special_tokens: bool = True, kept: Set[int] = frozenset(), after: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a decoder for one stream of tokens, which follows the tokens ``after``; see
        `Detokenizer`."""
        return Detokenizer(self._pieces, skip_special_tokens=skip_special_tokens, kept=kept, after=after)

    def named_among(self, texts: Iterable[str]) -> dict[str, int]:
        """Return those of ``texts`` that are single tokens which a grammar can name, with their ids: special
        tokens and `bracketed_ids`."""
        named = self.special.ids | self.bracketed_ids
        ids = {text: self._backend.token_to_id(text) for text in texts}
        return {text: id_ for text, id_ in ids.items() if id_ in named}

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the character of ``text`` in which each token of its encoding begins. Tokens that the
        tokenizer adds have no text: they begin where the previous one ended."""
        spans = self._backend.encode(text, add_special_tokens=add_special_tokens).offsets
        if add_special_tokens and self._prepend_bos is not None:
            spans.insert(0, (0, 0))
        elif add_special_tokens and self._drop_bos:
            del spans[0]
        ended = 0
        offsets = []
        for start, end in spans:
            offsets.append(start if end else ended)
            ended = max(ended, end)
        return offsets

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, as far as they do not depend on its neighbours;
        special tokens as they are spelled. Empty for an id without a token."""
        if self._pieces.as_bytes:
            return self._pieces[token_id]
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    @property
    def tokens_are_bytes(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes, whatever their neighbours."""
        return self._pieces.as_bytes

    def to_json(self) -> str:
        """Return the tokenizer as the content of a ``tokenizer.json``."""
        return self._backend.to_str()

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, None when there is no such id."""
        return self._backend.id_to_token(token_id)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for everything
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{path} cannot be read as a tokenizer: {reason}") from error


def _special_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> SpecialTokens:
    ids = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}

    def id_of(name: str) -> int | None:
        content = files.special.get(name)
        return None if content is None else backend.token_to_id(content)

    bos_id, eos_id = id_of("bos_token"), id_of("eos_token")
    ids.update(id_ for id_ in (bos_id, eos_id) if id_ is not None)
    return SpecialTokens(files.special, frozenset(ids), bos_id, eos_id)


def _bracketed(backend: tokenizers.Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder().items()
    return frozenset(
        id_ for id_, token in added if token.content.startswith("<") and token.content.endswith(">")
    )


def _bos_repair(
    backend: tokenizers.Tokenizer, bos_id: int | None, add_bos: bool | None
) -> tuple[int | None, bool]:
    """Return the token to put first, and whether to drop the first one, so that ``add_bos`` holds.

    Some models leave the choice to ``tokenizer_config.json`` rather than to the post-processor.
    """
    if bos_id is None or add_bos is None:
        return None, False
    adds_already = backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    if add_bos:
        return (None if adds_already else bos_id), False
    return None, adds_already
