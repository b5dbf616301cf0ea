"""Estimates, in seconds, of what the next request costs on a worker: the part that does not depend on the
prompt, computed once for each report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_not

from baton.core.role import Role
from baton.router.placement.options import MIN_ROW_SHARE, PlacementOptions, Speeds
from baton.router.placement.report import WorkerReport

UNBOUNDED = 1 << 60
BEYOND_S = 1e6
NOISE = 1.25
"""The factor by which a measured speed may differ from the usual one by noise alone."""
FIRST_SPEEDS = Speeds()


@dataclass(slots=True, eq=False)
class Estimate:
    """The estimates for one worker; formulas in docs/routing.md. Immutable by convention: a frozen class is
    slower, and many are made and read for each decision."""

    report: WorkerReport
    address: str
    role: Role
    group: str
    takes_from: tuple[str, ...]
    verifies: bool
    unlinked: frozenset[str]
    accepts: bool
    token_s: float
    """The time to compute one prompt token while nothing else runs."""
    queue_s: float
    """The time until the queued prompts are computed."""
    itl_s: float
    """The time of a step with one more sequence."""
    stream_s: float
    """The time of an answer from its first token on, plus the delay that it adds to the other answers."""
    penalty_s: float
    """The penalty that ranks the worker last if one more sequence would make its steps exceed the target."""
    seat_s: float
    """The time until a sequence may run."""
    room_tokens: int
    """Tokens that fit in the block pool now."""
    missing_s: float
    """The time until a full pool has room for one more token."""
    local_token_s: float
    """The time to compute one prompt token between the decode steps of the running streams."""
    local_queue_s: float
    mixed_itl_s: float
    """The time of a step that computes as much of a prompt as it may and decodes all streams."""
    harm_s: float
    """The delay that one prompt token computed there adds, summed over all streams."""
    takes_local: bool
    """Whether a prompt may be computed there without hurting the streams beyond the target."""
    kv_token_s: float
    """The time to send the KV of one token over a link of this worker."""
    decode_s: float
    """The cost of an answer there, without its prompt."""
    local_s: float
    """The cost of an answer there, without its own prompt, after the queued prompts are computed there."""
    local_rate_s: float
    """The cost of one prompt token computed there: its own time plus the delay of the streams."""

    @classmethod
    def of(cls, report: WorkerReport, options: PlacementOptions, usual: Speeds = FIRST_SPEEDS) -> Estimate:
        """Estimate from a report. ``usual``: the speeds that replace those the worker has not measured."""
        token_s = 1.0 / _told_apart(report.prefill_tokens_per_s, usual.tokens_per_s)
        base_s = _told_apart(report.step_base_s, usual.step_base_s)
        row_s = _told_apart(report.step_row_s if report.step_base_s else 0.0, usual.step_row_s)
        row_s = max(row_s, MIN_ROW_SHARE * base_s)
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
            report.takes_from,
            report.verifies,
            report.unlinked,
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
    """Return the measured speed, or the usual one if the difference may be noise: workers that are alike are
    then equals, and take turns."""
    return usual if not measured or usual / NOISE < measured < usual * NOISE else measured


CHANGE = 0.1
"""The relative change of a usual speed at which all estimates are computed again."""
WEIGHT = 0.1
"""The weight of the newest report in the usual speeds."""


class Estimates:
    """The estimates of all workers that were compared and are not forgotten."""

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options
        self._known: dict[str, Estimate] = {}
        self._seen = Speeds()
        """The smoothed speeds that workers have measured."""
        self._usual = Speeds()
        """The usual speeds: ``_seen`` without small changes, so that all compared workers have the same."""
        self._last: Sequence[WorkerReport] = ()
        """The reports of the last call."""
        self._made: list[Estimate] = []
        """The estimates for ``_last``, in its order."""

    def of(self, reports: Sequence[WorkerReport]) -> Sequence[Estimate]:
        """Return an estimate for each report, in order; the list is valid until the next call.

        Most reports are the same objects as in the last call, at the same indexes: no Python step is spent on
        them. ``reports`` is kept, and must not be changed.
        """
        news: Iterable[int] = range(len(reports))
        if len(reports) == len(self._last):
            news = list(compress(news, map(is_not, reports, self._last)))
        usual = self._usual
        self._take_in([reports[at] for at in news])
        if usual is not self._usual or len(reports) != len(self._made):
            self._made = [self._known[report.address] for report in reports]
        else:
            for at in news:
                self._made[at] = self._known[reports[at].address]
        self._last = reports
        return self._made

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._known.pop(worker, None)
        self._last = ()

    def _take_in(self, reports: Iterable[WorkerReport]) -> None:
        """Count each new report once in the usual speeds, then make its estimate with them."""
        known = self._known
        news = {
            report.address: report
            for report in reports
            if report.address not in known or known[report.address].report is not report
        }
        for report in news.values():
            self._seen = _smoothed(self._seen, report)
        if any(abs(now - then) > CHANGE * then for now, then in zip(self._seen, self._usual, strict=True)):
            self._usual = self._seen
            news = {address: each.report for address, each in known.items()} | news
        for address, report in news.items():
            known[address] = Estimate.of(report, self._options, self._usual)


def _smoothed(usual: Speeds, report: WorkerReport) -> Speeds:
    first = FIRST_SPEEDS
    row_s = report.step_row_s if report.step_base_s else 0.0
    return Speeds(
        _mean(usual.tokens_per_s, report.prefill_tokens_per_s, first.tokens_per_s),
        _mean(usual.step_base_s, report.step_base_s, first.step_base_s),
        _mean(usual.step_row_s, row_s, first.step_row_s),
        _mean(usual.link_bytes_per_s, report.link_bytes_per_s, first.link_bytes_per_s),
    )


def _mean(before: float, newest: float, guess: float) -> float:
    """Return the smoothed mean. A ``newest`` of 0.0 is not measured. The first measurement replaces the
    guess: otherwise a worker without a measurement would look slower, or faster, than all others for long."""
    if not newest:
        return before
    return newest if before == guess else before + WEIGHT * (newest - before)
