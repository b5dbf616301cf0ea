"""Where a release's files come from, as an in-toto statement with SLSA's predicate."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from scripts.packaging.distributions import ROOT, sha256

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"


@dataclass(frozen=True, slots=True)
class Source:
    """The commit that a release is built from; ``changed``: files that differ from it, were there any."""

    repository: str
    commit: str
    changed: tuple[str, ...]


def statement(
    files: Sequence[Path], source: Source, parameters: dict[str, object], began: datetime, ended: datetime
) -> dict[str, object]:
    """Return the statement on ``files``, named as they are in their folder. It is not signed."""
    locked = ROOT / "constraints.txt"
    return {
        "_type": STATEMENT,
        "subject": [{"name": file.name, "digest": {"sha256": sha256(file)}} for file in files],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{source.repository}/scripts/release",
                "externalParameters": parameters,
                "internalParameters": {"changed": list(source.changed)},
                "resolvedDependencies": [
                    {"uri": f"git+{source.repository}", "digest": {"gitCommit": source.commit}},
                    {"uri": locked.name, "digest": {"sha256": sha256(locked)}},
                ],
            },
            "runDetails": {
                "builder": {
                    "id": f"{source.repository}/scripts/release",
                    "version": {"python": platform.python_version(), "system": platform.system()},
                },
                "metadata": {"startedOn": _time(began), "finishedOn": _time(ended)},
            },
        },
    }


def _time(when: datetime) -> str:
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")
