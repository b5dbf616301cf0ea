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
from pathlib import Path
from typing import BinaryIO

import msgspec

from baton.process.parent_death import exit_with_parent
from baton.router.api.errors import ApiError, RequestError
from baton.router.api.http.preparing.prepare import BodyReader, ModelPreparers
from baton.router.api.prepared import Assignment, Document
from baton.router.preparation.frames import LENGTH_BYTES, Packed, RefusedBody, Said, Setup, frame
from baton.router.preparation.limits import NICENESS, OUT_OF_MEMORY, RENEW_BYTES, TOO_MUCH_MEMORY
from baton.text.tokenizer import Tokenizer


class _Models:
    """The preparers of each model, loaded for its first body."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup.models
        self._loaded: dict[int, ModelPreparers] = {}

    def __call__(self, place: int) -> ModelPreparers:
        if place not in self._loaded:
            model = self._setup[place]
            tokenizer = Tokenizer.from_dir(Path(model.directory))
            self._loaded[place] = ModelPreparers.of(tokenizer, model.settings)
            gc.freeze()  # the tokenizer stays: no collection need look at it
        return self._loaded[place]


def answer(reader: BodyReader, assignment: Assignment, body: bytes) -> Said:
    """Return the request that ``body`` asks for, or the error for its client."""
    try:
        found = reader.prepare(assignment, body)
        return Said(found if isinstance(found, Document) else Packed.of(found))
    except RequestError as error:
        return Said(RefusedBody(400, error.message, error.param, error.code))
    except ApiError as error:
        return Said(RefusedBody(error.status, error.message, error.param, error.code))
    except MemoryError:
        return Said(RefusedBody(400, TOO_MUCH_MEMORY, None, "request_too_complex"), ends=True)


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer bodies until ``source`` ends."""
    content = _read_frame(source)
    if content is None:
        return
    setup = msgspec.msgpack.decode(content, type=Setup)
    resource.setrlimit(resource.RLIMIT_AS, (setup.address_bytes, setup.address_bytes))
    models = _Models(setup)
    models(0)  # before the first body; other models when they are asked for
    reader = BodyReader(models)
    assignments = msgspec.msgpack.Decoder(Assignment)
    while (content := _read_frame(source)) is not None and (body := _read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)  # ends this process
        said = answer(reader, assignments.decode(content), body)
        del body
        ends = said.ends or _resident_bytes() > RENEW_BYTES
        told = frame(msgspec.structs.replace(said, ends=ends))
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(told)
        target.flush()
        if ends:
            return
        del said, told
        gc.collect()


def _read_frame(source: BinaryIO) -> bytes | None:
    """Return the next frame's content; None at the end."""
    header = source.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    size = int.from_bytes(header)
    content = source.read(size)
    return content if len(content) == size else None


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on other systems in bytes, and the peak
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    exit_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
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
