"""What several of the unit tests' files want."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.support.deep import all_deep_but
from tests.support.fake_engine import AHEAD
from tests.support.family_models import FAMILY_MODELS
from tests.support.tiny_models import ModelDir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """Where the tiny model of a name lies; made when it is first asked for."""
    root = tmp_path_factory.mktemp("models")

    def build(name: str) -> Path:
        path = root / name
        return path if path.exists() else FAMILY_MODELS[name](path)

    return build


@pytest.fixture(scope="module", params=all_deep_but(["late"], ["off", "late"]))
def launched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a file's tests twice: with steps that are over before the next begins, and launched ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(AHEAD, request.param)
        yield


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked ``both_loops`` run on uvloop too, as the router does."""
    usual = {"asyncio": asyncio.new_event_loop}
    return (
        usual if item.get_closest_marker("both_loops") is None else {**usual, "uvloop": uvloop.new_event_loop}
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``both_loops`` are deep on the event loop that the router does not use."""
    for item in items:
        if item.get_closest_marker("both_loops") is not None and "asyncio" in _parameters(item):
            item.add_marker(pytest.mark.deep)


def _parameters(item: pytest.Item) -> list[str]:
    """What is between the brackets of a test's name."""
    return item.name.partition("[")[2].rstrip("]").split("-")
