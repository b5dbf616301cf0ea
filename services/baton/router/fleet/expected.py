"""The check that a worker serves the router's model, with token ids that mean what the router's own do.

An address may be given to a worker of another release, or be mistyped. The worker's answers would be words of
another vocabulary, and nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.role_proto import role_from_proto
from baton.text.digest import NO_TOKENIZER
from baton.v1 import worker_pb2 as pb

MAX_SHOWN = 64


class WorkerRefusedError(Exception):
    """A worker does not serve what the router expects; the message names the field of its greeting."""

    def __init__(self, hello: pb.WorkerHello, reason: str) -> None:
        super().__init__(reason)
        self.incarnation = hello.incarnation or "unnamed"


@dataclass(frozen=True, slots=True)
class ExpectedModel:
    """The model that the workers of one ring must serve. While a new revision is rolled out, workers may
    differ in the revision, the context length and the EOS ids, but not in the meaning of token ids."""

    names: frozenset[str]
    """Names that workers may give the model."""
    tokenizer: str
    """The digest of the router's tokenizer."""
    vocab_size: int
    """Token ids that the router's tokenizer has."""

    def check(self, hello: pb.WorkerHello) -> None:
        """Raises WorkerRefusedError if a worker serves another model or tokenizer."""
        if hello.model not in self.names:
            allowed = " or ".join(sorted(self.names))
            raise WorkerRefusedError(hello, f"model: it serves {_shown(hello.model)}, and not {allowed}")
        if not hello.tokenizer:
            raise WorkerRefusedError(hello, "tokenizer: it does not tell which one it has, as older releases")
        if hello.tokenizer == NO_TOKENIZER:
            if hello.vocab_size < self.vocab_size:
                raise WorkerRefusedError(
                    hello,
                    f"vocab_size: it has {hello.vocab_size} tokens, of {self.vocab_size} of this router",
                )
        elif hello.tokenizer != self.tokenizer:
            raise WorkerRefusedError(
                hello,
                f"tokenizer: its token ids have other meanings (digest {_shown(hello.tokenizer)}, here "
                f"{self.tokenizer}): does its model's directory have another tokenizer.json?",
            )


def check_worker(hello: pb.WorkerHello, expected: ExpectedModel | None) -> None:
    """Raises WorkerRefusedError if the router cannot use a worker. ``expected``: None accepts any model."""
    if role_from_proto(hello.role) is None:
        raise WorkerRefusedError(hello, f"role: it has {hello.role}, which this router does not know")
    if expected is not None:
        expected.check(hello)


def _shown(text: str) -> str:
    """Shorten and quote a text of an untrusted peer for a log."""
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…")
