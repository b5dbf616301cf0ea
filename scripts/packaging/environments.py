"""Virtual environments that know nothing of this repository."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MEASURE = """
import json, pathlib, sys
from importlib.metadata import distributions
sizes = {}
for each in distributions():
    files = [pathlib.Path(each.locate_file(file)) for file in each.files or ()]
    sizes[each.name] = sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc")
json.dump(sizes, sys.stdout)
"""

_LEADS_HERE = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"})


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in ``folder``."""

    folder: Path

    @classmethod
    def made(cls, python: Path, folder: Path) -> Environment:
        """Make a new environment with ``python``."""
        subprocess.run([python, "-m", "venv", folder], check=True, env=clean_environment())
        return cls(folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def python_version(self) -> str:
        return self.run("--version").strip()

    def install(self, *requirements: str, constraints: Path | None = None) -> None:
        """Install with pip; CalledProcessError, after what pip says on standard error, if it cannot."""
        limits = ["-c", str(constraints)] if constraints else []
        self.run("-m", "pip", "install", "--quiet", *requirements, *limits)

    def run(self, *arguments: str) -> str:
        """Run the environment's Python outside of the repository and return its output."""
        return self._output([str(self.python), *arguments])

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return a command line of one of the environment's programs."""
        return [str(self.folder / "bin" / name), *arguments]

    def called(self, name: str, *arguments: str) -> str:
        """Run one of the environment's programs outside of the repository and return its output."""
        return self._output(self.command(name, *arguments))

    def _output(self, command: Sequence[str]) -> str:
        ended = subprocess.run(
            command, cwd=self.folder, env=clean_environment(), stdout=subprocess.PIPE, text=True, check=True
        )
        return ended.stdout

    def has(self, module: str) -> bool:
        """Say whether a top-level module can be imported, without importing it."""
        asked = f"import importlib.util as u; print(u.find_spec({module!r}) is not None)"
        return self.run("-c", asked).strip() == "True"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each package's files, compiled ones apart."""
        found = json.loads(self.run("-c", _MEASURE))
        return {str(name): int(size) for name, size in found.items()}


def clean_environment(**added: str) -> dict[str, str]:
    """Return this process's environment without what would lead Python into the repository."""
    kept = {name: value for name, value in os.environ.items() if name not in _LEADS_HERE}
    return kept | added
