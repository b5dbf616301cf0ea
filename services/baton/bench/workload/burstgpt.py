"""Traces in BurstGPT's format: CSV with a header."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from baton.bench.workload.files import at_line, numbered_lines
from baton.bench.workload.items import Item, PromptPiece, WorkloadError

_TIME, _PROMPT, _ANSWER = "Timestamp", "Request tokens", "Response tokens"
_COLUMNS = (_TIME, _PROMPT, _ANSWER)
_MAX_TOKENS = 10_000_000


def read_burstgpt(path: Path, count: int, seed: int) -> list[Item]:
    """Read the first ``count`` answered requests of a trace: requests with 0 response tokens failed, and are
    skipped. Only ``Timestamp`` (seconds), ``Request tokens`` and ``Response tokens`` are read. Raises
    WorkloadError that names the line."""
    lines = numbered_lines(path)
    number, header = next(lines, (1, ""))
    columns = next(csv.reader([header]), [])
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        raise at_line(
            path, number, f"the header has no column {missing[0]!r}; it must have {', '.join(_COLUMNS)}"
        )
    items: list[Item] = []
    first = 0.0
    for number, text in lines:
        if len(items) == count:
            break
        row = dict(zip(columns, next(csv.reader([text])), strict=False))
        at = _number(path, number, row, _TIME, math.inf)
        prompt = int(_number(path, number, row, _PROMPT, _MAX_TOKENS))
        answer = int(_number(path, number, row, _ANSWER, _MAX_TOKENS))
        if not prompt or not answer:
            continue
        first = first if items else at
        if at < first:
            raise at_line(path, number, f"Timestamp {at:g} is before the first, {first:g}")
        items.append(Item((PromptPiece(f"{seed}-{number}", prompt),), prompt, answer, at - first))
    if not items:
        raise WorkloadError(f"{path}: holds no request that was answered")
    return items


def _number(path: Path, number: int, row: dict[str, str], column: str, most: float) -> float:
    text = row.get(column, "")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most or math.isinf(value) or (column != _TIME and value != int(value)):
        what = "seconds" if column == _TIME else f"a whole number, at most {most:,}"
        raise at_line(path, number, f"{column} is {text!r}; it must be {what}, 0 or more")
    return value
