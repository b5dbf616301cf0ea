"""The images of a release: how each is built, and with which extras of the wheel."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageKind:
    """An image, and the extras that it installs.

    ``limit``: the most bytes of its layers, compressed as a registry keeps them; None: there is none.
    """

    name: str
    dockerfile: str
    extras: tuple[str, ...]
    tag_suffix: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    limit: int | None = None
    compiler: bool = False
    """Whether Debian's g++ is in it."""

    def tag(self, registry: str, version: str) -> str:
        return f"{registry}/{self.name}:{version}{self.tag_suffix}"

    def build(self, registry: str, version: str, revision: str, created: str) -> list[str]:
        """Return the command that builds the image from the root of the repository."""
        arguments = {"VERSION": version, "REVISION": revision, "CREATED": created, **dict(self.arguments)}
        given = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        return ["docker", "build", "-f", self.dockerfile, *given, "-t", self.tag(registry, version), "."]


KINDS = (
    ImageKind("baton-router", "docker/router.Dockerfile", ("kubernetes", "sim", "otel"), limit=200_000_000),
    ImageKind(
        "baton-worker",
        "docker/worker.Dockerfile",
        ("worker",),
        tag_suffix="-cpu",
        arguments=(("DEVICE", "cpu"),),
        limit=1_000_000_000,
        compiler=True,
    ),
    ImageKind(
        "baton-worker",
        "docker/worker.Dockerfile",
        ("worker", "gpu", "ucx", "nixl"),
        tag_suffix="-cuda",
        arguments=(("DEVICE", "cuda"),),
        compiler=True,
    ),
)


def no_docker() -> str:
    """Return why images cannot be built here; empty where they can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True)
    return "" if asked.returncode == 0 else "no Docker daemon answers"
