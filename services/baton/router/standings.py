"""What the workers' reports mean, worked out once for each report and not for each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import is_not

from baton.router.placement import PlacementOptions, Standing, WorkerReport
from baton.router.placement.options import Speeds
from baton.router.placement.standing import FIRST_SPEEDS

CHANGE = 0.1
"""Of what is usual, for all to be worked out anew."""
WEIGHT = 0.1
"""Of the newest report in what is usual."""


class Standings:
    """Of all workers that were compared and are not forgotten."""

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options
        self._known: dict[str, Standing] = {}
        self._seen = Speeds()
        """Of the workers that have measured theirs, smoothed."""
        self._usual = Speeds()
        """The same, but for small changes: it is equal for all workers that are compared."""
        self._last: Sequence[WorkerReport] = ()
        """What was asked for last."""
        self._made: list[Standing] = []
        """For those, in their order."""

    def of(self, reports: Sequence[WorkerReport]) -> Sequence[Standing]:
        """One for each, in their order; good until the next call.

        Most reports are the very ones of the last request, and at the same places: no step of Python is spent
        on those. ``reports`` is kept, and not to be changed.
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
        """It is gone."""
        self._known.pop(worker, None)
        self._last = ()

    def _take_in(self, reports: Iterable[WorkerReport]) -> None:
        """Each counts once in what is usual, and all are made with the same."""
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
            known[address] = Standing.of(report, self._options, self._usual)


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
    """``newest`` of 0.0: not measured. What was only guessed before counts for nothing once it is: a worker
    without a measurement would look slower, or faster, than all others for long."""
    if not newest:
        return before
    return newest if before == guess else before + WEIGHT * (newest - before)
