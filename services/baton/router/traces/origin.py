"""The origin of a request, as its client gives it: the client's own id, and the trace the request belongs
to."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1
_RATIO_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span, as W3C's ``traceparent`` identifies it."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def parse(cls, header: str) -> SpanContext | None:
        """Return the span of a ``traceparent``, or None if the header is invalid: a trace then begins here,
        as the standard demands."""
        found = _TRACEPARENT.fullmatch(header.strip())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
            return None
        trace_id, span_id = int(found[2], 16), int(found[3], 16)
        if not trace_id or not span_id:
            return None
        return cls(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))

    @classmethod
    def begin(cls, ratio: float) -> SpanContext:
        """Return the first span of a new trace. A fraction ``ratio`` of the traces is sampled, by the trace's
        id, so that other services decide alike."""
        trace_id = secrets.randbits(128) or 1
        return cls(trace_id, secrets.randbits(64) or 1, (trace_id & _RATIO_BITS) < ratio * (_RATIO_BITS + 1))

    def child(self) -> SpanContext:
        return SpanContext(self.trace_id, secrets.randbits(64) or 1, self.sampled)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of one request."""

    client_id: str | None = None
    """The client's own id of the request."""
    parent: SpanContext | None = None
    """The client's span."""
    span: SpanContext | None = None
    """The request's span. None: nothing is exported."""


NOWHERE = Origin()
