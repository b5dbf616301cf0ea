"""What a request's client says of where it comes from: its own id, and the trace that it is a part of."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1
_RATIO_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span, as W3C's ``traceparent`` names it."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def parse(cls, header: str) -> SpanContext | None:
        """None for what is not one: then, as the standard has it, a trace begins here."""
        found = _TRACEPARENT.fullmatch(header.strip())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
            return None
        trace_id, span_id = int(found[2], 16), int(found[3], 16)
        if not trace_id or not span_id:
            return None
        return cls(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))

    @classmethod
    def begin(cls, ratio: float) -> SpanContext:
        """The first span of a trace of its own, of which ``ratio`` are sampled: by the trace's id, as others
        do that see the same trace."""
        trace_id = secrets.randbits(128) or 1
        return cls(trace_id, secrets.randbits(64) or 1, (trace_id & _RATIO_BITS) < ratio * (_RATIO_BITS + 1))

    def child(self) -> SpanContext:
        return SpanContext(self.trace_id, secrets.randbits(64) or 1, self.sampled)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Of one request."""

    client_id: str | None = None
    """The client's own id of it."""
    parent: SpanContext | None = None
    """The client's span."""
    span: SpanContext | None = None
    """The request's; None: nothing is exported."""


NOWHERE = Origin()
