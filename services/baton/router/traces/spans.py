"""A trace as spans: the request, its attempts, the work of each worker for an attempt, and its phases.

The router makes all spans, from its record. Spans made by workers would be placed by their own clocks, beside
or outside of their parents; these are placed by the router's clock, and are the same figures that
``baton explain`` prints. This module does not import OpenTelemetry.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from baton.router.traces.phases import Phase, phases_of
from baton.router.traces.record import AnswerTrace, Attempt, RequestTrace

Value = str | int | float | tuple[str, ...]

ROUTER, PREFILL, DECODE = "baton-router", "baton-prefill", "baton-decode"
"""The services whose time a span shows."""


@dataclass(slots=True)
class SpanData:
    """One span. ``start`` is in seconds since the request's arrival."""

    name: str
    parent: int | None
    """The id of the parent span. None: the client's span, if there is one."""
    start: float
    seconds: float
    service: str = ROUTER
    instance: str | None = None
    """The worker's address."""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None
    span_id: int = field(default_factory=lambda: secrets.randbits(64) or 1)


def spans_of(trace: RequestTrace) -> list[SpanData]:
    """Return the spans of a request that has ended, parents first. The first is the request's own."""
    span, ended = trace.origin.span, trace.ended
    assert span is not None and ended is not None
    failed = trace.outcome not in ("completed", "cancelled")
    root = SpanData(
        f"POST {trace.endpoint}" if trace.endpoint.startswith("/") else trace.endpoint,
        None,
        0.0,
        ended - trace.arrived,
        attributes={
            "baton.request_id": trace.request_id,
            "baton.outcome": trace.outcome,
            "baton.tenant": trace.tenant,
            "gen_ai.request.model": trace.model,
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(each.tokens for each in trace.delivered),
        },
        error=trace.outcome if failed else None,
        span_id=span.span_id,
    )
    spans = [root]
    for answer in trace.answers:
        phases = phases_of(trace, answer, ended)
        if answer.index:  # the phases before the attempts are common to all choices
            phases = [phase for phase in phases if phase.attempt is not None or phase.name == "resume"]
        spans += _choice(answer, phases, root.span_id, several=len(trace.answers) > 1)
    return spans


def _choice(answer: AnswerTrace, phases: list[Phase], root: int, *, several: bool) -> Iterator[SpanData]:
    attempts = {attempt.number: attempt for attempt in answer.attempts}
    over: dict[int, SpanData] = {}
    groups: dict[tuple[int, str], SpanData] = {}
    for phase in phases:
        if phase.attempt is None:
            yield _of(phase, root)
            continue
        attempt = attempts[phase.attempt]
        if phase.attempt not in over:
            name = f"attempt {attempt.number}" + (f" of choice {answer.index}" if several else "")
            mine = [each for each in phases if each.attempt == phase.attempt]
            over[phase.attempt] = _around(name, mine, root)
            over[phase.attempt].attributes = _why(attempt)
            over[phase.attempt].error = attempt.why or None
            yield over[phase.attempt]
        within = over[phase.attempt].span_id
        part, _, _ = phase.name.partition(".")
        if part == phase.name:
            yield _of(phase, within)
            continue
        group = groups.get((phase.attempt, part))
        if group is None:
            mine = [
                each for each in phases if each.attempt == phase.attempt and each.name.startswith(f"{part}.")
            ]
            group = groups[phase.attempt, part] = _around(part, mine, within)
            group.service, group.instance = _where(part, attempt)
            group.attributes = _told(part, attempt)
            yield group
        span = _of(phase, group.span_id)
        if not phase.name.endswith((".network", ".untold")):
            span.service, span.instance = group.service, group.instance
        yield span


def _of(phase: Phase, parent: int) -> SpanData:
    return SpanData(phase.name, parent, phase.start, phase.seconds)


def _around(name: str, phases: list[Phase], parent: int) -> SpanData:
    first, last = phases[0], phases[-1]
    return SpanData(name, parent, first.start, last.start + last.seconds - first.start)


def _where(part: str, attempt: Attempt) -> tuple[str, str]:
    if part == "prefill" and attempt.prefill is not None:
        return PREFILL, attempt.prefill
    return DECODE, attempt.decode


def _why(attempt: Attempt) -> dict[str, Value]:
    """Return the attributes of a placement: its inputs, and the scores of the candidates."""
    told: dict[str, Value] = {
        "baton.decode": attempt.decode,
        "baton.placement.cost_ms": 1e3 * attempt.placed.chosen.cost_s,
        "baton.placement.expected_ttft_ms": 1e3 * attempt.placed.chosen.ttft_s,
        "baton.placement.considered": tuple(map(str, attempt.placed.considered)),
        "baton.placement.workers": tuple(
            f"{report.address}: {report.role}, {report.prefill_tokens} tokens waiting, "
            f"{report.sequences} sequences, {report.blocks_held} blocks held"
            for report in attempt.placed.reports
        ),
    }
    if attempt.prefill is not None:
        told["baton.prefill"] = attempt.prefill
    return told


def _told(part: str, attempt: Attempt) -> dict[str, Value]:
    """Return the attributes of a part that the worker reported beside its durations."""
    if part == "prefill" and attempt.compute is not None:
        told = attempt.compute
        return {"baton.cached_tokens": told.cached_tokens, "baton.preemptions": told.preemptions}
    if part == "handoff" and attempt.handoff is not None:
        beside = attempt.handoff
        return {
            "baton.connector": beside.connector,
            "baton.handoff.room_ms": 1e3 * beside.room,
            "baton.handoff.wait_ms": 1e3 * beside.wait,
            "baton.handoff.grant_ms": 1e3 * beside.grant,
            "baton.handoff.transfer_ms": 1e3 * beside.transfer,
        }
    return {}
