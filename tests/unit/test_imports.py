"""Arrows between folders point one way, and the router runs where no torch is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep  # `make lint` runs it too

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"

LAYERS = (
    {"v1", "demo_model", "baton_kernels"},
    {"core", "process"},
    {"net", "text", "hub"},
    {"telemetry", "parallel", "greeting", "request", "tools", "models.quantization"},
    {"grammar", "models", "transport", "engine.kv", "bench.workload"},
    {"transport.ranks", "engine.sampling", "speculation", "bench", "models.families", "models.methods"},
    {"handoff", "engine", "nodes", "bench.sweep"},
    {"roles", "rank", "bench.offline"},
    {"worker"},
    {"simulated"},
    {"router.placement", "router.processes"},
    {"router.discovery", "router.shared", "router.traces", "router.ui"},
    {"router.security", "router.pulse"},
    {"router.fleet"},
    {"router.dispatch"},
    {"router.admission"},
    {"router.api"},
    {"router.api.http.server"},
    {"router.api.http.openai", "router.api.http.ops"},
    {"router.api.http.anthropic", "router.api.http.responses"},
    {"router.api.http.preparing"},
    {"router.api.http", "router.api.grpc", "router.preparation"},
    {"router"},
    {"planner", "doctor"},
    {"doctor.probes"},
    {"cli.vllm"},
    {"cli"},
)
"""All folders, from the bottom up. A folder imports folders of lower layers only, and itself."""

BELOW = {
    "core",
    "process",
    "net",
    "text",
    "tools",
    "request",
    "grammar",
    "greeting",
    "hub",
    "v1",
}
"""Packages that every package above them may use. They know nothing of routers, workers and engines."""

ALLOWED = {
    "cli": {"router", "worker", "simulated", "bench", "models", "nodes", "planner", "doctor"},
    "doctor": {"router", "worker", "transport", "baton_kernels"},
    "planner": {"router", "handoff", "telemetry"},
    "router": {"handoff", "telemetry"},
    "simulated": {"worker", "engine", "models", "parallel", "transport", "telemetry", "baton_kernels"},
    "bench": {"engine"},
    "worker": {
        *("roles", "handoff", "transport", "engine", "speculation", "models", "nodes", "parallel"),
        *("telemetry", "baton_kernels"),
    },
    "roles": {"engine", "handoff", "transport", "telemetry", "baton_kernels"},
    "rank": {"engine", "models", "parallel", "transport", "baton_kernels"},
    "nodes": {"parallel", "transport"},
    "engine": {"speculation", "models", "parallel", "baton_kernels"},
    "speculation": {"models", "parallel", "baton_kernels"},
    "models": {"parallel", "baton_kernels"},
    "handoff": {"transport", "telemetry", "baton_kernels"},
    "transport": {"telemetry", "baton_kernels"},
    "telemetry": set[str](),
    "parallel": set[str](),
    "demo_model": set[str](),
    "baton_kernels": set[str](),
    **{name: set[str]() for name in BELOW},
}
"""Package → the packages that it may import besides itself and BELOW. Whoever computes may not import
telemetry: it declares its figures, and those who serve it export them."""

AT_THE_ROOT = {"__init__.py", "__main__.py", "hub.py"}
"""The only modules that lie in no folder."""


def modules() -> Iterator[Path]:
    for source in (SERVICES / "baton", ROOT / "kernels" / "baton_kernels"):
        for path in sorted(source.rglob("*.py")):
            if path.parent.name != "v1":  # generated
                yield path


def unit(name: str) -> str | None:
    """The package that a dotted name belongs to: ``baton.router.api`` → ``router``."""
    first, _, rest = name.partition(".")
    if first == "baton":
        return rest.partition(".")[0] or None
    return first if first == "baton_kernels" else None


def module_name(path: Path) -> str:
    root = SERVICES if SERVICES in path.parents else ROOT / "kernels"
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write it in full"
            if node.module == "baton":
                for alias in node.names:
                    yield node.lineno, f"baton.{alias.name}"
            elif node.module:
                yield node.lineno, node.module


def folder(name: str) -> str | None:
    """The folder of a module: ``baton.router.api.errors`` → ``router.api``. None: no code of Baton's."""
    first, _, rest = name.partition(".")
    if first == "baton_kernels":
        return first
    if first != "baton" or not rest:
        return None
    parts = rest.split(".")
    while parts:
        path = SERVICES / "baton" / Path(*parts)
        if path.is_dir():
            return ".".join(parts)
        if len(parts) == 1:
            return parts[0]  # hub, or a name of the package itself
        parts.pop()
    return None


def layer(name: str) -> int | None:
    """The number of a folder's layer, from the bottom; None: it has none."""
    return next((number for number, folders in enumerate(LAYERS) if name in folders), None)


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: module_name(path))
def test_arrows(path: Path) -> None:
    here = unit(module_name(path))
    if here is None or here == "__main__":  # the package itself and its entry point hold nothing
        return
    assert here in ALLOWED, f"a new package: give {here} its place in ALLOWED and in docs/architecture.md"
    room = folder(module_name(path))
    level = layer(room) if room else None
    assert level is not None, f"a new folder: give {room} its place in LAYERS"
    wrong = []
    for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        there, other = unit(name), folder(name)
        known = there in ALLOWED  # `from baton import __version__` names no package
        if not known or other is None or other == room:
            continue
        below = layer(other)
        if there != here and there not in BELOW | ALLOWED[here]:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} must not import {there}")
        elif below is None or below >= level:
            wrong.append(
                f"{path.relative_to(ROOT)}:{line}: {room} must not import {other}, which is not below it"
            )
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    files = {module_name(path): path for path in modules()}
    graph = {
        name: {
            there
            for _, there in imported_modules(ast.parse(path.read_text(encoding="utf-8")), files)
            if there != name
        }
        for name, path in files.items()
    }
    assert not circle(graph)


def imported_modules(tree: ast.AST, files: Container[str]) -> Iterator[tuple[int, str]]:
    """Like `imported`, with ``from package import module`` told as the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in files else node.module
    yield from imported(tree)


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """A way from a module back to itself; empty: there is none."""
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_only_the_hub_lies_at_the_root() -> None:
    assert {path.name for path in (SERVICES / "baton").glob("*.py")} == AT_THE_ROOT


WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " must not be imported here")

sys.meta_path.insert(0, Blocked())
for package in {packages!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), package + "."):
        importlib.import_module(found.name)
"""


@pytest.mark.parametrize(
    "package",
    [
        "router",
        "text",
        "hub",
        "telemetry",
        "cli",
        "planner",
        "doctor",
        "worker.config",
        "worker.main",
        "simulated",
        "bench.serve",
        "bench.sweep",
    ],
)
def test_it_imports_where_there_is_no_torch(package: str) -> None:
    blocked = {"torch", "triton", "safetensors", "transformers"}
    program = WITHOUT_TORCH.format(blocked=blocked, packages=[f"baton.{package}"])
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_a_router_that_needs_neither_kubernetes_nor_redis_does_not_import_them() -> None:
    program = (
        "import baton.cli.main, baton.router.main, sys; "
        "print({'kubernetes', 'aiohttp', 'redis'} & {name.partition('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_no_public_class_name_is_there_twice() -> None:
    generated = (SERVICES / "baton" / "v1").glob("*.py")
    places: dict[str, list[str]] = {}
    for path in (*modules(), *generated):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module_name(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}
