"""List what images contain, and how large it is, without Docker.

    python -m scripts.image_contents [--image router worker-cpu] [--python 3.12] [--all]

Installs what each Dockerfile installs into an environment of its own, trims it with ``docker/trim``, starts
what is left, and measures it: unpacked, and compressed as the layer of an image. Not measured, as they come
from elsewhere: the base and Debian's g++, whose published sizes are added (``ASSUMED``). Exit status 1 if an
image is over its limit, which is for compressed layers, or does not start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from scripts.packaging import images, pythons
from scripts.packaging.distributions import ROOT
from scripts.packaging.environments import Environment, clean_environment
from scripts.packaging.first_answer import NoAnswerError, free_port, served

CONSTRAINTS = ROOT / "constraints.txt"
SHOWN = 12
PATIENCE_S = 300.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Bytes:
    """Sizes in bytes: on disk, and compressed as in a registry."""

    unpacked: int
    compressed: int

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.unpacked + other.unpacked, self.compressed + other.compressed)

    def __str__(self) -> str:
        return f"{self.unpacked / 1e6:7.1f} MB unpacked {self.compressed / 1e6:7.1f} MB compressed"


ASSUMED = {"python:3.12-slim-bookworm": Bytes(124_000_000, 45_000_000), "g++": Bytes(258_000_000, 75_000_000)}
"""The sizes that Docker Hub and Debian publish, rounded up."""


def main() -> int:
    named = {f"{kind.name.removeprefix('baton-')}{kind.tag_suffix}": kind for kind in images.KINDS}
    chosen = _options(list(named))
    console = Console(width=120, highlight=False)
    python = pythons.found().get(chosen.python)
    if python is None:
        console.print(f"FAILED: Python {chosen.python}: not on this machine")
        return 1
    fine = True
    for name in chosen.image:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                fine &= _told(console, name, named[name], python, Path(scratch), whole=chosen.all)
            except (NoAnswerError, subprocess.CalledProcessError) as error:
                console.print(f"FAILED: {name}: {error}", soft_wrap=True)
                fine = False
    return int(not fine)


def _options(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--image", nargs="+", choices=names, default=["router", "worker-cpu"])
    parser.add_argument("--python", choices=pythons.VERSIONS, default="3.12")
    parser.add_argument("--all", action="store_true", help=f"list all packages, not the {SHOWN} largest")
    return parser.parse_args()


def _told(
    console: Console, name: str, kind: images.ImageKind, python: Path, scratch: Path, *, whole: bool
) -> bool:
    """Install, trim, try and list one image; say whether it is within its limit."""
    environment = _installed(kind, python, scratch / "baton")
    before = _size(environment.folder)
    subprocess.run([ROOT / "docker" / "trim", environment.folder], check=True)
    after = _size(environment.folder)
    packages = environment.sizes()
    _start(environment, kind, scratch)
    console.print(f"\n{name}: {len(packages)} packages with {environment.python_version()}")
    largest = sorted(packages.items(), key=lambda each: -each[1])
    for package, size in largest if whole else largest[:SHOWN]:
        console.print(f"    {package:36} {size / 1e6:7.1f} MB")
    base, compiler = ASSUMED.values()
    total = after + base + (compiler if kind.compiler else Bytes(0, 0))
    console.print(f"  installed              {before}")
    console.print(f"  trimmed                {after}")
    console.print(f"  with base{' and g++' if kind.compiler else '        '}  (assumed) {total}")
    if kind.limit is None:
        return True
    fits = total.compressed <= kind.limit
    console.print(f"  {'within' if fits else 'OVER'} its limit of {kind.limit / 1e6:.0f} MB, compressed")
    return fits


def _installed(kind: images.ImageKind, python: Path, folder: Path) -> Environment:
    """Install as the Dockerfile does: with the pins, compiled, and without pip itself."""
    environment = Environment.made(python, folder)
    requirement = f"{ROOT}[{','.join(kind.extras)}]"
    environment.install(requirement, constraints=CONSTRAINTS)
    environment.run("-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip")
    return environment


def _start(environment: Environment, kind: images.ImageKind, folder: Path) -> None:
    """Start what the image is for, and ask it. Raises NoAnswerError."""
    if "worker" not in kind.extras:
        environment.run("-c", "import baton.router.main, baton.simulated.main, kubernetes.aio.client")
        environment.called("baton", "--version")
        return
    port = free_port()
    command = environment.command("baton", "up", "--port", str(port), "--grpc-port", "-1")
    with served(command, port, folder, clean_environment(), PATIENCE_S) as server:
        server.ask()


def _size(folder: Path) -> Bytes:
    """Measure all files of a folder; compressed one after the other, as in the archive of a layer."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    unpacked = compressed = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    unpacked += len(chunk)
                    compressed += len(packer.compress(chunk))
    return Bytes(unpacked, compressed + len(packer.flush()))


if __name__ == "__main__":
    sys.exit(main())
