"""The program that reads bodies for ``baton.router.preparation.pool``:
``python -m baton.router.preparation.program PARENT``.

It reads frames from standard input and answers on standard output, in the format of ``frames``. A body that
takes too long or too much memory ends this process, or its answer, and nothing else.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from baton.process.parent_death import exit_with_parent
from baton.router.api.errors import ApiError, RequestError, in_short
from baton.router.api.http.preparing.prepare import BodyReader, ModelPreparers
from baton.router.api.prepared import Assignment, Document
from baton.router.preparation.frames import (
    LENGTH_BYTES,
    READY,
    Packed,
    Question,
    RefusedBody,
    Said,
    Setup,
    TemplateTrial,
    Tried,
    frame,
)
from baton.router.preparation.limits import OUT_OF_MEMORY, RENEW_BYTES, TOO_MUCH_MEMORY
from baton.text.config import Json
from baton.text.errors import ChatTemplateError, TextTooLongError
from baton.text.tokenizer import Tokenizer

TRIAL_MESSAGES: list[Mapping[str, Json]] = [{"role": "user", "content": "Hello"}]


class Models:
    """The preparers of each model, loaded for its first body."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup.models
        self._loaded: dict[int, ModelPreparers] = {}
        self.memory = _Memory()
        self.resident_bytes = 0
        """The memory of the process when it had loaded a model last, in bytes."""
        for place in range(len(self._setup)) if setup.eager else (0,):
            self(place)

    def __call__(self, place: int) -> ModelPreparers:
        if place not in self._loaded:
            model = self._setup[place]
            tokenizer = Tokenizer.from_dir(Path(model.directory))
            if tokenizer.chat_template is not None:
                tokenizer.chat_template.compile()
            self._loaded[place] = ModelPreparers.of(tokenizer, model.settings)
            gc.freeze()  # the tokenizer stays: no collection need look at it
            self.resident_bytes = self.memory.bytes(_RESIDENT)
        return self._loaded[place]


class Answerer:
    """Answers the questions of a router."""

    def __init__(self, setup: Setup) -> None:
        self.models = Models(setup)
        self._limits = setup.limits
        self._reader = BodyReader(
            self.models,
            bounded=self._rendering,
        )

    def answer(self, question: Question, body: bytes) -> Said:
        """Return the answer to ``question``. Takes this process's life if that takes too much time."""
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_s)
        try:
            if isinstance(question, TemplateTrial):
                return Said(Tried(self._tried(question.model)))
            return self._read(question, body)
        except MemoryError:
            return Said(RefusedBody(400, TOO_MUCH_MEMORY, None, "request_too_complex"), ends=True)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _read(self, assignment: Assignment, body: bytes) -> Said:
        """Return the request that ``body`` asks for, or the error for its client."""
        try:
            found = self._reader.prepare(assignment, body)
            return Said(found if isinstance(found, Document) else Packed.of(found))
        except RequestError as error:
            return Said(RefusedBody(400, error.message, error.param, error.code))
        except ApiError as error:
            return Said(RefusedBody(error.status, error.message, error.param, error.code))

    def _tried(self, place: int) -> str | None:
        template = self.models(place).tokenizer.chat_template
        if template is None:
            return None
        try:
            with self._rendering():
                template.render(TRIAL_MESSAGES)
        except (ChatTemplateError, TextTooLongError) as error:
            return in_short(str(error))
        return None

    @contextmanager
    def _rendering(self) -> Iterator[None]:
        """Bound what a template does by the signal that tells it from the rest of a body."""
        signal.setitimer(signal.ITIMER_VIRTUAL, self._limits.render_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer questions until ``source`` ends."""
    content = _read_frame(source)
    if content is None:
        return
    setup = msgspec.msgpack.decode(content, type=Setup)
    os.nice(setup.niceness)
    _bound_addresses(setup.limits.address_bytes)
    answerer = Answerer(setup)
    memory = answerer.models.memory
    if setup.limits.beside_bytes is not None:
        most = memory.bytes(_ADDRESSES) + setup.limits.beside_bytes
        _bound_addresses(min(most, setup.limits.address_bytes))
    _write(target, READY)
    questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
    while (content := _read_frame(source)) is not None and (body := _read_frame(source)) is not None:
        said = answerer.answer(questions.decode(content), body)
        del body
        ends = said.ends or memory.bytes(_RESIDENT) > answerer.models.resident_bytes + RENEW_BYTES
        _write(target, frame(msgspec.structs.replace(said, ends=ends)))
        if ends:
            return
        del said
        gc.collect()


def _write(target: BinaryIO, content: bytes) -> None:
    target.write(content)
    target.flush()


def _bound_addresses(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read_frame(source: BinaryIO) -> bytes | None:
    """Return the next frame's content; None at the end."""
    header = source.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    size = int.from_bytes(header)
    content = source.read(size)
    return content if len(content) == size else None


_ADDRESSES, _RESIDENT = 0, 1
"""Places in the system's account of a process's memory."""


class _Memory:
    """The memory of this process, in bytes."""

    def __init__(self) -> None:
        path = Path("/proc/self/statm")
        self._account = os.open(path, os.O_RDONLY) if path.exists() else None

    def bytes(self, place: int) -> int:
        if self._account is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # elsewhere in bytes, and the peak
        return int(os.pread(self._account, 128, 0).split()[place]) * resource.getpagesize()


def main() -> None:
    exit_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the router, which closes the pipe
    gc.disable()  # JSON has no cycles; the rest is collected between two bodies
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not look like a frame
    try:
        serve(sys.stdin.buffer, target)
    except MemoryError:  # no memory even to read a question or write an answer
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
