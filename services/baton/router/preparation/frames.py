"""What a router says to a process that reads bodies, and what it answers.

Frames of msgpack, each behind its length in 4 bytes, big endian. First of all a ``Setup``; then for each body
an ``Assignment`` and the body as it came, answered by one ``Said``.
"""

from __future__ import annotations

import array
from typing import TypeAlias

import msgspec

from baton.router.api.prepared import ID_TYPE, Document, PreparedJob
from baton.router.api.settings import ApiSettings

LENGTH_BYTES = 4


class ModelSetup(msgspec.Struct, frozen=True):
    """A model that bodies may be for."""

    directory: str
    """With its tokenizer."""
    settings: ApiSettings


class Setup(msgspec.Struct, frozen=True):
    """All that holds for every body."""

    models: tuple[ModelSetup, ...]
    """In the order of all menus."""
    cpu_s: float
    """Most CPU time for one body."""
    address_bytes: int
    """The process's address space."""


class Packed(msgspec.Struct, frozen=True, tag="packed"):
    """A request that is read, its prompts as arrays of ``ID_TYPE``: a list has an object for each token."""

    job: PreparedJob
    prompts: tuple[bytes, ...]

    @staticmethod
    def of(job: PreparedJob) -> Packed:
        prompts = tuple(array.array(ID_TYPE, prompt).tobytes() for prompt in job.prompts)
        return Packed(msgspec.structs.replace(job, prompts=[]), prompts)


class RefusedBody(msgspec.Struct, frozen=True, tag="refused"):
    """An error that the client is told."""

    status: int
    message: str
    param: str | None
    code: str | None


class Said(msgspec.Struct, frozen=True):
    """The answer to one body."""

    result: Packed | Document | RefusedBody
    ends: bool = False
    """This process answers nothing more: another is to take its place."""


Content: TypeAlias = msgspec.Struct | bytes


def frame(content: Content) -> bytes:
    """``content``, behind its length."""
    body = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    return length_of(body) + body


def length_of(body: bytes) -> bytes:
    """What goes before ``body``."""
    return len(body).to_bytes(LENGTH_BYTES)
