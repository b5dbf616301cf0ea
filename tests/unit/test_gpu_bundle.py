"""``scripts/gpu-bundle``: what it packs is pinned and whole, and libraries are there once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.gpu_bundle import PACKAGES, ROOT, THERE, copy_sources, requirements, slim, unmet


def test_every_package_is_pinned() -> None:
    found = requirements()
    assert len(found) >= len(PACKAGES.split())
    assert all("==" in requirement for requirement in found)


def distribution(site: Path, name: str, *needs: str) -> None:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_what_packed_packages_need_is_packed_or_there(tmp_path: Path) -> None:
    distribution(tmp_path, "Some_Server", "some.client>=1", "lost>=2", "torch", "docs; extra == 'docs'")
    distribution(tmp_path, "some-client", "typing-extras; python_version < '3.12'")
    assert "torch" in THERE
    assert unmet(tmp_path) == ["lost (by Some_Server)"]


def test_libraries_are_there_once_and_what_compilers_need_is_not(tmp_path: Path) -> None:
    kept = ("ucx/lib/libucp.so", "ucx/lib/libucp.so.0", "ucx/lib/libuct.so", "ucx/__init__.py")
    dropped = ("ucx/include/ucp.h", "ucx/lib/libucp.a", "ucx/bin/ucx_perftest", "ucx/lib/libucx_perftest.so")
    for name in (*kept, *dropped):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("another" if "uct" in name else "same")
    slim(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")) == sorted(kept)
    assert (tmp_path / kept[1]).is_symlink()
    assert (tmp_path / kept[1]).read_text() == "same"
    assert not (tmp_path / kept[2]).is_symlink()


def test_the_sources_have_what_runs_and_their_commit(tmp_path: Path) -> None:
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("this is no git checkout")
    copy_sources(tmp_path)
    needed = (
        "loadtest/gpu/__main__.py",
        "services/baton/demo_model/model.safetensors",
        "tests/gpu/test_cuda.py",
    )
    assert [name for name in needed if not (tmp_path / name).is_file()] == []
    assert (tmp_path / "COMMIT").read_text().strip()
