"""Wheel and sdist: built, compared, looked into."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from scripts.packaging.environments import Environment, clean_environment

ROOT = Path(__file__).parents[2]
WHEEL_LIMIT = 15_000_000
"""The most bytes of the wheel."""


class DiffersError(Exception):
    """The sdist builds another wheel than the repository."""


@dataclass(frozen=True, slots=True)
class Distributions:
    """What a release uploads."""

    wheel: Path
    sdist: Path


def built(tools: Environment, folder: Path, source: Path = ROOT) -> Distributions:
    """Build the sdist of ``source``, and the wheel from the sdist, into ``folder``.

    ``tools`` has ``build`` and ``hatchling``. Raises DiffersError if ``source`` itself builds another wheel,
    bit for bit.
    """
    _build(tools, source, folder)
    distributions = Distributions(_only(folder, "*.whl"), _only(folder, "*.tar.gz"))
    direct = folder / "direct"
    _build(tools, source, direct, "--wheel")
    [wheel] = direct.iterdir()
    same = sha256(wheel) == sha256(distributions.wheel)
    wheel.unlink()
    direct.rmdir()
    if not same:
        raise DiffersError(f"{distributions.sdist.name} builds another {wheel.name} than {source}")
    return distributions


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents(wheel: Path) -> dict[str, int]:
    """Return the files of a wheel with their sizes in bytes, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.file_size for entry in archive.infolist()}


def _build(tools: Environment, source: Path, folder: Path, *options: str) -> None:
    command = [str(tools.python), "-m", "build", "--no-isolation", *options]
    command += ["--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=clean_environment())


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileExistsError(f"{folder} has {len(found)} of {pattern}, and must have the new one only")
    return found[0]
