"""Settings for every test."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import re
from collections.abc import Collection, Generator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from scripts.phases import FILES_OF_MARKS

# Importing all tests makes millions of objects that stay: there is no garbage to look for until that is over.
gc.disable()

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Before anything else imports triton: transformers does.
    import tests.support.interpreted  # noqa: F401

# No test trusts anyone outside. Reading whom the world trusts takes 50 ms for each HTTP client that is made.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# The models here are tiny: handing their operations to more threads costs more than computing them.
torch.set_num_threads(1)

# A machine that is busy is no bug; what hangs is ended by the tests' own timeout.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what was imported from garbage collection: a collection among it takes half a second, and tests
    ask for many."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # triton's bindings name all that is left of them at the end
        gc.enable()


def pytest_report_header(config: pytest.Config) -> str | None:
    if "nixl" in config.option.markexpr:
        return None
    return "tests marked nixl are left out where others are collected: run them with -m nixl"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Keep the two UCX out of one process, and every test in a phase."""
    check_marks(_marks_of_files(items))
    result = yield  # what -k and -m leave out is gone
    loading = [item for item in items if item.get_closest_marker("nixl")]
    if 0 < len(loading) < len(items):
        items[:] = [item for item in items if not item.get_closest_marker("nixl")]
        config.hook.pytest_deselected(items=loading)
    return result


def _marks_of_files(items: list[pytest.Item]) -> dict[Path, set[str]]:
    marks: dict[Path, set[str]] = {}
    for item in items:
        marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
    return marks


def check_marks(of_files: Mapping[Path, Collection[str]]) -> None:
    """Refuse marks that `scripts.phases` would not find in a file: nobody would run these tests."""
    for path, marks in of_files.items():
        for mark, pattern in FILES_OF_MARKS.items():
            if mark in marks and not re.search(pattern, path.read_text()):
                raise pytest.UsageError(f"{path} has tests marked {mark} and no {pattern!r} in its text")
