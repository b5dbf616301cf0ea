"""The report of a run in Markdown, from its files alone. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from loadtest.gpu.plan import PARTS
from loadtest.gpu.results import NOT_RUN, OK, Found, PartRun, Value
from loadtest.gpu.targets import TARGETS


def report(found: Found) -> str:
    """Return the whole page."""
    sections = [head(found), targets(found), parts(found)]
    sections += [section for run in in_order(found) for section in tables(run)]
    return "\n".join(sections)


def in_order(found: Found) -> list[PartRun]:
    """Return the parts that ran, in the order of the plan; others behind them."""
    names = [part.name for part in PARTS]
    known = [found.parts[name] for name in names if name in found.parts]
    return known + [run for name, run in found.parts.items() if name not in names]


def head(found: Found) -> str:
    dates = sorted(float(call["at"] or 0) for call in found.calls)
    date = time.strftime("%Y-%m-%d", time.gmtime(dates[0] if dates else None))
    versions = found.rows("versions", "Versions")
    card = next((row["is"] for row in versions if row["what"] == "device"), "unknown device")
    dry = any(call["dry"] for call in found.calls)
    lines = [f"# {'A dry run' if dry else card}, {date}", ""]
    if dry:
        lines += ["Nothing was measured: tiny shapes on a CPU, to see that the measurement runs.", ""]
    lines += [f"- {row['what']}: {row['is']}" for row in versions]
    lines += [f"- Command: `{call['command']}`" for call in found.calls]
    return "\n".join([*lines, ""])


def targets(found: Found) -> str:
    rows = []
    for target in TARGETS:
        value, verdict = target.verdict(found)
        wanted = f"{'at least' if target.at_least else 'at most'} {target.wanted:g}"
        why = f" ({reason_of(found, target.part)})" if value is None else ""
        rows.append((target.name, cell(value), wanted, f"{verdict}{why}"))
    return "\n".join(["## Targets", "", *table(("figure", "is", "wanted", ""), rows), ""])


def reason_of(found: Found, part: str) -> str:
    run = found.parts.get(part)
    if run is None:
        return f"{part} did not run"
    if run.status == OK:
        return f"{part} has no such row"
    return f"{part}: {run.status}{f', {run.reason}' if run.reason else ''}"


def parts(found: Found) -> str:
    """Return the table of all parts, with the reason for each that is missing or not whole."""
    rows = []
    for part in PARTS:
        run = found.parts.get(part.name) or PartRun(part.name, NOT_RUN, "not asked for")
        rows.append((run.part, run.status, f"{run.seconds:.1f}", run.reason))
    rows += [
        (run.part, run.status, f"{run.seconds:.1f}", run.reason)
        for run in in_order(found)
        if run.part not in {part.name for part in PARTS}
    ]
    return "\n".join(["## Parts", "", *table(("part", "ended", "seconds", "reason"), rows), ""])


def tables(run: PartRun) -> Iterable[str]:
    """Yield the tables of a part, and what is missing in it."""
    for title, rows in run.tables().items():
        if (run.part, title) == ("versions", "Versions"):
            continue
        notes = [note for text in run.texts(title) for note in (text, "")]
        if run.status != OK:
            notes += [f"The part did not end well ({run.status}): rows may be missing.", ""]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[cell(row.get(column)) for column in columns] for row in rows]
        yield "\n".join([f"## {title} ({run.part})", "", *notes, *table(columns, cells), ""])
    missing = [record for record in run.records if record["record"] == "missing"]
    if missing:
        lines = [f"- {record['what']}: {one_line(record['reason'])}" for record in missing]
        yield "\n".join([f"## Not measured ({run.part})", "", *lines, ""])


def one_line(value: Value) -> str:
    return " ".join(str(value).split())


def cell(value: Value) -> str:
    """Return a figure with as many digits as mean something."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value == 0 or abs(value) >= 1000:
            return f"{value:.0f}"
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return one_line(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(one_line(text).replace('|', '/') for text in cells)} |"

    return [line(columns), line(["---"] * len(columns)), *map(line, rows)]
