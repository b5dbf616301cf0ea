"""What ``loadtest.lost_streams`` asks: of any model, in its own name and its own token ids."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.models.config import ModelConfig
from tests.support.chaos.streams import asks, made

TOKEN_IDS = ("logit_bias", "stop_token_ids", "allowed_token_ids")


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "kimi-linear"])
def test_requests_are_such_as_the_model_can_answer(name: str, tmp_path: Path) -> None:
    path = Path(made(tmp_path, name))
    config = ModelConfig.from_dir(path)
    asked = asks(random.Random(1), 60, 160, str(path))
    assert {ask.body["model"] for ask in asked} == {name}
    ids = [int(token) for ask in asked for field in TOKEN_IDS for token in ask.body.get(field, ())]
    assert ids
    assert max(ids) < config.vocab_size
    longest = max(len(ask.body.get("prompt") or str(ask.body["messages"])) for ask in asked)
    assert 1024 < longest < config.max_model_len, "a token is a byte"


def test_the_demo_model_is_itself(tmp_path: Path) -> None:
    assert made(tmp_path, "demo") == "demo"
    assert {ask.body["model"] for ask in asks(random.Random(1), 5, 160, "demo")} == {"demo"}
