"""``scripts/release``: what it says of its files, and what it refuses to push."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scripts.packaging import images, provenance, pythons
from scripts.packaging.distributions import ROOT
from scripts.packaging.release import SUMS, not_to_be_emptied


def test_provenance_names_files_commit_and_pins(tmp_path: Path) -> None:
    file = tmp_path / "baton.whl"
    file.write_bytes(b"wheel")
    source = provenance.Source("https://example.org/baton", "c" * 40, ("README.md",))
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    told = provenance.statement([file], source, {"version": "1"}, when, when)
    assert told["_type"] == "https://in-toto.io/Statement/v1"
    assert told["predicateType"] == "https://slsa.dev/provenance/v1"
    digest = hashlib.sha256(b"wheel").hexdigest()
    assert told["subject"] == [{"name": "baton.whl", "digest": {"sha256": digest}}]
    predicate = told["predicate"]
    assert isinstance(predicate, dict)
    build = predicate["buildDefinition"]
    assert build["internalParameters"] == {"changed": ["README.md"]}
    commit, pins = build["resolvedDependencies"]
    assert commit == {"uri": "git+https://example.org/baton", "digest": {"gitCommit": "c" * 40}}
    assert pins["digest"]["sha256"] == hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()
    assert predicate["runDetails"]["metadata"]["startedOn"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize("kind", images.KINDS, ids=lambda kind: kind.tag("", "1"))
def test_images_are_built_from_their_dockerfiles(kind: images.ImageKind) -> None:
    text = (ROOT / kind.dockerfile).read_text()
    command = kind.build("registry.example", "1.2", "abc", "now")
    assert command[-2:] == [kind.tag("registry.example", "1.2"), "."]
    given = dict(each.split("=", 1) for each in command if re.match(r"[A-Z]+=", each))
    assert set(given) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert given["VERSION"] == "1.2"
    assert ",".join(kind.extras) in text
    assert text.count("docker/trim") == 3


@pytest.mark.parametrize("missing", ["registry", "repository"])
def test_nothing_is_pushed_without_addresses(missing: str) -> None:
    options = {"registry": "registry.example", "repository": "https://example.org"}
    del options[missing]
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "scripts.packaging.release", "--no-dry-run", *given]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert ended.stdout == f"not released: --{missing} is needed\n"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, ""),
        ({SUMS: "", "baton-1.tar.gz": ""}, ""),  # of a run that failed
        ({SUMS: f"{'a' * 64}  baton-1.tar.gz\n", "baton-1.tar.gz": ""}, ""),
        ({"thesis.txt": ""}, "holds other files"),
        ({SUMS: f"{'a' * 64}  debian.iso\n", "debian.iso": ""}, "holds other files"),
    ],
)
def test_only_the_folder_of_an_earlier_run_is_emptied(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert not_to_be_emptied(tmp_path).startswith(reason)
    assert bool(not_to_be_emptied(tmp_path)) is bool(reason)


def test_nothing_that_holds_the_repository_is_emptied(tmp_path: Path) -> None:
    assert not_to_be_emptied(ROOT) == not_to_be_emptied(ROOT.parent) == "holds the repository"
    assert not_to_be_emptied(ROOT / "README.md") == "is no folder"
    assert not_to_be_emptied(ROOT / "docs").startswith("holds other files")
    (tmp_path / "kept.txt").touch()
    command = [sys.executable, "-m", "scripts.packaging.release", "--output", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert ended.stdout.startswith(f"not built: --output: {tmp_path} holds other files")
    assert (tmp_path / "kept.txt").exists()


def test_interpreters_are_what_they_say() -> None:
    found = pythons.found()
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert here in found
    for version, python in found.items():
        said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout
        assert said.startswith(f"Python {version}.")
