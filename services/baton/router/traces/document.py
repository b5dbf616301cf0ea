"""A trace as a JSON document, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from baton.router.placement import WorkerReport
from baton.router.placement.policy import Candidate
from baton.router.traces.phases import MEANING, earliest_token, phases_of, time_to_first_token
from baton.router.traces.record import AnswerTrace, Attempt, Placed, RequestTrace

Document = dict[str, object]


def summary_of(trace: RequestTrace, *, workers: bool = True) -> Document:
    """Return the entry of one request in a list. ``workers``: with the workers of its last attempt."""
    return _summary(trace.seen(), workers)


def _summary(trace: RequestTrace, workers: bool) -> Document:
    now = time.perf_counter()
    first = earliest_token(trace)
    told: Document = {
        "request_id": trace.request_id,
        "client_request_id": trace.origin.client_id,
        "endpoint": trace.endpoint,
        "model": trace.model,
        "tenant": trace.tenant,
        "arrived": datetime.fromtimestamp(trace.wall, UTC).isoformat(timespec="milliseconds"),
        "outcome": trace.outcome,
        "prompt_tokens": trace.prompt_tokens,
        "completion_tokens": sum(each.tokens for each in trace.delivered),
        "ttft_ms": None if first is None else _ms(first),
        "e2e_ms": _ms((now if trace.ended is None else trace.ended) - trace.arrived),
        "num_attempts": max((len(each.attempts) + each.left_out for each in trace.answers), default=0),
    }
    if workers:
        last = next((each.attempts[-1] for each in trace.answers if each.attempts), None)
        told |= {
            "prefill": None if last is None else last.prefill,
            "decode": None if last is None else last.decode,
        }
    return told


def document_of(trace: RequestTrace, *, workers: bool = True) -> Document:
    """Return the document of a whole trace. ``workers``: with the workers' addresses, and why each was
    chosen."""
    now, trace = time.perf_counter(), trace.seen()
    span = trace.origin.span
    return {
        **_summary(trace, workers),
        "trace_id": None if span is None else f"{span.trace_id:032x}",
        "choices": [_choice(trace, answer, now, workers) for answer in trace.answers],
    }


def _choice(trace: RequestTrace, answer: AnswerTrace, now: float, workers: bool) -> Document:
    delivered = trace.delivered[answer.index] if trace.delivered else None
    ttft = time_to_first_token(trace, answer)
    tokens = 0 if delivered is None else delivered.tokens
    steps = delivered.last - delivered.first if delivered is not None and tokens > 1 else None
    return {
        "index": answer.index,
        "tokens": tokens,
        "ttft_ms": None if ttft is None else _ms(ttft),
        "tpot_ms": None if steps is None else _ms(steps / (tokens - 1)),
        "phases": [
            {
                "name": phase.name,
                "meaning": MEANING[phase.name],
                "attempt": phase.attempt,
                "start_ms": _ms(phase.start),
                "ms": _ms(phase.seconds),
            }
            for phase in phases_of(trace, answer, now)
        ],
        "attempts": [_attempt(attempt, trace.arrived, workers) for attempt in answer.attempts],
        "attempts_left_out": answer.left_out,
    }


def _attempt(attempt: Attempt, arrived: float, workers: bool) -> Document:
    told: Document = {
        "number": attempt.number,
        "submitted_ms": _ms(attempt.submitted - arrived),
        "started_ms": None if attempt.started is None else _ms(attempt.started - arrived),
        "ended_ms": None if attempt.ended is None else _ms(attempt.ended - arrived),
        "handed_on": attempt.prefill is not None,
    }
    if attempt.compute is not None:
        compute = attempt.compute
        told |= {"cached_tokens": compute.cached_tokens, "preemptions": compute.preemptions}
    if attempt.handoff is not None:
        handoff = attempt.handoff
        told["handoff"] = {
            "connector": handoff.connector,
            "room_ms": _ms(handoff.room),
            "wait_ms": _ms(handoff.wait),
            "grant_ms": _ms(handoff.grant),
            "transfer_ms": _ms(handoff.transfer),
            "flush_ms": _ms(handoff.flush),
            "commit_ms": _ms(handoff.commit),
        }
    if workers:
        placement = _placement(attempt.placed)
        told |= {"prefill": attempt.prefill, "decode": attempt.decode, "why": attempt.why}
        told["placement"] = placement
    elif attempt.why:
        told["why"] = attempt.why.partition(":")[0]
    return told


def _placement(placed: Placed) -> Document:
    return {
        "tokens": placed.num_tokens,
        "considered": [_candidate(each) for each in placed.considered],
        "workers": [_inputs(report) for report in placed.reports],
    }


def _candidate(candidate: Candidate) -> Document:
    """Return one placement considered, with its scores. The first of the list is the chosen one."""
    return {
        "prefill": candidate.prefill,
        "decode": candidate.decode,
        "cached_tokens": candidate.cached,
        "cost_ms": _ms(candidate.cost_s),
        "ttft_ms": _ms(candidate.ttft_s),
        "queue_ms": _ms(candidate.queue_s),
        "compute_ms": _ms(candidate.compute_s),
        "handoff_ms": _ms(candidate.handoff_s),
        "wait_ms": _ms(candidate.wait_s),
        "itl_ms": _ms(candidate.itl_s),
        "stream_ms": _ms(candidate.stream_s),
        "harm_ms": _ms(candidate.harm_s),
    }


def _inputs(report: WorkerReport) -> Document:
    """Return what was known of a worker when the placement considered it."""
    known: Mapping[str, object] = report._asdict()
    inputs = {name: value for name, value in known.items() if name != "last_given_s"}
    return inputs | {"unlinked": sorted(report.unlinked)}


def server_timing(trace: RequestTrace) -> str:
    """Return the header Server-Timing: where the time of the first choice went, as browsers show it."""
    times: dict[str, float] = {}
    for phase in phases_of(trace, trace.answers[0], time.perf_counter()):
        part = phase.name.partition(".")[0]
        times[part] = times.get(part, 0.0) + phase.seconds
    return ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in times.items())


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
