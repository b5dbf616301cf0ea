"""What is built on uvicorn's inside is there in every version of it that may be installed."""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.router.api.http.server.connection import Connection

ROOT = Path(__file__).parents[2]
PRIVATE = [name for name in vars(Connection) if name.startswith("_") and hasattr(HttpToolsProtocol, name)]


def test_the_versions_that_may_be_installed_have_both_bounds() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [uvicorn] = [each for each in map(Requirement, needed) if each.name == "uvicorn"]
    assert {each.operator for each in uvicorn.specifier} == {">=", "<"}
    assert uvicorn.specifier.contains(version("uvicorn"))
    assert not uvicorn.specifier.contains("0.44.0"), (
        "it starts requests without the method that is overridden"
    )


def test_private_methods_are_overridden_with_their_own_parameters() -> None:
    assert "_start_asgi_task" in PRIVATE
    for name in PRIVATE:
        ours, theirs = getattr(Connection, name), getattr(HttpToolsProtocol, name)
        if inspect.isfunction(ours) and not name.startswith("__"):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), (
                name
            )
