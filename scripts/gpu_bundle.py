"""Pack what ``python -m loadtest.gpu`` needs on a machine that has torch, and no network.

    scripts/gpu-bundle [--output dist/gpu-bundle.tar.xz]

The archive has the sources, the packages that a machine with torch, triton, numpy and transformers may lack,
at the versions of constraints.txt for Python 3.12 on x86-64, and ``run.sh``, which runs both calls. Libraries
lose what only compilers and their authors need, and are there once and not under each of their names.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LIMIT = 60_000_000
"""The most bytes of the archive."""
SOURCES = ("services", "kernels", "loadtest", "tests", "scripts", "pyproject.toml", "Makefile", "README.md")
PYTHON = "3.12"
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64"]
"""The platforms whose wheels are taken: pip compares their names, and knows no order of them."""
PACKAGES = """
annotated-doc annotated-types anyio certifi click execnet fastapi grpcio grpcio-health-checking
grpcio-reflection h11 httpcore httptools httpx hypothesis idna importlib-metadata iniconfig jinja2
lazy-importer libucx-cu13 libucxx-cu13 librmm-cu13 llguidance markdown-it-py markupsafe mdurl msgspec
opentelemetry-api orjson packaging pluggy prometheus-client protobuf psutil pydantic pydantic-core
pygments pytest pytest-asyncio pytest-timeout pytest-xdist pyyaml rapids-logger redis rich rmm-cu13
shellingham sortedcontainers starlette typer typing-extensions typing-inspection ucxx-cu13 uvicorn uvloop
zipp
"""
OPTIONAL = ("nixl-cu13",)
"""Packages that are packed where constraints.txt has them."""
THERE = frozenset({"torch", "numpy", "cuda-bindings", "cuda-core", "nvidia-ml-py"})
"""Packages of the other machine that those above need."""
DROPPED = re.compile(
    r"/(include|share|bin|cmake|pkgconfig|examples)/|\.(a|h|hpp|pyx|pxd|pyi)$|perftest|__pycache__"
    r"|/nixl_ep|mesonpy\.scripts|_cu13\.scripts|"
    r"libplugin_(OBJ|AZURE_BLOB|GUSLI|INFINIA|GPUNETIO|LIBFABRIC|Mooncake|HF3FS|GDS|GDS_MT)\."
)
"""The files that are left out of packages, by their paths."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "gpu-bundle.tar.xz")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "gpu-bundle"
        install(bundle / "site")
        if lacking := unmet(bundle / "site"):
            sys.exit(f"needed, and in no list of {__name__}: {', '.join(lacking)}")
        slim(bundle / "site")
        copy_sources(bundle / "baton")
        shutil.copy2(ROOT / "scripts" / "gpu_run.sh", bundle / "run.sh")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(args.output, "w:xz") as archive:
            archive.add(bundle, bundle.name)
    size = args.output.stat().st_size
    print(f"{args.output}: {size / 1e6:.1f} MB")
    if size > LIMIT:
        sys.exit(f"the archive is larger than {LIMIT / 1e6:.0f} MB")


def pins() -> dict[str, str]:
    """Return the requirement of each package of constraints.txt, by its normal name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = (line for line in lines if line and not line.startswith("#"))
    return {str(canonicalize_name(line.split("==")[0])): line for line in pinned}


def requirements() -> list[str]:
    known = pins()
    missing = [name for name in PACKAGES.split() if name not in known]
    if missing:
        sys.exit(f"constraints.txt has no {', '.join(missing)}")
    return [known[name] for name in (*PACKAGES.split(), *OPTIONAL) if name in known]


def install(site: Path) -> None:
    """Install the packages for the other machine's Python."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), "--no-deps"]
    command += ["--no-compile", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, *requirements()], check=True)


def unmet(site: Path) -> list[str]:
    """Return what packages in ``site`` need that is neither there nor on the other machine."""
    packed = {one.name: one for one in distributions(path=[str(site)])}
    have = {canonicalize_name(name) for name in packed} | THERE
    machine = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
    wanted = [(name, Requirement(text)) for name, one in packed.items() for text in one.requires or []]
    return sorted(
        f"{needed.name} (by {name})"
        for name, needed in wanted
        if (needed.marker is None or needed.marker.evaluate(machine))
        and canonicalize_name(needed.name) not in have
    )


def slim(site: Path) -> None:
    """Leave out what nothing here needs, and make one file of those that are alike within a folder."""
    for file in files_of(site):
        if DROPPED.search(f"/{file.relative_to(site)}"):
            file.unlink()
    first: dict[tuple[Path, bytes], Path] = {}
    for file in files_of(site):
        if ".so" in file.name and not file.is_symlink():
            same = first.setdefault((file.parent, hashlib.sha256(file.read_bytes()).digest()), file)
            if same != file:
                file.unlink()
                file.symlink_to(same.name)


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink())


def copy_sources(target: Path) -> None:
    """Copy the files that git knows, as they are now, and say of which commit they are."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    commit = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(commit, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (target / "COMMIT").write_text(told)


if __name__ == "__main__":
    main()
