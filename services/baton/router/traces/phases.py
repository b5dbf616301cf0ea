"""The phases of a request, made from its trace: one after the other, without a gap, from arrival to end.

Each stretch lies between two moments of the router's clock. The durations that workers reported fill it, and
the rest is the way there and back (``network``). If the durations are longer than the stretch, they began
before it: the last blocks were already being sent while the first token was still on the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.router.traces.record import AnswerTrace, Attempt, Delivered, RequestTrace

MEANING = {
    "route.read": "parsed, checked, tokenized",
    "route.limits": "its tenant's limits",
    "route.queue": "the queue in front of the ring",
    "route.place": "placed, or waiting for a worker",
    "prefill.network": "to the worker, and the first token back",
    "prefill.link": "until there was a link to decode",
    "prefill.room": "until decode had promised room",
    "prefill.queue": "until the first step with it",
    "prefill.compute": "its prompt was computed",
    "prefill.publish": "until the token left the worker",
    "prefill.untold": "at a worker that told nothing",
    "deliver": "the first token, to the client",
    "handoff.network": "between the workers, and back",
    "handoff.flush": "the last blocks were sent",
    "handoff.commit": "until it was decode's",
    "handoff.untold": "until decode's first token",
    "decode.network": "the second token, to the router",
    "decode.queue": "until decode's first step with it",
    "decode.first_step": "that step",
    "decode.publish": "until its token left the worker",
    "decode.steps": "the rest of the answer",
    "resume": "until the next attempt",
    "finish": "after the choice's last token",
}
"""All phases and their meanings, in the order in which they come."""


class Phase(NamedTuple):
    """One phase: its start, in seconds since the request's arrival, and its length in seconds."""

    name: str
    attempt: int | None
    """The attempt of the phase. None: before the first attempt or between attempts."""
    start: float
    seconds: float


_Parts = Sequence[tuple[str, float]]
"""Names of phases with their seconds, as a worker reported them."""


class _Stretch(NamedTuple):
    end: float
    rest: str
    parts: _Parts = ()


class _Chain:
    def __init__(self, at: float) -> None:
        self._origin = self._at = at
        self.phases: list[Phase] = []

    def until(self, stretch: _Stretch, attempt: int | None = None) -> None:
        """Append the phases of ``stretch`` up to its end. A stretch that ends before the last one adds
        none."""
        if stretch.end <= self._at:
            return
        left = stretch.end - self._at
        parts: list[tuple[str, float]] = []
        for name, told in reversed(stretch.parts):  # if the parts are too long, the first ones began earlier
            seconds = min(left, told)
            left -= seconds
            parts.append((name, seconds))
        for name, seconds in ((stretch.rest, left), *reversed(parts)):
            if seconds > 0:
                self.phases.append(Phase(name, attempt, self._at - self._origin, seconds))
                self._at += seconds
        self._at = stretch.end


def phases_of(trace: RequestTrace, answer: AnswerTrace, now: float) -> list[Phase]:
    """Return the phases of one choice until its end, or until ``now`` if it goes on. Their lengths add up to
    that time."""
    delivered = trace.delivered[answer.index] if trace.delivered else Delivered(0.0, 0.0, 0)
    end = trace.ended if trace.ended is not None else now
    over = delivered.last if delivered.finished and delivered.last else end
    chain = _Chain(trace.arrived)
    chain.until(_Stretch(min(trace.read, end), "route.read"))
    chain.until(_Stretch(end if trace.admitted is None else trace.admitted, "route.limits"))
    chain.until(_Stretch(end if trace.turn is None else trace.turn, "route.queue"))
    before = "route.place"
    for attempt in answer.attempts:
        chain.until(_Stretch(min(attempt.submitted, end), before))
        until = over if attempt.ended is None else min(attempt.ended, over)
        for stretch in sorted(_stretches(attempt, delivered.first, until), key=lambda each: each.end):
            chain.until(stretch, attempt.number)
        before = "resume"
    chain.until(_Stretch(end, "finish" if delivered.finished else before))
    return chain.phases


def time_to_first_token(trace: RequestTrace, answer: AnswerTrace) -> float | None:
    delivered = trace.delivered
    first = delivered[answer.index].first if delivered else 0.0
    return first - trace.arrived if first else None


def earliest_token(trace: RequestTrace) -> float | None:
    """Return the seconds until the first token of all choices; None: there is no token yet."""
    first = [ttft for answer in trace.answers if (ttft := time_to_first_token(trace, answer)) is not None]
    return min(first, default=None)


def _stretches(attempt: Attempt, first: float, until: float) -> Iterator[_Stretch]:
    """Yield the stretches of one attempt, up to ``until``. ``first``: the time the first token was sent to
    the client, by any attempt."""
    join = _join(attempt)
    handoff = _handoff(attempt, join)
    told = attempt.compute
    if told is not None:
        parts = (
            ("prefill.link", told.link),
            ("prefill.room", told.room),
            ("prefill.queue", told.queue),
            ("prefill.compute", told.compute),
            ("prefill.publish", told.publish),
        )
        at = told.at if handoff is None else min(told.at, handoff.end)
        yield _Stretch(min(at, until), "prefill.network", parts)
    if attempt.submitted < first <= until:
        yield _Stretch(first, "deliver" if told or handoff else "prefill.untold")
    for stretch in (handoff, join):
        if stretch is not None:
            yield stretch._replace(end=min(stretch.end, until))
    yield _Stretch(until, _last(attempt, first))


def _handoff(attempt: Attempt, join: _Stretch | None) -> _Stretch | None:
    told = attempt.handoff
    if told is None:
        return None
    at = told.at
    if join is not None:  # the report of the commit may have come after the first step's
        at = min(at, join.end - sum(seconds for _, seconds in join.parts))
    return _Stretch(at, "handoff.network", (("handoff.flush", told.flush), ("handoff.commit", told.commit)))


def _join(attempt: Attempt) -> _Stretch | None:
    told = attempt.join
    if told is None:
        return None
    parts = (("decode.queue", told.queue), ("decode.first_step", told.step), ("decode.publish", told.publish))
    return _Stretch(told.at, "decode.network", parts)


def _last(attempt: Attempt, first: float) -> str:
    """Return the phase that an attempt is in, or was in when it ended."""
    if attempt.prefill is not None:
        if attempt.join is not None:
            return "decode.steps"
        if attempt.handoff is not None:
            return "decode.network"
        return "prefill.untold" if attempt.compute is None else "handoff.untold"
    return "decode.steps" if attempt.compute is not None or first > attempt.submitted else "prefill.untold"
