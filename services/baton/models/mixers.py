"""What layers mix tokens by, one module for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from baton.models.attention import Attention
from baton.models.config import ModelConfig
from baton.models.delta_attention import DeltaAttention
from baton.models.latent_attention import LatentAttention
from baton.models.lightning_attention import LightningAttention
from baton.models.mamba import Mamba2
from baton.models.mixer import Mixer
from baton.models.mixer_config import MixerKind
from baton.models.quantization.base import QuantizationScheme
from baton.models.short_conv import ShortConv
from baton.parallel.collectives import Parallel

MIXER_NAMES: Mapping[MixerKind, str] = MappingProxyType(
    {
        "attention": "self_attn",
        "latent": "self_attn",
        "delta": "linear_attn",
        "mamba": "mamba",
        "conv": "conv",
    }
)
"""The names of mixers in their layer, as most checkpoints spell them."""


def new_mixer(
    kind: MixerKind,
    config: ModelConfig,
    layer: int,
    dtype: torch.dtype,
    parallel: Parallel,
    scheme: QuantizationScheme,
    rotation: int,
) -> Mixer:
    """A mixer of one layer. ``rotation``: the index of its rotation among ``Step.rotations``."""
    match kind:
        case "attention":
            return Attention(config, layer, dtype, parallel, scheme, rotation)
        case "delta" if config.delta is not None and config.delta.kind == "lightning":
            return LightningAttention(config, layer, dtype, parallel, scheme, rotation)
        case "delta":
            return DeltaAttention(config, layer, dtype, parallel, scheme)
        case "latent":
            return LatentAttention(config, layer, dtype, parallel, scheme, rotation)
        case "mamba":
            return Mamba2(config, layer, dtype, parallel, scheme)
        case "conv":
            return ShortConv(config, layer, dtype, parallel, scheme)
