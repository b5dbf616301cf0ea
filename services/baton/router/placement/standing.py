"""What a worker's report means for whoever is placed there next, in seconds: all that does not depend on the
prompt is worked out here, once for each report."""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.placement.options import LEAST_ROW_SHARE, PlacementOptions, Speeds
from baton.router.placement.report import Role, WorkerReport

UNBOUNDED = 1 << 60
BEYOND_S = 1e6
NOISE = 1.25
"""By so much a speed may differ from the usual one for no reason but how it was measured."""
FIRST_SPEEDS = Speeds()


@dataclass(slots=True, eq=False)
class Standing:
    """Formulas: docs/routing.md. Never changed; not frozen, as many are made and read for each decision."""

    report: WorkerReport
    address: str
    role: Role
    group: str
    accepts: bool
    token_s: float
    """To compute one prompt token with nothing beside it."""
    queue_s: float
    """Until the prompts before are computed."""
    itl_s: float
    """A step with one sequence more."""
    stream_s: float
    """What an answer takes there from its first token on, and what it adds to the answers beside it."""
    penalty_s: float
    """Puts it behind all others where one sequence more would make its steps longer than the target."""
    seat_s: float
    """Until there is a seat."""
    room_tokens: int
    """Tokens that fit in the pool now."""
    missing_s: float
    """Until room for one token more is there, once nothing is left."""
    local_token_s: float
    """To compute one prompt token between the steps of the streams there."""
    local_queue_s: float
    mixed_itl_s: float
    """A step that computes as much of a prompt as it may and decodes all streams."""
    harm_s: float
    """What one prompt token computed there adds to the delay of the streams, all together."""
    takes_local: bool
    """Whether a prompt may be computed there without hurting the streams beyond the target."""
    kv_token_s: float
    """To send the KV of one token over a link of this worker."""
    decode_s: float
    """All that an answer costs there, but for its prompt."""
    local_s: float
    """The same, if it has to wait for the prompts before."""
    local_rate_s: float
    """What one prompt token computed there costs: its own time, and the others' delay."""

    @classmethod
    def of(cls, report: WorkerReport, options: PlacementOptions, usual: Speeds = FIRST_SPEEDS) -> Standing:
        """``usual``: what stands in for a speed that the worker has not measured."""
        token_s = 1.0 / _told_apart(report.prefill_tokens_per_s, usual.tokens_per_s)
        base_s = _told_apart(report.step_base_s, usual.step_base_s)
        row_s = _told_apart(report.step_row_s if report.step_base_s else 0.0, usual.step_row_s)
        row_s = max(row_s, LEAST_ROW_SHARE * base_s)
        sequences, outputs = report.sequences, options.expected_outputs
        itl_s = base_s + (sequences + 1) * row_s
        answer_s = outputs * itl_s
        above = sequences + 1 - report.max_running
        seat_s = above * answer_s / report.max_running if above > 0 else 0.0
        step_s = base_s + sequences * row_s if sequences else 0.0
        chunk = max(1, report.mixed_prefill_tokens)
        local_token_s = token_s + step_s / chunk
        mixed_itl_s = step_s + chunk * token_s
        target = options.itl_target_s
        spare = report.blocks_spare
        stream_s = answer_s + outputs * sequences * row_s
        penalty_s = BEYOND_S if target is not None and itl_s > target else 0.0
        decode_s = penalty_s + stream_s + seat_s
        local_queue_s = report.prefill_tokens * local_token_s
        harm_s = sequences * token_s if target is None else 0.0
        return cls(
            report,
            report.address,
            report.role,
            report.group,
            report.accepts,
            token_s,
            report.prefill_tokens * token_s,
            itl_s,
            stream_s,
            penalty_s,
            seat_s,
            UNBOUNDED if spare is None else spare * report.block_size,
            answer_s / max(1, report.blocks_held * report.block_size),
            local_token_s,
            local_queue_s,
            mixed_itl_s,
            harm_s,
            target is None or not sequences or mixed_itl_s <= target,
            report.kv_bytes_per_token / _told_apart(report.link_bytes_per_s, usual.link_bytes_per_s),
            decode_s,
            decode_s + local_queue_s,
            local_token_s + harm_s,
        )


def _told_apart(measured: float, usual: float) -> float:
    """What was measured, unless that may be noise about what is usual: workers that are alike are equals, and
    take turns."""
    return usual if not measured or usual / NOISE < measured < usual * NOISE else measured
