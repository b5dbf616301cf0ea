"""A model of the hub is fetched once before a ring starts, and seen to come."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from baton.cli import fetching
from baton.cli.derived import Given
from baton.cli.fetching import with_files
from baton.process.options import ConfigError, StartError
from tests.support.fake_hub import COMMIT, fake_hub

NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache that a model with a megabyte of weights is fetched into."""
    files = tmp_path / "files"
    files.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (files / name).write_text("{}")
    for number in (1, 2):
        (files / f"model-{number}.safetensors").write_bytes(bytes([number]) * 500_000)
    cache = tmp_path / "cache"
    with fake_hub(NAME, files) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(fetching, "LINES_EVERY_S", 0.0)
        yield cache


def given(**values: object) -> Given:
    return Given({"load_format": "auto", "served_model_name": [], **values})


def test_lines_tell_of_a_download_where_there_is_no_terminal(
    hub: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = with_files(given(), NAME, "main").values
    path = Path(str(found["model"]))
    assert path.name == COMMIT and hub in path.parents
    assert (path / "model-2.safetensors").stat().st_size == 500_000
    assert found["served_model_name"] == [NAME]
    out, told = capfd.readouterr()
    assert out == ""
    first, *between, last = told.splitlines()
    assert first == f"{NAME}: fetching from the hub"
    assert all(re.fullmatch(rf"{NAME}: \d\.\d of \d\.\d MB", line) for line in between)
    assert between[-1] == f"{NAME}: 1.0 of 1.0 MB"
    assert last.startswith(f"{NAME}: is in {path}, after ")


def test_a_bar_is_drawn_on_a_terminal(
    hub: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fetching, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=100)
    )
    with_files(given(), NAME)
    out, told = capfd.readouterr()
    assert out == ""
    assert "1.0/1.0 MB" in told
    assert "fetching from the hub" not in told


def test_dummy_weights_are_not_fetched(hub: Path) -> None:
    found = with_files(given(load_format="dummy", served_model_name=["mine"]), NAME).values
    assert {file.name for file in Path(str(found["model"])).iterdir()} == {"config.json", "tokenizer.json"}
    assert found["served_model_name"] == ["mine"]


def test_what_the_hub_does_not_have_is_one_line(hub: Path) -> None:
    with pytest.raises(StartError, match="org/other: no such directory, and none of that name on the hub"):
        with_files(given(), "org/other")


def test_what_is_on_this_machine_stays_as_it_is(tmp_path: Path) -> None:
    for model in ("demo", str(tmp_path), "./nowhere"):
        assert with_files(given(), model).values == {**given().values, "model": model}
    with pytest.raises(ConfigError, match="--revision: demo is no model of the hub, and has none"):
        with_files(given(), "demo", "v2")
