"""The messages between a router and a process that reads bodies.

Each message is a frame of msgpack behind its length in 4 bytes, big endian. The router sends one ``Setup``;
an empty frame says that the process is ready. Then the router sends, for each body, an ``Assignment`` and the
body as it came, or a ``TemplateTrial`` and nothing; the process answers each with one ``Said``.
"""

from __future__ import annotations

import array
from typing import TypeAlias

import msgspec

from baton.router.api.prepared import ID_TYPE, Assignment, Document, PreparedJob
from baton.router.api.settings import ApiSettings
from baton.router.preparation.limits import BodyLimits

LENGTH_BYTES = 4


class ModelSetup(msgspec.Struct, frozen=True):
    """A model that bodies may be for."""

    directory: str
    """The model's directory, which has its tokenizer."""
    settings: ApiSettings
    name: str = "the model"
    """The name by which messages call the model."""


class Setup(msgspec.Struct, frozen=True):
    """The settings that hold for every body."""

    models: tuple[ModelSetup, ...]
    """The models, in the order of all menus."""
    limits: BodyLimits
    niceness: int = 0
    eager: bool = False
    """Whether all models are loaded before the process is ready; otherwise the first one is, and others are
    when a body asks for them."""


class TemplateTrial(msgspec.Struct, frozen=True, array_like=True, tag="trial"):
    """The question whether the chat template of a model renders a short message."""

    model: int
    """The model's place in all menus."""


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


class Tried(msgspec.Struct, frozen=True, tag="tried"):
    """The end of a trial in time."""

    error: str | None
    """Why the template does not render the message; None if it does, or if there is no template."""


class Said(msgspec.Struct, frozen=True):
    """The answer to one question."""

    result: Packed | Document | RefusedBody | Tried
    ends: bool = False
    """Whether this process answers nothing more, so that another takes its place."""


Question: TypeAlias = Assignment | TemplateTrial

Content: TypeAlias = msgspec.Struct | bytes


def frame(content: Content) -> bytes:
    """Return ``content`` behind its length."""
    body = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    return length_of(body) + body


def length_of(body: bytes) -> bytes:
    """Return the length prefix of ``body``."""
    return len(body).to_bytes(LENGTH_BYTES)


READY = frame(b"")
"""The first frame of a process."""
