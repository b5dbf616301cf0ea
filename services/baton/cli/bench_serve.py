"""``baton bench serve``: measures, shows and writes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from baton.bench.config import ServeConfig
from baton.bench.document import told, write_document
from baton.bench.plots import plot_serve
from baton.bench.serve import ServeResult, serve
from baton.bench.tables import serve_lines, serve_table
from baton.process.options import UserError


def run_serve(config: ServeConfig, json: Path | None, plot: Path | None) -> None:
    """Raises UserError when no request at all was answered."""
    result = serve(config, print)
    for line in serve_lines(result.summary, config.goals, result.left_out):
        print(line)
    Console().print(serve_table(result.summary))
    if json is not None:
        _write(json, config, result)
    if not result.summary.completed:
        failure = next(record.failure for record in result.records if record.failure)
        raise UserError(f"no request was answered; the first failed with {failure.kind}: {failure.message}")
    if plot is not None:
        title = f"{result.served.name}, {config.workload.workload}: {result.summary.requests} requests"
        plot_serve(plot, result.records, config.goals, title)


def _write(path: Path, config: ServeConfig, result: ServeResult) -> None:
    settings = asdict(replace(config, request_rate=None)) | {"request_rate": told(config.request_rate)}
    write_document(
        path,
        "serve",
        settings=settings,
        served=asdict(result.served),
        request=asdict(result.request),
        left_out=result.left_out,
        figures={**asdict(result.summary), "tokens_per_s": result.summary.tokens_per_s},
        requests=[asdict(record) for record in result.records],
    )
