"""How heads are stored: config.json and safetensors in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor


def write(directory: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    (directory / "model.safetensors").write_bytes(to_safetensors(weights, metadata={"format": "pt"}))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
