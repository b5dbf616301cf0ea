"""The messages between a router and a process that reads bodies.

Each message is a frame of msgpack behind its length in 4 bytes, big endian. The router sends one ``Setup``,
then for each body an ``Assignment`` and the body as it came; the process answers each with one ``Said``.
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
    """The model's directory, which has its tokenizer."""
    settings: ApiSettings


class Setup(msgspec.Struct, frozen=True):
    """The settings that hold for every body."""

    models: tuple[ModelSetup, ...]
    """The models, in the order of all menus."""
    cpu_s: float
    """The most CPU time for one body, in seconds."""
    address_bytes: int
    """The most address space of the process, in bytes."""


class Packed(msgspec.Struct, frozen=True, tag="packed"):
    """A prepared request, its prompts as arrays of ``ID_TYPE``: a list would have an object for each
    token."""

    job: PreparedJob
    prompts: tuple[bytes, ...]

    @staticmethod
    def of(job: PreparedJob) -> Packed:
        prompts = tuple(array.array(ID_TYPE, prompt).tobytes() for prompt in job.prompts)
        return Packed(msgspec.structs.replace(job, prompts=[]), prompts)


class RefusedBody(msgspec.Struct, frozen=True, tag="refused"):
    """The error that the client of a refused body is told."""

    status: int
    message: str
    param: str | None
    code: str | None


class Said(msgspec.Struct, frozen=True):
    """The answer to one body."""

    result: Packed | Document | RefusedBody
    ends: bool = False
    """Whether this process answers nothing more, so that another takes its place."""


Content: TypeAlias = msgspec.Struct | bytes


def frame(content: Content) -> bytes:
    """Return ``content`` behind its length."""
    body = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    return length_of(body) + body


def length_of(body: bytes) -> bytes:
    """Return the length prefix of ``body``."""
    return len(body).to_bytes(LENGTH_BYTES)
