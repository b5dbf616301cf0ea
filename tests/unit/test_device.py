"""What a worker computes in where nobody says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton.engine import device
from baton.engine.device import choose_dtype
from tests.support.tiny_models import ModelDir


@pytest.mark.parametrize(
    ("saved", "kernels", "instructions", "chosen"),
    [
        ("float32", True, True, "float32"),
        ("bfloat16", True, True, "bfloat16"),
        ("bfloat16", True, False, "bfloat16"),
        ("bfloat16", False, True, "bfloat16"),
        ("bfloat16", False, False, "float32"),
        ("float16", True, True, "float32"),
        ("float16", False, False, "float32"),
    ],
)
def test_auto_is_what_is_fast(
    saved: str,
    kernels: bool,
    instructions: bool,
    chosen: str,
    model_dir: ModelDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "kernels_for", lambda *_: object() if kernels else None)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": instructions})
    fields = json.loads((model_dir("llama") / "config.json").read_text())
    fields.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"torch_dtype": saved}))
    assert choose_dtype("auto", "cpu", tmp_path) == chosen
    assert choose_dtype("auto", "cuda", tmp_path) == "auto"
    assert choose_dtype("float16", "cpu", tmp_path) == "float16"
