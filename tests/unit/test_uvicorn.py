"""What is built on uvicorn's inside is there in every version of it that may be installed."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.router.api.http.server.connection import Connection

ROOT = Path(__file__).parents[2]
OVERRIDDEN = ("_should_upgrade", "_start_asgi_task")
CALLED = ("_unset_keepalive_if_required",)


def test_the_versions_that_may_be_installed_have_both_bounds() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [uvicorn] = [each for each in map(Requirement, needed) if each.name == "uvicorn"]
    assert {each.operator for each in uvicorn.specifier} == {">=", "<"}
    assert uvicorn.specifier.contains(version("uvicorn"))
    assert not uvicorn.specifier.contains("0.44.0"), (
        "it starts requests without the method that is overridden"
    )


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_private_methods_are_overridden_with_their_own_parameters(name: str) -> None:
    ours, theirs = vars(Connection)[name], getattr(HttpToolsProtocol, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_no_other_private_method_is_relied_on() -> None:
    private = {name for name in vars(HttpToolsProtocol) if re.fullmatch(r"_[a-z]\w*", name)}
    assert private & vars(Connection).keys() == set(OVERRIDDEN)
    assert private & set(re.findall(r"\bself\.(_[a-z]\w*)\(", inspect.getsource(Connection))) == set(CALLED)
