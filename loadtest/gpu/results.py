"""The results of a run: a line of JSON for each, in a file at once, so that whatever ends a part or the whole
run leaves what was found before.

Every record has ``part``, ``record`` (its kind) and ``at`` (seconds since 1970). The parent of the parts
writes ``call``, ``begin`` and ``end``; parts write the rest.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Value = str | int | float | bool | None
Record = Mapping[str, Value]

OK, FAILED, SKIPPED, TIMEOUT, KILLED, NOT_RUN = "ok", "failed", "skipped", "timeout", "killed", "not run"


class SkipPartError(Exception):
    """A part that cannot be run here; the message is the reason."""


@dataclass(frozen=True)
class Results:
    """The file that one part writes to; other processes append to it as well."""

    path: Path
    part: str

    def write(self, record: str, values: Mapping[str, Value]) -> None:
        """Append one record. It is with the system on return."""
        line = json.dumps({"part": self.part, "record": record, "at": round(time.time(), 3), **values})
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)

    def row(self, table: str, **values: Value) -> None:
        """Add a row to the part's table of that title. Numbers are written as they are: the report rounds."""
        self.write("row", {"table": table, **values})

    def note(self, table: str, text: str) -> None:
        """Add a sentence that stands above a table."""
        self.write("note", {"table": table, "text": text})

    def missing(self, what: str, reason: str) -> None:
        """Say why something that belongs to the part was not measured."""
        self.write("missing", {"what": what, "reason": reason})


@dataclass
class PartRun:
    """The last run of a part, read back."""

    part: str
    status: str = NOT_RUN
    reason: str = ""
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)

    def tables(self) -> dict[str, list[Record]]:
        """Return the rows by table, in the order in which they came."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            if record["record"] == "row":
                row = {k: v for k, v in record.items() if k not in ("part", "record", "at", "table")}
                found.setdefault(str(record["table"]), []).append(row)
        return found

    def texts(self, table: str) -> list[str]:
        """Return the notes of a table, each once."""
        notes = (r for r in self.records if r["record"] == "note" and r["table"] == table)
        return list(dict.fromkeys(str(note["text"]) for note in notes))


@dataclass(frozen=True)
class Found:
    """All that the files of a folder hold."""

    calls: list[Record]
    parts: Mapping[str, PartRun]

    def rows(self, part: str, table: str) -> list[Record]:
        run = self.parts.get(part)
        return [] if run is None else run.tables().get(table, [])


def read(folder: Path) -> Found:
    """Read the files of a folder. Of a part that ran several times the last run counts. A line that was cut
    short by the end of its process is left out."""
    records = sorted(_lines(folder.glob("*.jsonl")), key=lambda record: float(record["at"] or 0))
    calls: list[Record] = []
    parts: dict[str, PartRun] = {}
    for record in records:
        part = str(record["part"])
        match record["record"]:
            case "call":
                calls.append(record)
            case "begin":
                parts[part] = PartRun(part, KILLED, "the whole run ended before it did")
            case "end":
                run = parts.setdefault(part, PartRun(part))
                run.status, run.reason = str(record["status"]), str(record["reason"])
                run.seconds = float(record["seconds"] or 0)
            case _:
                parts.setdefault(part, PartRun(part)).records.append(record)
    return Found(calls, parts)


def _lines(files: Iterable[Path]) -> Iterable[Record]:
    for file in files:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue
