"""What is installed: the wheel has all that runs, its licences and types, and nothing else."""

from __future__ import annotations

import re
import subprocess
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import baton
from scripts.packaging.distributions import ROOT, WHEEL_LIMIT

VENDORED = "baton/router/ui/page/vendor/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [path] = WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]
    )
    return Path(path)


@pytest.fixture(scope="module")
def inside(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(archive.namelist())


def test_the_wheel_has_every_file_of_both_packages(inside: frozenset[str]) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "services/baton"]
    listed = subprocess.run(
        [*command, "kernels/baton_kernels"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    there = {path.partition("/")[2] for path in listed if (ROOT / path).exists()}
    assert {name for name in inside if ".dist-info/" not in name} == there


@pytest.mark.parametrize(
    "kind",
    [
        *(r"baton_kernels/cpu/native\.cpp", r"baton_kernels/cpu/\w+\.h", r"baton/router/shared/\w+\.lua"),
        *(r"baton/demo_model/model\.safetensors", r"baton/demo_model/tokenizer\.json"),
        *(r"baton/router/ui/page/index\.html", r"baton/py\.typed", r"baton_kernels/py\.typed"),
        *(r"baton/v1/\w+_pb2\.pyi", r"baton-[\d.]+\.dist-info/licenses/LICENSE"),
    ],
)
def test_the_wheel_has_what_is_no_module(kind: str, inside: frozenset[str]) -> None:
    assert any(re.fullmatch(kind, name) for name in inside)


def test_what_is_vendored_has_its_licence(inside: frozenset[str]) -> None:
    vendored = {name.removeprefix(VENDORED) for name in inside if name.startswith(VENDORED)}
    scripts = {name for name in vendored if Path(name).suffix in (".js", ".css", ".mjs")}
    licences = [ROOT / "services" / VENDORED / name for name in vendored if "LICENSE" in name]
    told = "\n".join(path.read_text() for path in licences)
    assert {name for name in scripts if Path(name).name not in told} == set()
    packed = {name for name in inside if ".dist-info/licenses/" in name and VENDORED in name}
    assert len(packed) == len(licences)


def test_the_wheel_is_small_and_named_after_the_only_version(wheel: Path) -> None:
    assert wheel.stat().st_size <= WHEEL_LIMIT
    assert wheel.name == f"baton-{baton.__version__}-py3-none-any.whl"


def test_other_files_repeat_the_version() -> None:
    chart = yaml.safe_load((ROOT / "helm/baton/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (baton.__version__, baton.__version__)
    latest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None
    assert latest[1] == baton.__version__


def test_the_sdist_has_what_the_wheel_is_built_of(inside: frozenset[str]) -> None:
    builder = SdistBuilder(str(ROOT))
    packed = {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}
    modules = {name for name in inside if ".dist-info/" not in name}
    wanted = {f"services/{name}" if name.startswith("baton/") else f"kernels/{name}" for name in modules}
    assert wanted - packed == set()
    assert {"constraints.txt", "CHANGELOG.md", "proto/baton/v1/worker.proto"} <= packed
    assert {name for name in packed if name.startswith(("tests/", "docs/", "loadtest/"))} == set()


def test_the_command_is_where_its_entry_point_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert archive.read(name).decode().split() == [
            "[console_scripts]",
            "baton",
            "=",
            "baton.__main__:main",
        ]
    [command] = [
        each for each in entry_points(group="console_scripts") if each.value == "baton.__main__:main"
    ]
    assert callable(command.load())
