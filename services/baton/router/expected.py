"""Which workers a router uses at all: those of its model, whose token ids mean what its own do.

An address may be given to a worker of another release, or be written down wrongly. Its answers would be words
of another vocabulary, and nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.compatibility import knows_role
from baton.text.digest import NO_TOKENIZER
from baton.v1 import worker_pb2 as pb

LONGEST_SHOWN = 64


class WorkerRefusedError(Exception):
    """A worker is not what it is taken for; says why, naming the field of its greeting."""

    def __init__(self, hello: pb.WorkerHello, reason: str) -> None:
        super().__init__(reason)
        self.incarnation = hello.incarnation or "unnamed"


@dataclass(frozen=True, slots=True)
class ExpectedModel:
    """What the workers of one ring are to serve. The revision of a model may be another while a new one is
    rolled out, with its context length and the ids that end answers; the meaning of token ids may not."""

    names: frozenset[str]
    """What workers may call it."""
    tokenizer: str
    """The digest of the router's own."""
    vocab_size: int
    """Token ids that the router's tokenizer has."""

    def check(self, hello: pb.WorkerHello) -> None:
        """Raises WorkerRefusedError."""
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
    """Raises WorkerRefusedError. ``expected``: None, and workers of any model will do."""
    if not knows_role(hello):
        raise WorkerRefusedError(hello, f"role: it has {hello.role}, which this router does not know")
    if expected is not None:
        expected.check(hello)


def _shown(text: str) -> str:
    """What a stranger said, fit for a log."""
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")
