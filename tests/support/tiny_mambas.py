"""Tiny random models of the families whose layers keep a state of Mamba-2 or of a short convolution, beside
those of ``tests.support.tiny_models``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
)

from tests.support.tiny_models import Recipe, rope_of

HYBRID = ["mamba", "attention", "mamba"]
MAMBA: Mapping[str, object] = MappingProxyType(
    {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 32}
)
GRANITE: Mapping[str, object] = MappingProxyType(
    {
        **MAMBA,
        "layer_types": HYBRID,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "shared_intermediate_size": 40,
    }
)
NEMOTRON: Mapping[str, object] = MappingProxyType(
    {
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 4,
        "ssm_state_size": 16,
        "chunk_size": 32,
        "num_hidden_layers": None,
    }
)

MAMBAS: Mapping[str, Recipe] = MappingProxyType(
    {
        "nemotron-h": Recipe(NemotronHConfig, {**NEMOTRON, "hybrid_override_pattern": "M-*M-"}),
        "nemotron-h-biased": Recipe(
            NemotronHConfig,
            {
                **NEMOTRON,
                "hybrid_override_pattern": "-M*M",
                "n_groups": 1,
                "mlp_bias": True,
                "use_bias": True,
                "use_conv_bias": False,
            },
        ),
        "nemotron-h-experts": Recipe(
            NemotronHConfig,
            {
                **NEMOTRON,
                "hybrid_override_pattern": "ME*EM-E",
                "n_routed_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "moe_shared_expert_intermediate_size": 44,
                "routed_scaling_factor": 2.5,
            },
        ),
        "nemotron-h-latent": Recipe(
            NemotronHConfig,
            {
                **NEMOTRON,
                "hybrid_override_pattern": "ME*E",
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_group": 4,
                "topk_group": 2,
                "moe_intermediate_size": 40,
                "moe_shared_expert_intermediate_size": 32,
                "moe_latent_size": 24,
                "mlp_bias": True,
            },
        ),
        "granite-hybrid": Recipe(
            GraniteMoeHybridConfig,
            {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 36},
        ),
        "granite-hybrid-dense": Recipe(
            GraniteMoeHybridConfig,
            {
                **GRANITE,
                "num_local_experts": 0,
                "mamba_n_groups": 2,
                "mamba_proj_bias": True,
                "position_embedding_type": "rope",
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        "falcon-h1": Recipe(
            FalconH1Config,
            {
                **MAMBA,
                "mamba_d_ssm": 96,
                "embedding_multiplier": 2.5,
                "lm_head_multiplier": 0.7,
                "mlp_multipliers": [0.8, 1.3],
                "key_multiplier": 0.6,
                "attention_in_multiplier": 1.2,
                "attention_out_multiplier": 0.9,
                "ssm_multipliers": [1.1, 0.9, 0.8, 1.2, 0.7],
                "ssm_in_multiplier": 1.3,
                "ssm_out_multiplier": 0.6,
            },
        ),
        "falcon-h1-normed": Recipe(
            FalconH1Config,
            {
                **MAMBA,
                "num_hidden_layers": 2,
                "mamba_d_ssm": None,
                "mamba_n_groups": 2,
                "mamba_rms_norm": True,
                "projectors_bias": True,
                "attention_bias": True,
                "mlp_bias": True,
                "ssm_multipliers": [1.1, 0.9, 0.8, 1.2, 0.7],
                "tie_word_embeddings": True,
            },
        ),
        "falcon-h1-gated-first": Recipe(
            FalconH1Config,
            {
                **MAMBA,
                "num_hidden_layers": 2,
                "mamba_d_ssm": 64,
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
                "mamba_proj_bias": True,
            },
        ),
        "bamba": Recipe(BambaConfig, {**MAMBA, "attn_layer_indices": [1]}),
        "bamba-biased": Recipe(
            BambaConfig,
            {
                **MAMBA,
                "mamba_n_groups": 2,
                "mamba_conv_bias": False,
                "attn_layer_indices": [0, 2],
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        "lfm2": Recipe(
            Lfm2Config,
            {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
        ),
        "lfm2-biased": Recipe(
            Lfm2Config,
            {
                "full_attn_idxs": [2],
                "conv_bias": True,
                "conv_L_cache": 4,
                "block_auto_adjust_ff_dim": False,
                "rope_parameters": rope_of("default"),
                "tie_word_embeddings": False,
            },
        ),
        "lfm2-moe": Recipe(
            Lfm2MoeConfig,
            {
                "num_hidden_layers": 4,
                "layer_types": ["conv", "full_attention", "conv", "conv"],
                "num_dense_layers": 1,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "routed_scaling_factor": 1.5,
            },
        ),
        "lfm2-moe-unbiased": Recipe(
            Lfm2MoeConfig,
            {
                "layer_types": ["conv", "conv", "full_attention"],
                "num_dense_layers": 0,
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "use_expert_bias": False,
                "norm_topk_prob": False,
                "tie_word_embeddings": False,
            },
        ),
    }
)
"""Name -> builder, as ``TINY_MODELS``."""
