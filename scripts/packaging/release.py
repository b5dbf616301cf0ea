"""Build all that a release publishes, and say what it would push.

    scripts/release [--output build/release] [--registry ADDRESS] [--repository ADDRESS] [--no-dry-run]

Into the folder come: wheel and sdist (checked by twine, and the sdist builds the same wheel), the chart as an
OCI package, the images' archives, an SBOM for each kind of installation (CycloneDX, from the metadata of what
pip installed), provenance (an in-toto statement with SLSA's predicate, unsigned) and SHA256SUMS. What cannot
be done here is named with the reason. Nothing is pushed without ``--no-dry-run``, which refuses a tree that
differs from its commit, and any skipped step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

import baton
from scripts.packaging import images, provenance
from scripts.packaging.distributions import ROOT, DiffersError, Distributions, built, sha256
from scripts.packaging.environments import Environment

CONSTRAINTS = ROOT / "constraints.txt"
INSTALLATIONS: dict[str, tuple[str, ...]] = {"router": (), "worker": ("worker",)}
"""Kinds of installation with an SBOM each, and their extras."""
SUMS = "SHA256SUMS"
"""The file that also marks a folder as a run's: it is empty until all is made."""
_OURS = re.compile(r"(?:[0-9a-f]{64}  baton[^\n/]*\n)*")


def main() -> int:
    chosen = _options()
    output = chosen.output.resolve()
    console = Console(width=140, highlight=False)
    source = _source(chosen.repository)
    if not chosen.dry_run and (reason := _not_releasable(chosen, source)):
        console.print(f"not released: {reason}")
        return 1
    if reason := not_to_be_emptied(output):
        console.print(f"not built: --output: {output} {reason}", soft_wrap=True)
        return 1
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / SUMS).touch()
    with tempfile.TemporaryDirectory() as scratch:
        release = _Release(output, chosen.registry, chosen.index, source, Path(scratch), console)
        try:
            release.build()
        except (DiffersError, subprocess.CalledProcessError) as error:
            console.print(f"FAILED: {error}", soft_wrap=True)
            return 1
        return release.push(dry_run=chosen.dry_run)


def not_to_be_emptied(folder: Path) -> str:
    """Return why a resolved path may not be emptied for a run; empty if it may, or is not there."""
    if ROOT.is_relative_to(folder):
        return "holds the repository"
    if not folder.exists():
        return ""
    if not folder.is_dir():
        return "is no folder"
    sums = folder / SUMS
    if any(folder.iterdir()) and not (sums.is_file() and _OURS.fullmatch(sums.read_text(errors="replace"))):
        return f"holds other files than an earlier run's: it has no {SUMS} of one"
    return ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "release", help="emptied first")
    parser.add_argument("--registry", default="REGISTRY", help="of images and of the chart")
    parser.add_argument("--repository", default="REPOSITORY", help="the sources' address, for the provenance")
    parser.add_argument("--index", default="pypi", help="what twine calls the package index")
    parser.add_argument("--no-dry-run", dest="dry_run", action="store_false", help="push")
    return parser.parse_args()


def _tools() -> list[str]:
    """Return what the extra ``release`` needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [str(requirement) for requirement in project["optional-dependencies"]["release"]]


def _source(repository: str) -> provenance.Source:
    """Return the commit of this checkout, and the files that differ from it."""
    changed = tuple(line[3:] for line in _git("status", "--porcelain").splitlines())
    return provenance.Source(repository, _git("rev-parse", "HEAD"), changed)


def _not_releasable(chosen: argparse.Namespace, source: provenance.Source) -> str:
    """Return what a release lacks; empty if it may be pushed."""
    for name in ("registry", "repository"):
        if getattr(chosen, name) == name.upper():
            return f"--{name} is needed"
    if source.changed:
        return f"{len(source.changed)} files differ from {source.commit[:12]}: {source.changed[0]} ..."
    return ""


def _git(*arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.rstrip()


@dataclass
class _Release:
    """Files in ``output``, and the commands that would publish them."""

    output: Path
    registry: str
    index: str
    source: provenance.Source
    scratch: Path
    console: Console
    pushes: list[list[str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def build(self) -> None:
        """Make all files. Raises CalledProcessError or DiffersError where a step fails."""
        began = datetime.now(UTC)
        tools = Environment.made(Path(sys.executable), self.scratch / "tools")
        tools.install(*_tools(), constraints=CONSTRAINTS)
        distributions = self._distributions(tools)
        self._chart(tools)
        self._images(began)
        for name, extras in INSTALLATIONS.items():
            self._sbom(tools, distributions.wheel, name, extras)
        self._provenance(began)

    def push(self, *, dry_run: bool) -> int:
        """Run the commands that publish, or print them. Returns the exit status."""
        for reason in self.skipped:
            self.console.print(f"SKIPPED    {reason}", soft_wrap=True)
        if not dry_run and self.skipped:
            self.console.print("not pushed: a release is whole")
            return 1
        for command in self.pushes:
            self.console.print(
                f"{'would run' if dry_run else 'running'}  {shlex.join(command)}", soft_wrap=True
            )
            if not dry_run:
                programs = f"{self.scratch / 'tools' / 'bin'}{os.pathsep}{os.environ['PATH']}"
                subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PATH": programs})
        return 0

    def _distributions(self, tools: Environment) -> Distributions:
        found = built(tools, self.output)
        files = [str(found.wheel), str(found.sdist)]
        tools.called("twine", "check", "--strict", *files)
        self._made(found.wheel, "the sdist builds the same")
        self._made(found.sdist, "twine check passed")
        self.pushes.append(["twine", "upload", "--repository", self.index, *files])
        return found

    def _chart(self, tools: Environment) -> None:
        version = baton.__version__
        tools.called("helm", "lint", "--quiet", str(ROOT / "helm" / "baton"))
        tools.called("helm", "package", str(ROOT / "helm" / "baton"), "--destination", str(self.output))
        archive = self.output / f"baton-{version}.tgz"
        self._made(archive, "helm lint passed")
        self.pushes.append(["helm", "push", str(archive), f"oci://{self.registry}/charts"])

    def _images(self, created: datetime) -> None:
        reason = images.no_docker()
        for kind in images.KINDS:
            tag = kind.tag(self.registry, baton.__version__)
            command = kind.build(
                self.registry, baton.__version__, self.source.commit, created.isoformat(timespec="seconds")
            )
            self.pushes.append(["docker", "push", tag])
            if reason:
                self.skipped.append(f"{tag}: {reason}; it would be built by {shlex.join(command)}")
                continue
            subprocess.run(command, cwd=ROOT, check=True)
            archive = self.output / f"{kind.name}{kind.tag_suffix}-{baton.__version__}.tar"
            subprocess.run(["docker", "save", "--output", archive, tag], check=True)
            self._made(archive, tag)

    def _sbom(self, tools: Environment, wheel: Path, name: str, extras: tuple[str, ...]) -> None:
        """Install the wheel with ``extras`` and list what that brought."""
        installed = Environment.made(Path(sys.executable), self.scratch / name)
        requirement = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
        installed.install(requirement, constraints=CONSTRAINTS)
        installed.run("-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip")
        path = self.output / f"baton-{baton.__version__}-{name}.cdx.json"
        options = ("--output-reproducible", "--output-format", "JSON", "--output-file", str(path))
        tools.called("cyclonedx-py", "environment", *options, str(installed.python))
        text = path.read_text().replace(
            wheel.resolve().as_uri(), wheel.name
        )  # not where it lay when this ran
        path.write_text(text)
        document = json.loads(text)
        self._made(path, f"{len(document['components'])} packages")

    def _provenance(self, began: datetime) -> None:
        files = sorted(file for file in self.output.iterdir() if file.name != SUMS)
        parameters: dict[str, object] = {"version": baton.__version__, "registry": self.registry}
        told = provenance.statement(files, self.source, parameters, began, datetime.now(UTC))
        path = self.output / f"baton-{baton.__version__}.intoto.json"
        path.write_text(json.dumps(told, indent=1) + "\n")
        self._made(path, f"{len(files)} files of {self.source.commit[:12]}")
        sums = "".join(f"{sha256(file)}  {file.name}\n" for file in [*files, path])
        (self.output / SUMS).write_text(sums)

    def _made(self, path: Path, remark: str) -> None:
        self.console.print(f"made       {path.name:34}  {path.stat().st_size / 1e6:7.2f} MB  {remark}")


if __name__ == "__main__":
    sys.exit(main())
