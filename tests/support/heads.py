"""Random Medusa heads and EAGLE layers for any model directory, saved as those of the demo model are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from baton.models.config import ModelConfig
from baton.speculation.eagle import EagleLayer
from baton.speculation.medusa import MedusaConfig, MedusaHeads


def save_medusa(path: Path, target: Path, heads: int = 3, layers: int = 1, **overrides: object) -> Path:
    """Heads that fit the model in ``target``, in ``path`` (created), but for ``overrides`` of config.json."""
    model = ModelConfig.from_dir(target)
    module = MedusaHeads(MedusaConfig(model.hidden_size, model.vocab_size, heads, layers), torch.float32)
    config = {
        "speculative_method": "medusa",
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
    }
    return _save(path, module, {**config, **overrides})


def save_eagle(path: Path, target: Path, **overrides: object) -> Path:
    """As :func:`save_medusa`."""
    model = ModelConfig.from_dir(target)
    config = {
        "speculative_method": "eagle",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": 1e-5,
    }
    layer = EagleLayer(ModelConfig.from_dict(config, where="eagle"), torch.float32)
    return _save(path, layer, {**config, **overrides})


def _save(path: Path, module: nn.Module, config: dict[str, object]) -> Path:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[1] ** -0.5)
    path.mkdir(parents=True)
    save_file(module.state_dict(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path
