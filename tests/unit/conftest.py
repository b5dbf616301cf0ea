"""What several of the unit tests' files want."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import TINY_MODELS, ModelDir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """Where the tiny model of a name lies; made when it is first asked for."""
    root = tmp_path_factory.mktemp("models")

    def build(name: str) -> Path:
        path = root / name
        return path if path.exists() else TINY_MODELS[name](path)

    return build
