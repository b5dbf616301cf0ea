"""Arrows between packages point one way, and the router runs where no torch is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"

BELOW = {
    "text",
    "tools",
    "hub",
    "request",
    "beam_search",
    "block_hash",
    "sampling_params",
    "structured_output",
    "grammar",
    "urgency",
    "logprobs",
    "connector",
    "telemetry",
    "v1",
    "errors",
    "options",
    "ready",
    "logs",
    "tls",
    "watched",
    "decoding",
    "message_bounds",
    "rpc_status",
    "switching",
    "parent",
    "wakeups",
    "supervision",
    "sockets",
}
"""What every package may use, these among each other too. They import nothing above themselves."""

ALLOWED = {
    "cli": {"router", "worker", "simulated", "bench", "nodes", "planner"},
    "planner": {"router"},
    "simulated": {"worker", "engine", "models", "parallel"},
    "bench": {"engine"},
    "router": set[str](),
    "worker": {"prefill", "decode", "engine", "speculation", "models", "nodes", "parallel", "baton_kernels"},
    "prefill": {"engine", "models"},
    "decode": {"engine", "models"},
    "rank": {"engine", "models", "parallel", "baton_kernels"},
    "engine": {"speculation", "models", "parallel", "baton_kernels"},
    "speculation": {"models", "parallel", "baton_kernels"},
    "models": {"parallel", "baton_kernels"},
    "nodes": {"parallel"},
    "parallel": set[str](),
    "baton_kernels": set[str](),
    "demo_model": set[str](),
    **{name: set[str]() for name in BELOW},
}
"""Package → the packages it may import besides itself and BELOW."""


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


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: module_name(path))
def test_arrows(path: Path) -> None:
    here = unit(module_name(path))
    if here is None or here == "__main__":  # the package itself and its entry point hold nothing
        return
    assert here in ALLOWED, f"a new package: give {here} its place in ALLOWED and in docs/architecture.md"
    wrong = []
    for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        there = unit(name)
        known = there in ALLOWED  # `from baton import __version__` names no package
        if known and there != here and there not in BELOW | ALLOWED[here]:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} must not import {there}")
    assert not wrong, "\n".join(wrong)


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
        "worker.config",
        "worker.main",
        "simulated",
        "bench.serve",
        "bench.sweep",
    ],
)
def test_it_imports_where_there_is_no_torch(package: str) -> None:
    blocked = {"torch", "triton", "safetensors", "transformers", "baton_kernels"}
    program = WITHOUT_TORCH.format(blocked=blocked, packages=[f"baton.{package}"])
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_router_that_needs_neither_kubernetes_nor_redis_does_not_import_them() -> None:
    program = (
        "import baton.cli.main, baton.router.main, sys; "
        "print({'kubernetes', 'aiohttp', 'redis'} & {name.partition('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr
