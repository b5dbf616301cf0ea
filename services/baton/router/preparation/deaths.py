"""What the end of a process says about the body that it read, and about a chat template."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from baton.router.api.errors import ApiError
from baton.router.preparation.limits import OUT_OF_MEMORY, TOO_MUCH_MEMORY, BodyLimits

_OUT_OF_MEMORY = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV)
"""Exit statuses of a process whose address space was too small: tokenizers abort then, and the JSON decoder
dereferences the allocation that failed."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process with a body."""

    reason: Literal["too_complex", "template", "died"]
    error: ApiError
    """What the client of the body is told."""


def death_of(status: int | None, limits: BodyLimits) -> Death:
    """Return what ``status``, the exit status of a process within ``limits``, says of its body."""
    if status == -signal.SIGVTALRM:
        message = (
            f"The model's chat template takes more than {limits.render_s:g} s for these messages; send "
            "fewer, or simpler ones."
        )
        return Death("template", ApiError(400, message, param="messages", code="request_too_complex"))
    if status == -signal.SIGPROF:
        message = f"The request takes more than {limits.cpu_s:g} s to be read; send less, or simpler values."
        return Death("too_complex", ApiError(400, message, code="request_too_complex"))
    if status in _OUT_OF_MEMORY:
        return Death("too_complex", ApiError(400, TOO_MUCH_MEMORY, code="request_too_complex"))
    if status == -signal.SIGKILL:  # sent by an operator, or by a system short of memory
        message = "The server is overloaded: the process that read the request was ended."
        return Death("died", ApiError(503, message, code="overloaded"))
    message = "The process that read the request has ended; the request may be too large or too complex."
    return Death("died", ApiError(500, message, code="request_not_read"))


def refused_by_trial(status: int | None, limits: BodyLimits) -> str | None:
    """Return what a template did to end a process over one short message; None if it need not have been the
    template."""
    if status in (-signal.SIGVTALRM, -signal.SIGPROF):
        return f"takes more than {limits.render_s:g} s of CPU time"
    if status in _OUT_OF_MEMORY:
        return "takes too much memory"
    return None
